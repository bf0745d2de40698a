"""How weights leave a trainer."""
