"""Handles: one engine, however it is reached, and the fan-out over many. No torch."""
