"""How weights are made small and proved."""
