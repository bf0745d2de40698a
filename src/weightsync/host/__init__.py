"""The rollout service: follows agents, stages versions, and updates the engines of its host."""
