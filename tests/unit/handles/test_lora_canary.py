"""CanaryWatch: what is too far, what stands still, and what says nothing."""

from __future__ import annotations

import pytest

from weightsync.errors import CanaryError
from weightsync.handles.lora_canary import CanaryWatch
from weightsync.types import Manifest, TensorSpec, Version
from weightsync.types.adapter import Adapter, canonical_config
from weightsync.types.canary import Canary

CONFIG = canonical_config({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]})
TOKENS = (5, 6, 7)


def manifest(number: int, digest: int) -> Manifest:
    return Manifest(
        version=Version(run_id="r", number=number), model_id="actor", artifact="lora", adapter=Adapter(config=CONFIG),
        tensors=(TensorSpec(name="x", dtype="float32", shape=(1,)),), model_digest=f"wsd2:{digest:032x}",
    )  # fmt: skip


def canary(*logprobs: float) -> Canary:
    return Canary(tokens=TOKENS, logprobs=logprobs, tolerance=0.1)


def test_an_engine_that_follows_its_trainer_is_well() -> None:
    watch = CanaryWatch()
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.01, -2.0))
    watch.committed()
    watch.check(manifest(2, 2), canary(-1.5, -2.0), (-1.5, -2.02))
    assert watch.last is not None
    assert (watch.last.version, round(watch.last.worst, 3), round(watch.last.moved or 0, 3)) == ("r/2", 0.02, 0.49)


def test_one_that_says_something_else_is_refused() -> None:
    with pytest.raises(CanaryError) as raised:
        CanaryWatch().check(manifest(1, 1), canary(-1.0, -2.0), (-1.0, -2.2))
    assert raised.value.details["still"] is False


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_what_is_no_number_is_refused(odd: float) -> None:
    for scores in ((odd, -2.0), (-1.0, odd)):
        with pytest.raises(CanaryError, match="no number"):
            CanaryWatch().check(manifest(1, 1), canary(-1.0, -2.0), scores)


def test_one_that_stands_still_is_refused_though_it_is_near() -> None:
    """The trainer's has moved by less than the tolerance. Seen red without the look at the version before."""
    watch = CanaryWatch()
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.01, -2.0))
    watch.committed()
    with pytest.raises(CanaryError, match="stands still") as raised:
        watch.check(manifest(2, 2), canary(-1.05, -2.0), (-1.01, -2.0))
    assert raised.value.details["still"] is True


def test_a_change_that_is_none_may_stand_still() -> None:
    """The same bytes; or others that the prompt does not feel, as the trainer itself says."""
    watch = CanaryWatch()
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.01, -2.0))
    watch.committed()
    watch.check(manifest(2, 1), canary(-1.0, -2.0), (-1.01, -2.0))
    watch.committed()
    watch.check(manifest(3, 3), canary(-1.0, -2.0), (-1.01, -2.0))


def test_replicas_are_asked_each_for_itself() -> None:
    watch = CanaryWatch()
    for replica in (0, 1):
        watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.0 - replica / 100, -2.0), replica=replica)
    assert watch.last is not None
    assert (watch.last.num_replicas, round(watch.last.worst, 3)) == (2, 0.01)
    watch.committed()
    watch.check(manifest(2, 2), canary(-1.5, -2.0), (-1.5, -2.0), replica=0)
    with pytest.raises(CanaryError, match="replica 1"):
        watch.check(manifest(2, 2), canary(-1.5, -2.0), (-1.01, -2.0), replica=1)


def test_what_was_not_committed_does_not_count_as_the_version_before() -> None:
    watch = CanaryWatch()
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.0, -2.0))
    watch.committed()
    watch.check(manifest(2, 2), canary(-1.5, -2.0), (-1.5, -2.0))
    watch.check(manifest(3, 3), canary(-1.5, -2.0), (-1.5, -2.0))  # 2 was aborted
    watch.committed()
    with pytest.raises(CanaryError, match="still"):
        watch.check(manifest(4, 4), canary(-1.51, -2.0), (-1.5, -2.0))


def test_another_try_of_a_version_says_what_it_says_itself() -> None:
    """Seen red: the reading of a try that was refused stood in the report of the one that went well."""
    watch = CanaryWatch()
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.05, -2.0), replica=0)
    with pytest.raises(CanaryError):
        watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.0, -2.9), replica=1)
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.01, -2.0), replica=0)
    assert watch.last is not None
    assert (round(watch.last.worst, 3), watch.last.num_replicas) == (0.01, 1)
    watch.check(manifest(1, 1), canary(-1.0, -2.0), (-1.02, -2.0), replica=1)
    assert (round(watch.last.worst, 3), watch.last.num_replicas) == (0.02, 2)
