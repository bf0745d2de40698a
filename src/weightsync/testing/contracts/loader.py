"""What every `WeightLoader` keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.testing.contracts.cases import bytes_of, manifest_of
from weightsync.testing.contracts.loader_patches import LoaderPatchCases
from weightsync.types import Box, Full, Patch, TensorSpec, Version


class WeightLoaderContract(LoaderPatchCases):
    """What every `WeightLoader` keeps: the bracket, and that nothing half-loaded is ever taken for whole."""

    def check_unchanged(self, loader: WeightLoader, before: Mapping[str, bytes]) -> None:
        """Serves exactly what it served before."""
        live = self.live(loader)
        assert loader.healthy
        assert all(before[name] == data for name, data in live.items() if name in before)

    def test_every_commit_serves_exactly_what_was_loaded(self) -> None:
        """Several in a row: buffers that alternate must not mix up their turns."""
        loader = self.make_loader()
        assert loader.healthy
        for number in (1, 2, 3, 4):
            weights = self.make_weights(number)
            self.sync(loader, weights, number)
            assert loader.healthy
            self.check_live(loader, weights)

    def test_the_same_version_can_be_loaded_again(self) -> None:
        """A retry after a lost answer."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        self.sync(loader, weights, 1)
        self.check_live(loader, weights)

    def test_the_updates_memory_is_free_when_load_weights_returns(self) -> None:
        """The transport overwrites its bucket at once."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        for name, tensor in weights.items():
            borrowed = tensor.detach().clone()
            loader.load_weights([Full(name=name, tensor=borrowed)])
            if borrowed.numel():
                borrowed.view(torch.uint8).fill_(0xEE) if borrowed.dim() else borrowed.zero_()
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_updates_are_taken_lazily_and_an_error_of_their_source_ends_the_chunk(self) -> None:
        """The decoder proves bytes while the loader pulls."""
        loader, weights = self.make_loader(), self.make_weights(2)

        def stream() -> Iterator[Full]:
            name = next(iter(weights))
            yield Full(name=name, tensor=weights[name])
            raise LoadError("the decoder failed")

        loader.begin(manifest_of(weights))
        with pytest.raises(LoadError, match="the decoder failed"):
            loader.load_weights(stream())
        loader.abort("as told")
        self.sync(loader, weights, 2)
        self.check_live(loader, weights)

    @pytest.mark.parametrize("fault", ["shape", "dtype", "missing", "extra", "part"])
    def test_a_manifest_that_does_not_fit_changes_nothing(self, fault: str) -> None:
        """Refused at begin, by name, and the next begin works."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before = self.live(loader)
        specs = list(manifest_of(weights).tensors)
        odd = next(spec for spec in specs if spec.shape and spec.nbytes)
        at = specs.index(odd)
        match fault:
            case "shape":
                specs[at] = TensorSpec(name=odd.name, dtype=odd.dtype, shape=(*odd.shape, 2))
            case "dtype":
                specs[at] = TensorSpec(
                    name=odd.name, dtype="float64" if odd.dtype != "float64" else "float32", shape=odd.shape
                )
            case "missing":
                del specs[at]
            case "extra":
                odd = TensorSpec(name="nobody.has.this", dtype="uint8", shape=(1,))
                specs.append(odd)
            case "part":
                half = (odd.shape[0] // 2, *odd.shape[1:])
                box = Box(offset=(0,) * len(half), shape=half)
                specs[at] = TensorSpec(name=odd.name, dtype=odd.dtype, shape=odd.shape, box=box)
        with pytest.raises(ManifestMismatchError) as caught:
            loader.begin(manifest_of(weights, 2, tensors=tuple(specs)))
        # What the manifest lacks has no name in it: the loader says its own.
        assert caught.value.parameter == odd.name or (fault == "missing" and caught.value.parameter)
        self.check_unchanged(loader, before)
        self.sync(loader, self.make_weights(3), 3)
        self.check_live(loader, self.make_weights(3))

    def test_one_bracket_at_a_time(self) -> None:
        """A second begin disturbs nothing."""
        loader, weights = self.make_loader(), self.make_weights(1)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        with pytest.raises(StateError):
            loader.begin(manifest_of(weights, 2))
        self.load(loader, weights)
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_nothing_works_outside_a_bracket(self) -> None:
        """Neither before a begin, nor after a commit, nor after an abort."""
        loader, weights = self.make_loader(), self.make_weights(1)
        version = manifest_of(weights).version

        def refused() -> None:
            before = self.live(loader)
            steps: list[Callable[[], None]] = [
                lambda: self.load(loader, weights),
                loader.verify,
                lambda: loader.commit(version),
            ]
            for step in steps:
                with pytest.raises(StateError):
                    step()
            assert self.live(loader) == before

        refused()
        self.sync(loader, weights, 1)
        refused()
        loader.begin(manifest_of(weights, 2))
        loader.abort("as told")
        refused()

    def test_what_is_not_complete_is_not_verified_and_not_committed(self) -> None:
        """One tensor short."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        last = list(weights)[-1]
        loader.begin(manifest)
        self.load(loader, {name: tensor for name, tensor in weights.items() if name != last})
        with pytest.raises(ManifestMismatchError) as caught:
            loader.verify()
        assert caught.value.parameter == last
        with pytest.raises(StateError):
            loader.commit(manifest.version)
        loader.abort("as told")

    def test_what_is_not_verified_is_not_committed(self) -> None:
        """Everything came, nobody looked."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        self.load(loader, weights)
        with pytest.raises(StateError):
            loader.commit(manifest.version)
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_only_the_version_that_was_loaded_is_committed(self) -> None:
        """Neither another number nor another run."""
        loader, weights = self.make_loader(), self.make_weights(2)
        loader.begin(manifest_of(weights, 2))
        self.load(loader, weights)
        loader.verify()
        for other in (Version(run_id="contract", number=3), Version(run_id="other", number=2)):
            with pytest.raises(StateError):
                loader.commit(other)
        loader.abort("as told")

    @pytest.mark.parametrize("fault", ["unknown", "twice", "shape", "dtype", "patch"])
    def test_an_update_that_does_not_fit_is_refused_by_name(self, fault: str) -> None:
        """The caller aborts; the next bracket works."""
        loader, weights = self.make_loader(), self.make_weights(2)
        loader.begin(manifest_of(weights))
        name, tensor = next((name, tensor) for name, tensor in weights.items() if tensor.dim() and tensor.numel())
        update: Any = Full(name=name, tensor=tensor)
        match fault:
            case "unknown":
                update = Full(name="nobody.has.this", tensor=tensor)
            case "twice":
                loader.load_weights([update])
            case "shape":
                update = Full(name=name, tensor=tensor.unsqueeze(0))
            case "dtype":
                update = Full(name=name, tensor=tensor.view(torch.uint8))
                if tensor.dtype == torch.uint8:
                    update = Full(name=name, tensor=tensor.view(torch.int8))
            case "patch":
                update = Patch(name=name, positions=torch.tensor([0]), values=tensor.reshape(-1)[:1])
        with pytest.raises((ManifestMismatchError, UnsupportedError)) as caught:
            loader.load_weights([update])
        assert caught.value.parameter == update.name
        loader.abort("as told")
        self.sync(loader, self.make_weights(3), 3)
        self.check_live(loader, self.make_weights(3))

    @pytest.mark.parametrize("when", ["begun", "one chunk", "loaded", "verified"])
    def test_an_abort_serves_the_old_weights_or_nothing(self, when: str) -> None:
        """And the next bracket serves the new ones, whole."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before, new = self.live(loader), self.make_weights(2)
        loader.begin(manifest_of(new, 2))
        if when == "one chunk":
            name = next(name for name, tensor in new.items() if tensor.numel())
            loader.load_weights([Full(name=name, tensor=new[name])])
        elif when != "begun":
            self.load(loader, new)
        if when == "verified":
            loader.verify()
        for _ in range(2):
            loader.abort("as told")
        if loader.healthy:
            assert self.live(loader) == before, "healthy means: exactly the old weights"
        else:
            assert loader.writes_live, "only who writes over live weights can lose them"
            assert when != "begun"
        self.sync(loader, self.make_weights(3), 3)
        assert loader.healthy
        self.check_live(loader, self.make_weights(3))

    def test_abort_without_a_bracket_is_harmless(self) -> None:
        """Before the first and after a commit."""
        loader, weights = self.make_loader(), self.make_weights(1)
        loader.abort("nothing to abort")
        self.sync(loader, weights, 1)
        loader.abort("too late")
        self.check_live(loader, weights)
        assert loader.healthy

    def test_while_loading_the_live_weights_are_whole_or_not_called_healthy(self) -> None:
        """`healthy` is what an engine asks before it serves: it must not be True over half-written weights."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before, new = self.live(loader), self.make_weights(2)
        loader.begin(manifest_of(new, 2))
        assert loader.healthy, "nothing was written yet"
        self.load(loader, dict(list(new.items())[: len(new) // 2]), chunks=1)
        if loader.healthy:
            assert self.live(loader) == before
        else:
            assert loader.writes_live
        loader.abort("as told")

    def test_live_tensors_are_what_commit_will_serve(self) -> None:
        """Old before verify (where loading is beside the live weights), new from verify on."""
        loader, old, new = self.make_loader(), self.make_weights(1), self.make_weights(2)
        self.sync(loader, old, 1)
        loader.begin(manifest_of(new, 2))
        self.load(loader, new)
        if not loader.writes_live:
            self.check_live(loader, old)
        loader.verify()
        with contextlib.suppress(UnsupportedError):
            proved = {held.spec.name: held for held in loader.live_tensors()}
            for name, tensor in new.items():
                assert bytes_of(proved[name].tensor) == bytes_of(tensor)
                assert proved[name].spec.shape == tuple(tensor.shape)
        loader.commit(Version(run_id="contract", number=2))
        self.check_live(loader, new)
