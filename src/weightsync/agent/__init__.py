"""The agent: the process beside a trainer that proves and serves its publications."""
