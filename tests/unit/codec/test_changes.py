"""Changes that are pushed: exact for every dtype and bit pattern, on the right base alone, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.codec import changes
from weightsync.codec.changes import ChangesCodec
from weightsync.codec.patch import PatchDecoder
from weightsync.errors import (
    ConfigError,
    DeltaTooLargeError,
    InvalidRequestError,
    ManifestMismatchError,
    WeightSyncError,
)
from weightsync.tensors import byte_array, byte_view, spec_of, torch_dtype
from weightsync.types import (
    BroadcastWeightUpdateRequest,
    EngineReply,
    Full,
    Manifest,
    Patch,
    PatchBase,
    Version,
    WeightChunk,
)
from weightsync.types.dtypes import ITEMSIZE_BYTES, itemsize_bytes
from weightsync.types.spec import MAX_NAME_LENGTH

Weights = dict[str, torch.Tensor]
SPECIAL = bytes.fromhex("0000008000c07f800100ff7f80ff007f7fffffff")  # ±0, NaNs with payloads, infinities, of any width


def chunks(weights: Weights, size: int = 2) -> Iterator[WeightChunk]:
    names = list(weights)
    for start in range(0, len(names), size):
        part = names[start : start + size]
        yield WeightChunk(names=tuple(part), tensors=tuple(weights[name] for name in part))


def manifest(weights: Weights, number: int, digest: str | None = "sum") -> Manifest:
    specs = tuple(spec_of(name, tensor) for name, tensor in weights.items())
    version = Version(run_id="run", number=number)
    return Manifest(version=version, model_id="m", tensors=specs, model_digest=digest and f"{digest} {number}")


def serving(of: Manifest, **changed: Any) -> dict[str, EngineReply]:
    reply = EngineReply(engine_id="e", version=of.version, model_digest=of.model_digest, accepts=("full", "patch"))
    return {"e": reply, "f": msgspec.structs.replace(reply, engine_id="f", **changed)}


def pushed(codec: ChangesCodec, weights: Weights, number: int = 1) -> Manifest:
    """A full that every engine has committed."""
    for _ in codec.encoder().encode(chunks(weights)):
        pass
    codec.ended(manifest(weights, number))
    return manifest(weights, number)


def travelled(sent: list[WeightChunk]) -> list[Patch]:
    """What a worker's decoder makes of what a transport carried, byte by byte."""
    decoder = PatchDecoder()
    updates: list[Patch] = []
    for chunk in sent:
        arrived = [
            Full(name=name, tensor=byte_view(tensor.contiguous()).clone().view(tensor.dtype))
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
        ]
        for update in decoder.decode(arrived):
            assert isinstance(update, Patch)
            updates.append(update)
    return updates


def random_bytes(draw: Any, count: int) -> torch.Tensor:
    seed = draw(st.integers(0, 1 << 32))
    made = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, count - 1)))
        piece = torch.tensor(list(SPECIAL), dtype=torch.uint8)[: count - at]
        made[at : at + len(piece)] = piece
    return made


@st.composite
def models(draw: Any) -> tuple[Weights, Weights]:
    before, after = {}, {}
    for index in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        number = torch.Size(shape).numel()
        each = itemsize_bytes(dtype)
        old = random_bytes(draw, number * each)
        new = old.clone()
        density = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
        other = random_bytes(draw, number * each)
        changed = torch.rand(number, generator=torch.Generator().manual_seed(index)) < density
        new.view(-1, each)[changed] = other.view(-1, each)[changed]
        name = f"w{index}#values" if index % 2 else f"w{index}"
        before[name], after[name] = (data.view(torch_dtype(dtype)).reshape(shape) for data in (old, new))
    return before, after


@given(models(), st.sampled_from(["compiled", "torch"]), st.sampled_from([3, 1 << 20]))
def test_a_change_is_exact_for_every_dtype_and_bit_pattern(
    model: tuple[Weights, Weights], way: str, piece_elements: int
) -> None:
    """What is applied, and what is kept, are the new bytes; a second change starts from there."""
    before, after = model
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "_PIECE_ELEMENTS", piece_elements)
        if way == "torch":
            patched.setattr(changes, "_COMPILED", {})
        codec = ChangesCodec(largest=1.0, keep_on="cpu")
        base = pushed(codec, before)
        live = {name: tensor.clone() for name, tensor in before.items()}
        for number, now in ((2, after), (3, before)):
            goal = manifest(now, number)
            on = codec.base_for(serving(base), goal)
            assert on == PatchBase(version=base.version, model_digest=str(base.model_digest))
            encoder = codec.encoder(on)
            encoder._most_bytes = 1 << 40  # type: ignore[attr-defined]
            sent = list(encoder.encode(chunks(now)))
            assert dict(encoder.digests()) == {}
            for update in travelled(sent):
                elements = byte_view(live[update.name]).view(-1, live[update.name].element_size())
                where = update.positions.to(torch.int64)
                assert bool((where[1:] > where[:-1]).all())
                elements[where] = byte_view(update.values).view(-1, update.values.element_size())
            assert all(bytes(byte_array(live[name])) == bytes(byte_array(now[name])) for name in now)
            codec.ended(goal)
            base = goal


