"""Names and ids that can't travel: refused where they are given, with a typed error, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from weightsync.clients.agent import AgentClient
from weightsync.errors import ConfigError, InvalidRequestError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.net.messages import decode, encode
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.push import PushSync
from weightsync.types import Manifest, TensorSpec, Version
from weightsync.types.transfer_messages import FinishRequest, RegisterRequest, TransferRequest

LONE = ("\ud800", "a\udcffb", "\udfff")
"""The second is what Python makes of a file name that is no UTF-8."""
UNFIT = (*LONE, "", "x" * 257, "a\nb", "\x00", "a\x1b[2J")
SPEC = TensorSpec(name="w", dtype="float32", shape=(1,))


@pytest.mark.parametrize("name", LONE)
def test_a_tensors_name_is_text_that_travels(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="UTF-8") as caught:
        TensorSpec(name=name, dtype="float32", shape=(1,))
    encode(caught.value.to_dict())
    str(caught.value).encode()


def test_names_that_travel_are_taken() -> None:
    for name in ("ünïcödé-权重", "new\nline", "\x00", "../../etc/passwd", "\u202ertl", "x" * 1024, "\U0001f600"):
        spec = TensorSpec(name=name, dtype="float32", shape=(1,))
        assert decode(encode(spec), TensorSpec, what="a spec") == spec


GIVEN: dict[str, Callable[[str], Any]] = {
    "a version's run": lambda text: Version(run_id=text, number=1),
    "a manifest's model": lambda text: Manifest(version=Version(run_id="r", number=1), model_id=text, tensors=(SPEC,)),
    "a receiver": lambda text: RegisterRequest(receiver_id=text),
    "who asks": lambda text: TransferRequest(receiver_id=text, model_id="m"),
    "what model is asked for": lambda text: TransferRequest(receiver_id="r", model_id=text),
    "what run is asked for": lambda text: TransferRequest(receiver_id="r", model_id="m", run_id=text),
    "a manager's model": lambda text: WeightManager(text),
    "a manager's run": lambda text: WeightManager("m", run_id=text).start(),
    "a puller's model": lambda text: Puller("http://127.0.0.1:1", text, receiver_id="r"),
    "a puller's name": lambda text: Puller("http://127.0.0.1:1", "m", receiver_id=text),
    "a service's name": lambda text: RolloutConfig(service_id=text),
    "a service's model": lambda text: RolloutService({text: []}),
    "a push's model": lambda text: PushSync(ModuleWeightExtractor(torch.nn.Linear(1, 1)), model_id=text),
    "a push's run": lambda text: PushSync(ModuleWeightExtractor(torch.nn.Linear(1, 1)), run_id=text),
}


@pytest.mark.parametrize("text", UNFIT, ids=ascii)
@pytest.mark.parametrize("what", GIVEN)
def test_an_id_is_short_printable_text(what: str, text: str) -> None:
    with pytest.raises((InvalidRequestError, ConfigError), match="printable characters"):
        GIVEN[what](text)


@pytest.mark.parametrize("number", [-1, 2**63, 2**64, 2**200])
def test_a_version_is_a_number_of_63_bits(number: int) -> None:
    with pytest.raises(InvalidRequestError, match="2\\*\\*63"):
        Version(run_id="r", number=number)


def test_what_can_t_be_told_is_a_typed_error() -> None:
    """Seen to fail: a UnicodeEncodeError out of the client."""
    with pytest.raises(InvalidRequestError, match="can't be told"):
        encode({"a": "\ud800"})
    client = AgentClient("http://127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match="can't be told"):
        client.call("POST", "/x", dict[str, Any], message={"a": "\ud800"}, timeout_s=1)


@pytest.mark.parametrize("raw", [rb'"\ud800"', rb'"\udfff"', rb'"\ud800A"', b'"\xed\xa0\x80"', b'"\xff"'])
@pytest.mark.parametrize("kind", [TensorSpec, RegisterRequest, TransferRequest, FinishRequest, Version])
def test_none_of_them_comes_in_from_the_network(kind: type, raw: bytes) -> None:
    for field in msgspec.structs.fields(kind):
        body = b'{"' + field.name.encode() + b'": ' + raw + b"}"
        with pytest.raises(InvalidRequestError):
            decode(body, kind, what="it")
