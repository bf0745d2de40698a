"""What a trainer and its agent say: it arrives as it was sent, what does not fit is refused, no token is shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weightsync.types import PhaseRecord, Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import (
    AgentStart,
    DeltaReport,
    EndOrder,
    Event,
    Failed,
    NotPublished,
    Order,
    Ping,
    Pong,
    Published,
    PublishOrder,
    Ready,
    ResetOrder,
    TransferBegun,
    TransferDone,
)
from weightsync.types.layout import PublicationHead
from weightsync.types.publication import Source

VERSION = Version(run_id="run", number=7)
PHASES = (PhaseRecord(name="prove", start_s=1.0, end_s=2.0, track="agent/m"),)
DELTA = DeltaReport(
    run_id="run", base=6, base_digest="0" * 32, version=7, nbytes=10, num_changed=1, num_elements=100, seconds=0.5
)
SOURCE = Source(endpoint="http://x:1", segment="weightsync-1-00", data_start=8, data_end=16, block_bytes=4096)
HEAD = PublicationHead(version=VERSION, model_id="m", sources=(SOURCE,), layout="0" * 64)
ORDERS = [PublishOrder(head=HEAD, source=0), ResetOrder(), Ping(), EndOrder(in_order=True)]
EVENTS = [
    Ready(endpoint="http://x:1", port=1, blocks_port=2, host_nonce="0" * 32),
    Failed(error={"error": "ConfigError", "message": "no"}),
    Pong(),
    Published(version=VERSION, delta=DELTA, phases=PHASES),
    NotPublished(version=VERSION, error={"message": "no"}),
    TransferBegun(version=VERSION, receiver="r"),
    TransferDone(version=VERSION, receiver="r", ok=True, phases=PHASES),
]


@pytest.mark.parametrize(
    ("message", "kind"),
    [*((each, Order) for each in ORDERS), *((each, Event) for each in EVENTS)],
    ids=lambda each: type(each).__name__,
)
def test_it_arrives_as_it_was_sent(message: Any, kind: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message


@pytest.mark.parametrize("event", EVENTS, ids=lambda each: type(each).__name__)
def test_an_event_is_no_order(event: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(event), type=Order)


def test_a_field_that_nobody_knows_is_refused() -> None:
    for body in (b'{"kind":"ping","a":1}', b'{"kind":"none"}', b"{}"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(body, type=Order)


def test_the_token_is_not_shown() -> None:
    start = AgentStart(config=AgentConfig(model_id="m", token="secret-secret-secret"), socket="/x", max_order_bytes=1)
    assert "secret" not in repr(start)
