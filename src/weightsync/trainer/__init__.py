"""What trains: publishes its weights, or pushes them."""
