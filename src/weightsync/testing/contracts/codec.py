"""What every `Codec` keeps, its two halves, and whatever it remembers from one version to the next."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from weightsync.codec.base import Codec
from weightsync.codec.patch import PatchDecoder
from weightsync.codec.tensor_digest import tensor_digests
from weightsync.errors import (
    ConfigError,
    DeltaTooLargeError,
    DigestMismatchError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.testing.contracts.cases import bytes_of, change_in_place, manifest_of
from weightsync.testing.contracts.served import ServedWeights, Weights, announced, chunks_of, digest_of_all
from weightsync.types import PatchBase, Version, WeightChunk

_OTHER = Version(run_id="another", number=1)


class CodecContract(abc.ABC):
    """What every `Codec` keeps. A version is moved as `PushSync` and an engine do it, without either of them."""

    sends_changes = False
    """Whether `base_for` gives a base where every engine serves what was pushed last."""

    @abc.abstractmethod
    def make_codec(self) -> Codec:
        """A new codec that has pushed nothing."""

    @staticmethod
    def make_weights() -> Weights:
        """Many dtypes, a NaN, a 0-d tensor and an empty one; names that look like a change's."""
        torch.manual_seed(0)
        return {
            "a": torch.randn(40, 30).bfloat16(),
            "b#values": torch.tensor([0.0, -0.0, float("nan"), float("inf")]),
            "step": torch.tensor(7),
            "empty": torch.empty(0, 4),
            "scales": torch.rand(3, 5).to(torch.float8_e4m3fn),
            "mask": torch.tensor([True, False, True]),
            "b#positions": torch.randn(300, dtype=torch.float64),
        }

    def push(
        self, codec: Codec, served: ServedWeights, weights: Weights, number: int, *, fails_at: int | None = None
    ) -> PatchBase | None:
        """Moves one version, and checks every byte; a change that is too large is moved anew, whole.

        Args:
            fails_at: the chunk at which an engine's load fails.

        Returns:
            What it was a change of.
        """
        bare, staged = manifest_of(weights, number), dict(served.live)
        given = {name: bytes_of(tensor) for name, tensor in weights.items()}
        base = codec.base_for(served.replies(), bare)
        assert (codec.why_full is not None) == (base is None and self.sends_changes)
        if base is not None:
            assert served.proved is not None
            assert (base.version, base.model_digest) == (served.proved.version, served.proved.model_digest)
        encoder = codec.encoder(base)
        decoder = codec.decoder() if base is None else PatchDecoder()
        try:
            for index, chunk in enumerate(encoder.encode(chunks_of(weights))):
                if index == fails_at:
                    raise LoadError("no room")
                served.receive(chunk, decoder, bare, staged)
            digest = digest_of_all(weights)
            proved = msgspec.structs.replace(bare, model_digest=digest)
            proved = proved.with_digests(encoder.digests(), digest) if base is None else proved
            decoder.check(proved)
            if fails_at is not None:
                raise LoadError("it did not commit")
        except DeltaTooLargeError as error:
            codec.ended(None, error)
            assert self.push(codec, served, weights, number) is None
            return base
        except WeightSyncError as error:
            codec.ended(None, error)
            raise
        assert {name: bytes_of(tensor) for name, tensor in staged.items()} == given
        assert {name: bytes_of(tensor) for name, tensor in weights.items()} == given, "the trainer's are only read"
        assert digest_of_all(staged) == digest
        served.live, served.proved = staged, proved
        codec.ended(proved)
        return base

    def test_a_chain_of_versions_gives_every_byte_back(self) -> None:
        """They change where they lie: a little, wholly, not at all. Seen red: what was pushed kept without a copy."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        assert self.push(codec, served, weights, 1) is None
        for number, share in enumerate((0.02, 1.0, 0.0, 0.02, 0.02), start=2):
            if share:
                change_in_place(weights, share=share, seed=number)
            base = self.push(codec, served, weights, number)
            assert number != 2 or (base is not None) == self.sends_changes

    @pytest.mark.parametrize("fails_at", [0, 1, 99])
    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_after_a_failure_the_next_version_is_right(self, fails_at: int, after: int) -> None:
        """For engines that serve what they served before. Seen red: a failure that leaves the base."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        for number in range(1, 1 + after):
            self.push(codec, served, weights, number)
            change_in_place(weights, share=0.02, seed=number)
        with pytest.raises(LoadError):
            self.push(codec, served, weights, 8, fails_at=fails_at)
        for number in (9, 10):
            change_in_place(weights, share=0.02, seed=number)
            self.push(codec, served, weights, number)

    @pytest.mark.parametrize("changes", [
        {"version": None}, {"version": Version(run_id="contract", number=3)}, {"version": _OTHER},
        {"model_digest": "another"}, {"model_digest": None}, {"accepts": ("full",)}, {"unhealthy": "rot"},
        {"serving": False},
    ], ids=str)  # fmt: skip
    def test_an_engine_that_does_not_serve_the_base_means_a_full(self, changes: dict[str, Any]) -> None:
        """And a reason. Seen red: each of the comparisons left out."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        self.push(codec, served, weights, 1)
        assert (codec.base_for(served.replies(), manifest_of(weights, 2)) is not None) == self.sends_changes
        assert codec.base_for(served.replies(**changes), manifest_of(weights, 2)) is None
        assert (codec.why_full is not None) == self.sends_changes

    @pytest.mark.parametrize("change", [
        lambda weights: weights.pop("a"),
        lambda weights: weights.update(a=weights["a"].t().contiguous()),
        lambda weights: weights.update(a=weights["a"].half()),
        lambda weights: weights.update(z=weights.pop("a")),
        lambda weights: weights.update(a=weights.pop("a")),
    ], ids=["gone", "shape", "dtype", "name", "order"])  # fmt: skip
    def test_other_tensors_than_before_mean_a_full(self, change: Callable[[Weights], object]) -> None:
        """Seen red: bases that are given whatever the manifest has."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        self.push(codec, served, weights, 1)
        change(weights)
        served.live = {}
        assert self.push(codec, served, weights, 2) is None

    def test_a_base_that_it_has_not_is_refused(self) -> None:
        """And the next version is right. Seen red: the comparison left out; the docs' example took any base."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        for number in (1, 2):
            with pytest.raises((InvalidRequestError, UnsupportedError)):
                codec.encoder(PatchBase(version=_OTHER, model_digest=digest_of_all(weights)))
            self.push(codec, served, weights, number)
            change_in_place(weights, share=0.02)

    def test_closed_it_remembers_nothing(self) -> None:
        """Twice. Seen red: a `close` that keeps."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()
        self.push(codec, served, weights, 1)
        for _ in range(2):
            codec.close()
        assert self.push(codec, served, weights, 2) is None

    def test_what_remembers_belongs_to_one(self) -> None:
        """Seen red: another owner let in."""
        codec, owner, other = self.make_codec(), ServedWeights(), ServedWeights()
        codec.claim(owner)
        codec.claim(owner)
        if self.sends_changes:
            with pytest.raises(ConfigError):
                codec.claim(other)

    def test_chunks_are_taken_one_at_a_time(self) -> None:
        """Lazily, and none is kept; where tensors pass through they are the very same. Seen red: a list of them;
        copies; the last tensor of each chunk, which `ChangesCodec` held."""
        codec, served, weights = self.make_codec(), ServedWeights(), self.make_weights()

        def source(taken: list[weakref.ref[torch.Tensor]]) -> Iterator[WeightChunk]:
            for chunk in chunks_of(weights):
                assert all(tensor() is None for tensor in taken), "a chunk is kept"
                copied = WeightChunk(names=chunk.names, tensors=tuple(tensor.clone() for tensor in chunk.tensors))
                taken.extend(map(weakref.ref, copied.tensors))
                yield copied
                del chunk, copied

        for number in (1, 2):
            taken: list[weakref.ref[torch.Tensor]] = []
            encoder = codec.encoder(codec.base_for(served.replies(), manifest_of(weights, number)))
            encoded = encoder.encode(source(taken))
            assert not taken
            for chunk in encoded:
                if codec.passes_through:
                    assert list(map(id, chunk.tensors)) == [id(given()) for given in taken[-len(chunk.tensors) :]]
                del chunk
            codec.ended(None, LoadError("no room"))
            self.push(codec, served, weights, 1)

    def test_digests_are_of_the_plain_bytes_that_went_out(self) -> None:
        """Whatever the trainer does behind them. Seen red: digests that are taken when they are asked for."""
        weights = self.make_weights()
        expected, encoder = tensor_digests(weights), self.make_codec().encoder()
        for _ in encoder.encode(chunks_of(weights)):
            pass
        change_in_place(weights)
        assert dict(encoder.digests()) == expected

    @pytest.mark.parametrize("name", ["a", "step", "mask"])
    @pytest.mark.parametrize("what", ["a bit", "gone"])
    def test_what_came_otherwise_is_no_proof(self, what: str, name: str) -> None:
        """Named. Seen red: a check that compares nothing."""
        weights, codec = self.make_weights(), self.make_codec()
        bare, served = manifest_of(weights), ServedWeights()
        encoder, decoder = codec.encoder(), codec.decoder()
        for chunk in encoder.encode(chunks_of(weights, 1)):
            came = WeightChunk(names=chunk.names, tensors=tuple(tensor.clone() for tensor in chunk.tensors))
            if chunk.names == (name,):
                change_in_place({name: came.tensors[0]}, share=0.0)
            if chunk.names != (name,) or what == "a bit":
                served.receive(came, decoder, bare, {})
        with pytest.raises(DigestMismatchError) as caught:
            decoder.check(bare.with_digests(encoder.digests(), digest_of_all(weights)))
        assert caught.value.parameter == name

    @pytest.mark.parametrize("wrong", [{"z": torch.zeros(2)}, {"a": torch.zeros(2)}, {"step": torch.tensor(1.0)}])
    def test_what_the_manifest_has_not_is_refused_when_it_is_announced(self, wrong: Weights) -> None:
        """Seen red: a decoder that looks at nothing."""
        decoder, (name,) = self.make_codec().decoder(), wrong
        with pytest.raises(ManifestMismatchError) as caught:
            decoder.check_announced(announced(*chunks_of(wrong)), manifest_of(self.make_weights()).table)
        assert caught.value.parameter == name
