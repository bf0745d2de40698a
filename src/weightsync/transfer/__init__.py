"""How bytes are moved."""
