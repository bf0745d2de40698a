"""The process that writes a trainer's publications into an object store; beside the agent, and a receiver of it."""