def test_only_what_differs_is_sent_and_what_is_kept_is_a_copy() -> None:
    weights = {"a": torch.zeros(1000), "b": torch.ones(10)}
    codec = ChangesCodec()
    base = pushed(codec, weights)
    weights["a"][7] = -0.0  # in place, as an optimiser does it
    sent = list(codec.encoder(codec.base_for(serving(base), manifest(weights, 2))).encode(chunks(weights)))
    (patch,) = travelled(sent)
    assert (patch.name, patch.positions.tolist(), patch.values.view(torch.int32).tolist()) == ("a", [7], [-(1 << 31)])


def test_a_dense_change_takes_more_room_than_was_set_aside() -> None:
    before, after = torch.zeros(5000), torch.ones(5000)
    codec = ChangesCodec(largest=1.0)
    base = pushed(codec, {"a": before, "b": torch.zeros(9000)})
    now = {"a": after, "b": torch.zeros(9000)}
    (patch,) = travelled(list(codec.encoder(codec.base_for(serving(base), manifest(now, 2))).encode(chunks(now))))
    assert (patch.positions.tolist(), patch.values.tolist()) == (list(range(5000)), after.tolist())


def a_codec() -> tuple[ChangesCodec, Weights, Manifest]:
    weights = {"a": torch.zeros(64), "b": torch.ones(10)}
    codec = ChangesCodec()
    return codec, weights, pushed(codec, weights)


def test_a_name_with_no_room_for_a_suffix_means_a_full() -> None:
    weights = {"n" * (MAX_NAME_LENGTH - 3): torch.zeros(3)}
    codec = ChangesCodec()
    base = pushed(codec, weights)
    assert codec.base_for(serving(base), manifest(weights, 2)) is None


def test_a_failure_and_an_unproved_version_are_no_base() -> None:
    codec, weights, base = a_codec()
    encoder = codec.encoder(codec.base_for(serving(base), manifest(weights, 2)))
    assert codec.base_for(serving(base), manifest(weights, 2)) is None, "it is being written"
    list(encoder.encode(chunks(weights)))
    codec.ended(None, WeightSyncError("no"))
    assert codec.base_for(serving(base), manifest(weights, 3)) is None
    pushed(codec, weights, 3)
    codec.ended(manifest(weights, 3, digest=None))
    assert codec.base_for(serving(manifest(weights, 3, digest=None)), manifest(weights, 4)) is None
    with pytest.raises(InvalidRequestError, match="kept"):
        codec.encoder(PatchBase(version=Version(run_id="run", number=1), model_digest="sum 1"))


def test_every_nth_is_full() -> None:
    codec = ChangesCodec(full_sync_interval=4)
    weights = {"a": torch.zeros(64)}
    base = pushed(codec, weights)
    assert [codec.base_for(serving(base), manifest(weights, number)) is None for number in (2, 3, 4, 5)] == [
        False, False, True, False
    ]  # fmt: skip


def test_too_large_a_change_is_refused_and_then_rested() -> None:
    """For 1, 3, 7 … 31 syncs; a change that was small enough starts anew."""
    codec, weights, base = a_codec()

    def rests(change: torch.Tensor) -> int:
        nonlocal base
        weights["a"] = weights["a"] + change
        encoder = codec.encoder(codec.base_for(serving(base), manifest(weights, 2)))
        try:
            list(encoder.encode(chunks(weights)))
            codec.ended(manifest(weights, 1))
        except DeltaTooLargeError as error:
            codec.ended(None, error)
        count = 0
        base = pushed(codec, weights)
        while codec.base_for(serving(base), manifest(weights, 2)) is None:
            count += 1
        return count

    everything, little = torch.ones(64), torch.eye(64)[0]
    assert [rests(everything) for _ in range(6)] == [1, 3, 7, 15, 31, 31]
    assert rests(little) == 0
    assert rests(everything) == 1


