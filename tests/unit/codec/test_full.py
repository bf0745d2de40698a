"""The full codec: unchanged bytes, and a check that names the tensor."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from weightsync.codec.full import FullCodec
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.errors import DigestMismatchError, InvalidRequestError, UnsupportedError
from weightsync.tensors import spec_of
from weightsync.types import Full, Manifest, Patch, Version, WeightChunk


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(7, 5, generator=generator).bfloat16(),
        "norm": torch.randn(5, generator=generator),
        "steps": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "head": torch.randn(7, 5, generator=generator).bfloat16(),
    }


def chunks(tensors: dict[str, torch.Tensor], size: int = 2) -> Iterator[WeightChunk]:
    names = list(tensors)
    for start in range(0, len(names), size):
        part = names[start : start + size]
        yield WeightChunk(names=tuple(part), tensors=tuple(tensors[name] for name in part))


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    encoder = FullCodec().encoder()
    for _ in encoder.encode(chunks(tensors)):
        pass
    bare = Manifest(
        version=Version(run_id="run", number=4),
        model_id="actor",
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
    )
    return bare.with_digests(encoder.digests(), None)


def received(tensors: dict[str, torch.Tensor], published: Manifest) -> None:
    decoder = FullCodec().decoder()
    for _ in decoder.decode(Full(name=name, tensor=tensor) for name, tensor in tensors.items()):
        pass
    decoder.check(published)


def test_chunks_pass_unchanged_and_lazily() -> None:
    pulled = []

    def source() -> Iterator[WeightChunk]:
        for chunk in chunks(model()):
            pulled.append(chunk)
            yield chunk

    encoder = FullCodec().encoder()
    stream = encoder.encode(source())
    assert not pulled
    for number, chunk in enumerate(stream, start=1):
        assert len(pulled) == number
        assert chunk is pulled[-1]
        assert set(encoder.digests()) == {name for done in pulled for name in done.names}
    assert encoder.digests() == {name: tensor_digest(tensor) for name, tensor in model().items()}
    assert FullCodec().name == "full"


def test_what_was_published_passes_and_updates_are_handed_on_as_they_are() -> None:
    updates = [Full(name=name, tensor=tensor) for name, tensor in model().items()]
    decoder = FullCodec().decoder()
    assert all(got is sent for got, sent in zip(decoder.decode(iter(updates)), updates, strict=True))
    decoder.check(manifest(model()))


def test_memory_that_is_reused_after_the_update_does_not_matter() -> None:
    buffer = torch.empty(7, 5, dtype=torch.bfloat16)
    wanted = {name: model()[name] for name in ("embed", "head")}

    def borrowed() -> Iterator[Full]:
        for name, tensor in wanted.items():
            buffer.copy_(tensor)
            yield Full(name=name, tensor=buffer)
            buffer.fill_(0)

    decoder = FullCodec().decoder()
    for update in decoder.decode(borrowed()):
        update.tensor.zero_()  # a loader that converts in place, or a transport that goes on
    decoder.check(manifest(wanted))


@pytest.mark.parametrize("name", ["embed", "norm", "steps", "head"])
def test_one_byte_changed_is_named(name: str) -> None:
    wrong = {key: tensor.clone() for key, tensor in model().items()}
    wrong[name].view(-1).view(torch.uint8)[-1] ^= 1
    with pytest.raises(DigestMismatchError, match="not those that were published") as caught:
        received(wrong, manifest(model()))
    assert (caught.value.parameter, caught.value.version) == (name, "run/4")


def test_the_first_of_several_differences_is_named() -> None:
    wrong = {key: tensor + 1 for key, tensor in model().items()}
    with pytest.raises(DigestMismatchError) as caught:
        received(dict(reversed(wrong.items())), manifest(model()))
    assert caught.value.parameter == "embed"


def test_swapped_missing_extra_and_relabelled_tensors_are_named() -> None:
    tensors, published = model(), manifest(model())
    swapped = {**tensors, "embed": tensors["head"], "head": tensors["embed"]}
    missing = {name: tensor for name, tensor in tensors.items() if name != "empty"}
    extra = {**tensors, "lm_head": torch.ones(1)}
    reshaped = {**tensors, "embed": tensors["embed"].view(5, 7)}
    retyped = {**tensors, "embed": tensors["embed"].view(torch.float16)}
    for given, name, message in (
        (swapped, "embed", "not those"),
        (missing, "empty", "did not come"),
        (extra, "lm_head", "not published"),
        (reshaped, "embed", "published as"),
        (retyped, "embed", "published as"),
    ):
        with pytest.raises(DigestMismatchError, match=message) as caught:
            received(given, published)
        assert caught.value.parameter == name


def test_a_manifest_without_digests_proves_nothing() -> None:
    bare = msgspec.structs.replace(manifest(model()), digests=None)
    with pytest.raises(InvalidRequestError, match="no digest"):
        received(model(), bare)


def test_names_twice_and_patches_are_refused() -> None:
    chunk = next(chunks(model()))
    with pytest.raises(InvalidRequestError, match="twice"):
        list(FullCodec().encoder().encode([chunk, chunk]))
    full = Full(name="norm", tensor=model()["norm"])
    with pytest.raises(InvalidRequestError, match="twice"):
        list(FullCodec().decoder().decode([full, full]))
    patch = Patch(name="norm", positions=torch.tensor([0]), values=torch.ones(1))
    with pytest.raises(UnsupportedError) as caught:
        list(FullCodec().decoder().decode([patch]))
    assert caught.value.parameter == "norm"
