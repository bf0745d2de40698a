"""One update of N engines, for both paths: its steps, the group that carries the bytes, what an abort leaves."""