def test_what_was_too_large_is_said_in_a_users_words() -> None:
    """Seen red: `largest`, which a user of push() never wrote, and "0 more go out in full" of the last one."""
    codec, weights, base = a_codec()
    said = []
    for _ in range(2):
        weights["a"] = weights["a"] + 1
        encoder = codec.encoder(codec.base_for(serving(base), manifest(weights, 2)))
        with pytest.raises(DeltaTooLargeError) as caught:
            list(encoder.encode(chunks(weights)))
        many = f"over {base.total_bytes // 2} bytes with its positions, more than 50 % of the model"
        assert caught.value.message == f"what changed takes {many}"
        codec.ended(None, caught.value)
        base = pushed(codec, weights)
        while codec.base_for(serving(base), manifest(weights, 2)) is None:
            said.append(codec.why_full)
    last = "a change is tried again with the next one"
    then = [last, "the next 2 go out in full too", "the next one goes out in full too", last]
    assert said == [f"a change before was too large; {each}" for each in then]


@pytest.mark.parametrize("arguments", [
    {"largest": 0}, {"largest": 1.5}, {"largest": "0.5"}, {"largest": True},
    {"full_sync_interval": -1}, {"full_sync_interval": True}, {"keep_on": "disk"},
], ids=str)  # fmt: skip
def test_settings_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ChangesCodec(**arguments)


def test_a_push_that_is_gone_leaves_its_codec_to_another() -> None:
    class Owner:
        pass

    codec, owner = ChangesCodec(), Owner()
    codec.claim(owner)
    del owner
    codec.claim(Owner())


def test_engines_that_never_take_changes_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """But none that was started a moment ago: a vLLM says what it takes when it has been given its first version. Seen
    red: of one that was started again "whole tensors alone are taken by f" was said."""
    codec, weights, base = a_codec()
    assert codec.base_for(serving(base, accepts=("full",), version=None), manifest(weights, 2)) is None
    assert codec.why_full == "f serves nothing that was synced, not run/1 as it was pushed"
    assert "for nothing" not in caplog.text
    for number in (2, 3):
        assert codec.base_for(serving(base, accepts=("full",)), manifest(weights, number)) is None
    assert codec.why_full == "whole tensors alone are taken by f"
    assert caplog.text.count("for nothing") == 1


def test_a_stream_that_is_not_the_models() -> None:
    codec, weights, base = a_codec()
    for odd in ([*chunks(weights), *chunks(weights)], list(chunks({"other": torch.zeros(3)}))):
        encoder = codec.encoder(codec.base_for(serving(base), manifest(weights, 2)))
        with pytest.raises(InvalidRequestError, match="twice, or anew"):
            list(encoder.encode(odd))
        codec.ended(base)


def announced(*tensors: tuple[str, str, tuple[int, ...]]) -> BroadcastWeightUpdateRequest:
    names, dtypes, shapes = zip(*tensors, strict=True)
    sizes = [itemsize_bytes(dtype) * torch.Size(shape).numel() for dtype, shape in zip(dtypes, shapes, strict=True)]
    offsets = [sum(-(-size // 16) * 16 for size in sizes[:index]) for index in range(len(sizes))]
    return BroadcastWeightUpdateRequest(
        session="s", seq=0, names=names, dtypes=dtypes, shapes=shapes, offsets=tuple(offsets),
        bucket_bytes=offsets[-1] + sizes[-1],
    )  # fmt: skip


WHERE, WHAT = ("a#positions", "uint32", (3,)), ("a#values", "float32", (3,))


def test_pairs_that_fit_are_taken() -> None:
    PatchDecoder().check_announced(announced(WHERE, WHAT), manifest({"a": torch.zeros(8, 8)}, 1).table)


@pytest.mark.parametrize("tensors", [
    (WHERE,), (WHAT, WHERE), (("a", "float32", (8, 8)), WHAT), (WHERE, ("b#values", "float32", (3,))),
    (("b#positions", "uint32", (3,)), ("b#values", "float32", (3,))), (WHERE, ("a#values", "float32", (4,))),
    (("a#positions", "int64", (3,)), WHAT), (WHERE, ("a#values", "bfloat16", (3,))),
    (("a#positions", "uint32", (65,)), ("a#values", "float32", (65,))),
    (("a#positions", "uint32", (0,)), ("a#values", "float32", (0,))),
    (("a#positions", "uint32", (1, 3)), ("a#values", "float32", (1, 3))),
], ids=str)  # fmt: skip
def test_what_is_no_pair_is_refused_before_a_byte_moves(tensors: Any) -> None:
    with pytest.raises((InvalidRequestError, ManifestMismatchError)):
        PatchDecoder().check_announced(announced(*tensors), manifest({"a": torch.zeros(8, 8)}, 1).table)


@pytest.mark.parametrize("names", [
    ("a#positions",), ("a#values",), ("a#positions", "b#values"), ("a#positions", "b#positions"), ("a", "a#values"),
    ("a#positions", "a#values", "a#positions", "a#values"),
], ids=str)  # fmt: skip
def test_a_decoder_makes_no_patch_of_half_a_pair(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        list(PatchDecoder().decode(Full(name=name, tensor=torch.zeros(1)) for name in names))
