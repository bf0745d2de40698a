"""What every HTTP face shares: tokens, typed errors, limits, how a server is run."""
