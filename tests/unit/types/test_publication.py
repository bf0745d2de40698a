"""Publications and grants from the network: what can't be is refused before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from weightsync.errors import InvalidRequestError
from weightsync.net.messages import decode, encode
from weightsync.plan.safetensors import plan_layout
from weightsync.types import Manifest, TensorSpec, Version
from weightsync.types.publication import DeltaBase, DeltaLink, Publication, Source, SourceProof
from weightsync.types.service import NotifyRequest, RegisterSenderRequest
from weightsync.types.transfer_messages import FinishRequest, RegisterRequest, TransferGrant, TransferRequest, Transport

SPECS = (
    TensorSpec(name="a", dtype="float32", shape=(3000,)),
    TensorSpec(name="nothing", dtype="float32", shape=(0, 4)),
    TensorSpec(name="b", dtype="bool", shape=(3,)),
)


def grant() -> TransferGrant:
    layout = plan_layout(SPECS)
    source = Source(
        endpoint="http://127.0.0.1:1", segment="weightsync-1-0123456789abcdef", data_start=layout.data_start,
        data_end=layout.total_bytes, block_bytes=4096,
    )  # fmt: skip
    manifest = Manifest(version=Version(run_id="run", number=3), model_id="m", tensors=SPECS)
    return TransferGrant(
        transfer_id="ab" * 16,
        publication=Publication(manifest=manifest, parts=layout.parts, sources=(source,)),
        source=0,
        proof=SourceProof(block_checksums="0" * 16 * source.num_blocks, part_digests=bytes(48), lane_a=1, lane_b=2),
        seal="ef" * 16, transport=Transport.TCP, host="127.0.0.1", port=1, take_up_s=10.0,
    )  # fmt: skip


def delta_grant() -> TransferGrant:
    """The version is 3; deltas lead there from 1."""
    blobs = [
        Source(
            endpoint="http://127.0.0.1:1",
            segment=f"weightsync-2-{number:016x}",
            data_start=0,
            data_end=5000,
            block_bytes=4096,
        )
        for number in range(2)
    ]
    links = tuple(
        DeltaLink(base=base, version=base + 1, blob=blob, block_checksums="0" * 32, transfer_id="cd" * 16)
        for base, blob in zip((1, 2), blobs, strict=True)
    )
    base = DeltaBase(run_id="run", version=1, digest="0" * 32)
    return msgspec.structs.replace(grant(), base=base, delta=links)


@pytest.mark.parametrize("made", [grant, delta_grant])
def test_a_grant_crosses_as_it_was(made: Callable[[], TransferGrant]) -> None:
    assert decode(encode(made()), TransferGrant, what="a grant") == made()


def test_a_delta_of_nothing_is_one() -> None:
    """The receiver has that version."""
    body = msgspec.to_builtins(delta_grant())
    body["base"]["version"], body["delta"] = 3, []
    assert decode(msgspec.json.encode(body), TransferGrant, what="a grant").delta == ()


def test_blocks_cover_a_source_once() -> None:
    source = grant().publication.sources[0]
    ends = [source.data_start]
    for index in range(source.num_blocks):
        start, length = source.block(index)
        assert start == ends[-1]
        assert 0 < length <= source.block_bytes
        ends.append(start + length)
    assert ends[-1] == source.data_end


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        where: Any = body
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = to

    return change


_SOURCE = ("publication", "sources", 0)
_PART = ("publication", "parts", 0)


@pytest.mark.parametrize(
    "bend",
    [
        _set(*_SOURCE, "data_end", to=1 << 49),
        _set(*_SOURCE, "data_end", to=1 << 60),
        _set(*_SOURCE, "data_end", to=-1),
        _set(*_SOURCE, "data_start", to=-1),
        _set(*_SOURCE, "data_start", to=0),
        _set(*_SOURCE, "data_start", to=1 << 41),
        _set(*_SOURCE, "block_bytes", to=0),
        _set(*_SOURCE, "block_bytes", to=1),
        _set(*_SOURCE, "block_bytes", to=1 << 30),
        _set(*_SOURCE, "endpoint", to="file:///etc/passwd"),
        _set(*_SOURCE, "more", to=1),
        _set(*_PART, "offset", to=0),
        _set(*_PART, "offset", to=1 << 49),
        _set(*_PART, "source", to=1),
        _set(*_PART, "source", to=-1),
        _set(*_PART, "name", to="unknown"),
        _set(*_PART, "shape", to=[2999]),
        _set(*_PART, "dtype", to="float64"),
        _set(*_PART, "dtype", to="pickle"),
        _set("publication", "parts", to=[]),
        _set("publication", "sources", to=[]),
        _set("publication", "manifest", "tensors", to=[]),
        _set("publication", "manifest", "tensors", 0, "shape", to=[1 << 60]),
        _set("publication", "manifest", "version", "number", to=-1),
        _set("source", to=1),
        _set("source", to=-1),
        _set("proof", "block_checksums", to="0" * 16),
        _set("proof", "part_digests", to=""),
        _set("transfer_id", to="x" * 32),
        _set("transfer_id", to="ab"),
        _set("transport", to="carrier pigeon"),
        _set("port", to=1 << 16),
        _set("take_up_s", to=-1),
        _set("take_up_s", to=1e12),
    ],
)
def test_a_bent_grant_is_refused(bend: Callable[[dict[str, Any]], None]) -> None:
    body = msgspec.to_builtins(grant())
    bend(body)
    with pytest.raises(InvalidRequestError):
        decode(msgspec.json.encode(body), TransferGrant, what="a grant")


def _moved(body: dict[str, Any], by: int) -> None:
    """The last part, moved; the source grows with it, so that it does not lie outside."""
    body["publication"]["parts"][2]["offset"] += by
    body["publication"]["sources"][0]["data_end"] += max(0, by)


@pytest.mark.parametrize("by", [-3, -1, 1, 4000])
def test_parts_lie_one_behind_the_other(by: int) -> None:
    """Neither two in one place nor bytes that belong to nothing, which would be fetched for nobody."""
    body = msgspec.to_builtins(grant())
    _moved(body, by)
    body["proof"]["block_checksums"] = "0" * 16 * (-(-(12003 + max(0, by)) // 4096))
    with pytest.raises(InvalidRequestError, match="overlap, or leave a hole"):
        decode(msgspec.json.encode(body), TransferGrant, what="a grant")


@pytest.mark.parametrize("more", [1, 4096, 1 << 40])
def test_a_source_ends_with_its_last_part(more: int) -> None:
    """What lies behind would be fetched, block by block, for nobody."""
    body = msgspec.to_builtins(grant().publication)
    body["sources"][0]["data_end"] += more
    with pytest.raises(InvalidRequestError, match="more bytes than its parts"):
        decode(msgspec.json.encode(body), Publication, what="a publication")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RegisterRequest, {"receiver_id": ""}),
        (RegisterRequest, {"receiver_id": "x" * 257}),
        (RegisterRequest, {"receiver_id": "two\nlines"}),
        (TransferRequest, {"receiver_id": "r", "model_id": "m", "mode": "patch"}),
        (TransferRequest, {"receiver_id": "r", "model_id": "m", "base": {"run_id": "r", "version": 1}}),
        (DeltaBase, {"run_id": "r", "version": 1, "digest": "0" * 31}),
        (DeltaBase, {"run_id": "r", "version": -1, "digest": "0" * 32}),
        (DeltaBase, {"run_id": "", "version": 1, "digest": "0" * 32}),
        (TransferRequest, {"receiver_id": "r", "model_id": "m", "version": "3"}),
        (TransferRequest, {"receiver_id": "r"}),
        (FinishRequest, {"transfer_id": 3, "ok": True}),
        (NotifyRequest, {"run_id": "r", "model_id": "m", "version": -1, "sender_endpoint": "http://h"}),
        (NotifyRequest, {"run_id": "", "model_id": "m", "version": 1, "sender_endpoint": "http://h"}),
        (NotifyRequest, {"run_id": "r", "model_id": "m", "version": 1, "sender_endpoint": "http://h", "wait_s": -1}),
        (NotifyRequest, {"run_id": "r", "model_id": "m", "version": 1, "sender_endpoint": "http://h", "wait_s": 1e9}),
        (RegisterSenderRequest, {"model_id": "m", "sender_endpoint": "gopher://h"}),
        (RegisterSenderRequest, {"model_id": "m", "sender_endpoint": "http://" + "h" * 3000}),
    ],
)
def test_requests_that_make_no_sense(kind: type[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        decode(msgspec.json.encode(fields), kind, what="it")


@pytest.mark.parametrize(
    "bend",
    [
        _set("base", to=None),
        _set("base", "run_id", to="another"),
        _set("base", "version", to=0),
        _set("base", "version", to=2),
        _set("delta", to=[]),
        _set("delta", 0, "base", to=2),
        _set("delta", 0, "version", to=3),
        _set("delta", 1, "version", to=2),
        _set("delta", 1, "version", to=4),
        _set("delta", 1, "base", to=-1),
        _set("delta", 0, "block_checksums", to="0" * 16),
        _set("delta", 0, "transfer_id", to="cd"),
        _set("delta", 0, "blob", "data_end", to=1 << 60),
        _set("delta", 0, "more", to=1),
    ],
)
def test_deltas_that_do_not_lead_from_the_base_to_the_version(bend: Callable[[dict[str, Any]], None]) -> None:
    body = msgspec.to_builtins(delta_grant())
    bend(body)
    with pytest.raises(InvalidRequestError):
        decode(msgspec.json.encode(body), TransferGrant, what="a grant")
