"""How weights enter an engine."""
