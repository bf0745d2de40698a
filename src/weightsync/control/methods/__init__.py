"""Ways to bring a version to the rollout side; each is a `SyncMethod`."""
