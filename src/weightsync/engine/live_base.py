"""Whether an adapter belongs to the base that lies in this worker's memory: by the digest of that."""

from __future__ import annotations

from weightsync.codec.digest import digest_of
from weightsync.errors import WrongArtifactError, WrongBaseError
from weightsync.load.base import WeightLoader
from weightsync.tensors import spec_of, write_counter
from weightsync.types import HeldTensor, Manifest, TensorTable

_Glance = tuple[tuple[str, int, int | None], ...]


def check_artifact(manifest: Manifest, loader: WeightLoader) -> None:
    """Raises WrongArtifactError where the loader takes no publication of that kind. Nothing was changed."""
    if manifest.artifact not in loader.artifacts:
        taken = " and ".join(sorted(loader.artifacts))
        hint = (
            "load adapters with PeftAdapterLoader, or MergedAdapterLoader for a plain module"
            if manifest.artifact == "lora"
            else "an adapter's engine keeps its base: publish the model to an engine of its own"
        )
        raise WrongArtifactError(
            f"this engine takes publications of kind {taken}, and {manifest.model_id} is of kind {manifest.artifact}: "
            f"{hint}",
            version=str(manifest.version),
            state_left="nothing was changed",
        )


class LiveBase:
    """The digest of an adapter's base, computed from live bytes when they are other memory than at the last time.

    Written in place, they are still known by their tensors' version counters; who writes past these says so by a new
    loader.
    """

    def __init__(self) -> None:
        self._seen: _Glance = ()
        self._digest = ""

    def check(self, manifest: Manifest, loader: WeightLoader) -> None:
        """Refuses an adapter of another base.

        Raises:
            WrongBaseError: nothing was changed.
        """
        base = None if manifest.adapter is None else manifest.adapter.base
        if base is None:
            return
        if base.model_digest is None:
            raise WrongBaseError(
                f"the adapter belongs to {base}, and which version this engine's base is nobody here knows: give an "
                "AdapterEngine the base's own engine, or publish the adapter with base= a digest, or False",
                version=str(manifest.version),
                state_left="nothing was changed; the old adapter is served on",
            )
        live = self.digest(loader)
        if live is not None and live != base.model_digest:
            raise WrongBaseError(
                f"the adapter was trained on {base}, this engine's base has digest {live}: load that base first, or "
                "train on this one",
                version=str(manifest.version),
                state_left="nothing was changed; the old adapter is served on",
            )

    def check_commit(self, manifest: Manifest, loader: WeightLoader) -> None:
        """Again, of what was staged; where the base can't have changed there is nothing to look at."""

    def digest(self, loader: WeightLoader) -> str | None:
        """Of the live base; None where the loader can't tell what it is."""
        tensors = loader.base_tensors()
        if tensors is None:
            return None
        seen = tuple((name, tensor.data_ptr(), write_counter(tensor)) for name, tensor in tensors.items())
        if seen != self._seen or not self._digest:
            specs = TensorTable.of(spec_of(name, tensor) for name, tensor in tensors.items())
            held = [
                HeldTensor(spec=spec, box=None, tensor=tensor.detach())
                for spec, tensor in zip(specs, tensors.values(), strict=True)
            ]
            self._digest, self._seen = digest_of(held, specs), seen
        return self._digest
