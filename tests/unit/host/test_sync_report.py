"""What is told of a version: also why engines loaded all of it though a delta brought it, and what a wait lacked."""

from __future__ import annotations

import pytest
import torch

import weightsync
from weightsync.host.sync_report import late
from weightsync.types import Deadline, Version
from weightsync.types.service import ModelStatus, NotifyRequest

MODEL = "m"


def served(*, changed: int, **options: float) -> ModelStatus:
    """The status after a version that a delta brought, which changes so many of 4096 elements."""
    trained, engine = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    with (
        weightsync.publish(trained, MODEL, dtype="float32", port=0) as publisher,
        weightsync.serve({MODEL: engine}, sources=publisher.endpoint, port=0, mode="delta", **options) as service,
    ):
        client = weightsync.RolloutClient(service.url)
        for number in range(1, 50):
            version = publisher.step().version
            assert version.number == number
            publisher.manager.wait_delta_ready(number, timeout_s=30)
            notice = NotifyRequest(
                run_id=version.run_id, model_id=MODEL, version=number, sender_endpoint=publisher.endpoint, wait_s=30.0
            )
            status = client.notify_version(notice)
            if status.num_deltas:
                return status
            with torch.no_grad():
                trained.weight.view(-1)[:changed] += 1.0
        raise AssertionError("no version came as a delta")


def test_a_small_change_is_written_and_nothing_is_said_of_more() -> None:
    status = served(changed=8)
    assert (status.num_patched, status.full_because) == (1, {})
    assert "loaded all of it" not in str(status)


@pytest.mark.parametrize(
    ("changed", "options", "why"),
    [(1200, {}, "patch_limit allows, 50%"), (64, {"patch_limit": 0.01}, "patch_limit allows, 1%")],
)
def test_a_change_that_is_loaded_in_full_says_why(changed: int, options: dict[str, float], why: str) -> None:
    status = served(changed=changed, **options)
    assert status.num_patched == 0
    assert [why in said for said in status.full_because.values()] == [True]
    assert f"loaded all of it: more has changed than {why}" in str(status)


def test_an_engine_that_serves_something_else_is_named() -> None:
    status = ModelStatus(run_id="r", version=3, pull_s=0.1, engines={"one": "r/3", "two": None, "three": "x/1"})
    assert str(status).endswith("; not served by two, three now")


def test_a_wait_that_took_too_long_says_what_is_wrong() -> None:
    version, deadline = Version(run_id="r", number=1), Deadline(1.49544)
    assert late(version, deadline, ModelStatus()).message == "r/1 is not served within 1.5 s; it is still tried"
    status = ModelStatus(sender_errors={"http://t": "AuthError: no bearer token was sent"})
    assert late(version, deadline, status).message.endswith(
        "still tried: http://t: AuthError: no bearer token was sent"
    )
