"""The main job: two processes train a small language model, an engine serves each version, a table proves it."""
