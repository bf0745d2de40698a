"""The face of the library: `publish` and `push` for trainers, `serve` for rollout hosts. See design/0019.

Thin over `WeightManager`, `PushSync` and `RolloutService`: here is what users would otherwise write around these.
"""
