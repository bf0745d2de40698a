"""What an agent's answer to a relaying host is made of."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from weightsync.agent.relay import Relaying
from weightsync.net.messages import decode
from weightsync.types.relay_messages import RelayAnswer, RelayFace, RelayReport


@pytest.mark.parametrize(
    ("caller", "seen_as"), [("10.0.0.2", "10.0.0.2"), ("::ffff:10.0.0.2", "10.0.0.2"), ("2001:db8::2", "2001:db8::2")]
)
def test_a_host_is_named_to_its_peers_as_its_certificate_names_it(caller: str, seen_as: str) -> None:
    """Seen red: an agent on "::" named 10.0.0.2 as ::ffff:10.0.0.2, for which no certificate is valid, and no peer took
    a block of another."""
    report = RelayReport(receiver_id="r", face=RelayFace(host=None, port=1))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": msgspec.json.encode(report)}

    request = Request({"type": "http", "method": "POST", "headers": [], "client": (caller, 1)}, receive)
    receivers: Any = {"r"}
    blocks: Any = None
    answer = asyncio.run(Relaying(receivers, blocks).relay(request))
    assert decode(bytes(answer.body), RelayAnswer, what="an answer").seen_as == seen_as
