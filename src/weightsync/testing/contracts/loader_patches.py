"""The loader contract's cases of patches, for loaders that accept them. `WeightLoaderContract` inherits them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping

import pytest
import torch

from weightsync.codec.digest import digest_of, patch_sum
from weightsync.codec.model_digest import ShardSum, patched_digest
from weightsync.errors import InvalidRequestError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.tensors import byte_view, spec_of
from weightsync.testing.contracts.cases import bytes_of, manifest_of
from weightsync.types import Full, HeldTensor, Patch, Version


def patches_of(
    weights: Mapping[str, torch.Tensor], seed: int, *, share: float = 0.4, positions: torch.dtype = torch.uint32
) -> tuple[list[Patch], dict[str, torch.Tensor]]:
    """Patches that flip one bit of some elements of every tensor that has any, and the weights after them."""
    generator = torch.Generator().manual_seed(seed)
    patches, after = [], {}
    for name, tensor in weights.items():
        flat = tensor.detach().contiguous().reshape(-1).clone()
        where = (torch.rand(flat.numel(), generator=generator) < share).nonzero().reshape(-1)
        if flat.numel() and not where.numel():
            where = torch.tensor([flat.numel() - 1])
        if flat.numel():
            elements = byte_view(flat).reshape(flat.numel(), -1)  # not every dtype can be indexed
            elements[where, 0] ^= 1  # 0 and 1 of a bool stay 0 and 1
            values = elements[where].reshape(-1).view(flat.dtype)
            patches.append(Patch(name=name, positions=where.to(positions), values=values))
        after[name] = flat.reshape(tensor.shape)
    return patches, after


class LoaderPatchCases(abc.ABC):
    """A patch is written as a whole or not at all, and can be undone until it is settled."""

    @abc.abstractmethod
    def make_loader(self) -> WeightLoader:
        """A new loader of a new model; models of one class start with equal weights."""

    @abc.abstractmethod
    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Every tensor that the loader takes, at least two of them, in stream order by manifest name; other seeds
        give other bytes in every tensor that is not empty."""

    def live(self, loader: WeightLoader) -> dict[str, bytes]:
        """What the engine computes with now. Override it where `live_tensors` can't tell."""
        return {held.spec.name: bytes_of(held.tensor) for held in loader.live_tensors()}

    def load(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor], *, chunks: int = 2) -> None:
        """Loads all of `weights` in so many chunks."""
        items = list(weights.items())
        size = -(-len(items) // chunks)
        for start in range(0, len(items), size):
            loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in items[start : start + size])

    def sync(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor], number: int) -> None:
        """One whole bracket."""
        manifest = manifest_of(weights, number)
        loader.begin(manifest)
        self.load(loader, weights)
        loader.verify()
        loader.commit(manifest.version)

    def check_live(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor]) -> None:
        """The live bytes are those of `weights`, under any of a tied tensor's names."""
        live = self.live(loader)
        for name, tensor in weights.items():
            assert live[name] == bytes_of(tensor), name

    def patched(self) -> tuple[WeightLoader, dict[str, torch.Tensor]]:
        """A loader with a version, and that version."""
        loader, weights = self.make_loader(), self.make_weights(1)
        if "patch" not in loader.accepts:
            pytest.skip("this loader takes whole tensors alone")
        self.sync(loader, weights, 1)
        return loader, weights

    def patch(
        self, loader: WeightLoader, patches: Iterable[Patch], weights: Mapping[str, torch.Tensor], n: int
    ) -> None:
        """A whole bracket."""
        manifest = manifest_of(weights, n)
        loader.begin_patch(manifest)
        for update in patches:
            loader.load_weights([update])
        list(loader.prepare_patch())
        loader.commit(manifest.version)

    def test_a_loader_without_patches_says_so(self) -> None:
        """Typed, and before anything is changed."""
        loader, weights = self.make_loader(), self.make_weights(1)
        if "patch" in loader.accepts:
            pytest.skip("this loader takes patches")
        with pytest.raises(UnsupportedError):
            loader.begin_patch(manifest_of(weights, 1))

    def test_patches_and_whole_versions_follow_one_another(self) -> None:
        """A patch leaves whatever second set there is behind; a full load after it must not notice."""
        loader, weights = self.patched()
        for number in range(2, 6):
            patches, weights = patches_of(weights, number)
            self.patch(loader, patches, weights, number)
            assert loader.healthy
            self.check_live(loader, weights)
        for number in (6, 7):
            self.sync(loader, self.make_weights(number), number)
            self.check_live(loader, self.make_weights(number))
        patches, weights = patches_of(self.make_weights(7), 8)
        self.patch(loader, patches, weights, 8)
        self.check_live(loader, weights)

    @pytest.mark.parametrize("positions", [torch.uint32, torch.int64], ids=str)
    def test_what_will_change_is_said_exactly(self, positions: torch.dtype) -> None:
        """Digest before + sum of the changes = digest after, and both from the live bytes."""
        loader, weights = self.patched()
        manifest = manifest_of(weights, 2)
        before = digest_of(loader.live_tensors(), manifest.tensors)
        patches, after = patches_of(weights, 2, positions=positions)
        loader.begin_patch(manifest)
        loader.load_weights(patches)
        change = ShardSum.zero()
        for each in loader.prepare_patch():
            change += patch_sum(each.spec, each.positions, each.old, each.new)
        loader.commit(manifest.version)
        held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in after.items()]
        assert patched_digest(before, change) == digest_of(held, manifest.tensors)
        assert digest_of(loader.live_tensors(), manifest.tensors) == digest_of(held, manifest.tensors)

    def test_live_weights_are_whole_and_old_up_to_the_commit(self) -> None:
        """So generation goes on until then, also in a loader that writes over live weights else."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        loader.begin_patch(manifest_of(after, 2))
        for update in patches:
            loader.load_weights([update])
            assert self.live(loader) == before
        list(loader.prepare_patch())
        assert self.live(loader) == before
        assert loader.healthy

    def test_the_patches_memory_is_free_when_load_weights_returns(self) -> None:
        """The transport overwrites it at once."""
        loader, weights = self.patched()
        patches, after = patches_of(weights, 2)
        manifest = manifest_of(after, 2)
        loader.begin_patch(manifest)
        loader.load_weights(patches)
        for update in patches:
            byte_view(update.positions).fill_(0xEE)
            byte_view(update.values).fill_(0xEE)
        list(loader.prepare_patch())
        loader.commit(manifest.version)
        self.check_live(loader, after)

    @pytest.mark.parametrize("fault", ["equal", "falling", "outside", "far outside", "negative"])
    def test_positions_that_can_not_be_write_nothing(self, fault: str) -> None:
        """Refused by name, before anything live is touched."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        good = max(patches, key=lambda update: weights[update.name].numel())
        numel = weights[good.name].numel()
        where = {
            "equal": [1, 1],
            "falling": [1, 0],
            "outside": [0, numel],
            "far outside": [0, (1 << 32) - 1],
            "negative": [-1, 0],
        }[fault]
        positions = torch.tensor(where, dtype=torch.int64)
        if fault != "negative":
            positions = positions.to(torch.uint32)
        loader.begin_patch(manifest_of(after, 2))
        with pytest.raises(InvalidRequestError) as caught:
            loader.load_weights([Patch(name=good.name, positions=positions, values=weights[good.name].reshape(-1)[:2])])
        assert caught.value.parameter == good.name
        loader.abort("as told")
        assert loader.healthy
        assert self.live(loader) == before

    @pytest.mark.parametrize("fault", ["unknown", "twice", "dtype", "length", "shape", "full"])
    def test_a_patch_that_does_not_fit_is_refused_by_name(self, fault: str) -> None:
        """The caller aborts; the next bracket works."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        good = max(patches, key=lambda update: update.values.numel())
        update: Patch | Full = good
        loader.begin_patch(manifest_of(after, 2))
        match fault:
            case "unknown":
                update = Patch(name="nobody.has.this", positions=good.positions, values=good.values)
            case "twice":
                loader.load_weights([good])
            case "dtype":
                values = good.values.view(torch.int8 if good.values.dtype == torch.uint8 else torch.uint8)
                update = Patch(name=good.name, positions=good.positions, values=values[: len(good.values)])
            case "length":
                update = Patch(name=good.name, positions=good.positions, values=good.values[:-1])
            case "shape":
                update = Patch(name=good.name, positions=good.positions[None], values=good.values[None])
            case "full":
                update = Full(name=good.name, tensor=after[good.name])
        with pytest.raises((ManifestMismatchError, UnsupportedError)) as caught:
            loader.load_weights([update])
        assert caught.value.parameter == update.name
        loader.abort("as told")
        assert self.live(loader) == before
        self.patch(loader, patches, after, 2)
        self.check_live(loader, after)

    @pytest.mark.parametrize("when", ["begun", "one", "loaded", "prepared"])
    def test_an_abort_of_a_patch_serves_the_old_weights(self, when: str) -> None:
        """Never nothing: not a byte was written."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        loader.begin_patch(manifest_of(after, 2))
        if when != "begun":
            loader.load_weights(patches[: 1 if when == "one" else None])
        if when == "prepared":
            list(loader.prepare_patch())
        for _ in range(2):
            loader.abort("as told")
        assert loader.healthy
        assert self.live(loader) == before
        with pytest.raises(StateError):
            loader.rollback()
        self.patch(loader, patches, after, 2)
        self.check_live(loader, after)

    def test_a_commit_is_undone_exactly_until_it_is_settled(self) -> None:
        """Another worker of the same engine failed at its commit."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        for _ in range(2):
            self.patch(loader, patches, after, 2)
            self.check_live(loader, after)
            loader.rollback()
            assert loader.healthy
            assert self.live(loader) == before
            with pytest.raises(StateError):
                loader.rollback()
        self.patch(loader, patches, after, 2)
        loader.settle()
        loader.settle()
        with pytest.raises(StateError):
            loader.rollback()
        self.check_live(loader, after)

    def test_the_next_begin_settles(self) -> None:
        """What is undone then is the latest commit, or nothing."""
        loader, weights = self.patched()
        patches, after = patches_of(weights, 2)
        self.patch(loader, patches, after, 2)
        more, later = patches_of(after, 3)
        loader.begin_patch(manifest_of(later, 3))
        with pytest.raises(StateError):
            loader.rollback()
        loader.abort("as told")
        with pytest.raises(StateError):
            loader.rollback()
        self.check_live(loader, after)
        self.patch(loader, more, later, 3)
        loader.rollback()
        self.check_live(loader, after)
        self.sync(loader, weights, 4)
        with pytest.raises(StateError):
            loader.rollback()
        self.check_live(loader, weights)

    def test_a_patch_of_nothing(self) -> None:
        """A step that changed no element, or a tensor that has none."""
        loader, weights = self.patched()
        self.patch(loader, [], weights, 2)
        self.check_live(loader, weights)
        none = [
            Patch(name=name, positions=torch.empty(0, dtype=torch.uint32), values=tensor.reshape(-1)[:0])
            for name, tensor in weights.items()
        ]
        self.patch(loader, none, weights, 3)
        self.check_live(loader, weights)

    def test_what_is_not_prepared_is_not_committed(self) -> None:
        """Nor another version than the one that was."""
        loader, weights = self.patched()
        before = self.live(loader)
        patches, after = patches_of(weights, 2)
        loader.begin_patch(manifest_of(after, 2))
        loader.load_weights(patches[:1])
        with pytest.raises(StateError):
            loader.commit(Version(run_id="contract", number=2))
        list(loader.prepare_patch())
        with pytest.raises(StateError):
            loader.commit(Version(run_id="contract", number=3))
        loader.load_weights(patches[1:])  # behind the preparation
        with pytest.raises(StateError):
            loader.commit(Version(run_id="contract", number=2))
        loader.abort("as told")
        assert self.live(loader) == before

    def test_one_bracket_at_a_time_of_either_kind(self) -> None:
        """And outside one nothing works."""
        loader, weights = self.patched()
        manifest = manifest_of(weights, 2)
        with pytest.raises(StateError):
            loader.prepare_patch()
        for begin in (loader.begin_patch, loader.begin):
            begin(manifest)
            for again in (loader.begin_patch, loader.begin):
                with pytest.raises(StateError):
                    again(manifest)
            loader.abort("as told")

    def test_a_patch_of_another_model_is_refused(self) -> None:
        """At begin, by name, as a whole version is."""
        loader, weights = self.patched()
        before = self.live(loader)
        last = next(name for name, tensor in reversed(weights.items()) if tensor.numel())
        with pytest.raises(ManifestMismatchError):
            loader.begin_patch(manifest_of({name: weights[name] for name in weights if name != last}, 2))
        wrong = dict(weights) | {last: torch.zeros(3, 3, 3, 3)}
        with pytest.raises(ManifestMismatchError) as caught:
            loader.begin_patch(manifest_of(wrong, 2))
        assert caught.value.parameter == last
        assert self.live(loader) == before
        assert loader.healthy
