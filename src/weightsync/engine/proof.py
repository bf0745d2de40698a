"""Proofs of one worker: what its live weights are, and what a patch would make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from weightsync.codec.digest import PatchPart, digest_of, patch_sums
from weightsync.codec.model_digest import ShardSum, patched_digest
from weightsync.codec.whole import whole_digest
from weightsync.engine.session import Session
from weightsync.errors import DigestMismatchError, UnsupportedError, VersionError
from weightsync.load.base import WeightLoader
from weightsync.types import Manifest, PatchBase, Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What is live.

    Attributes:
        manifest: of the version that was committed.
        session: that committed it.
        proved: whether its digest was computed from the live weights; a patch needs that of its base, or a loader that
            `takes_patch` without.
    """

    manifest: Manifest
    session: str
    proved: bool

    @property
    def version(self) -> Version:
        """Of what is live."""
        return self.manifest.version

    @property
    def digest(self) -> str | None:
        """Of what is live; None where its trainer gave none."""
        return self.manifest.model_digest


def committed(session: Session, manifest: Manifest, loader: WeightLoader) -> Served:
    """What is live behind a commit. A full load may be proved in it; a version without a digest never is."""
    proved = session.proved or (session.base is None and loader.proved)
    return Served(manifest=manifest, session=session.name, proved=proved and manifest.model_digest is not None)


def prove(loader: WeightLoader, manifest: Manifest) -> tuple[str | None, str | None]:
    """(digest of the memory that will serve, None) or (None, why it can't be had).

    Raises:
        DigestMismatchError: it is another than the manifest's.
    """
    try:
        digest = _live_digest(loader, manifest)
    except UnsupportedError as error:
        return None, error.message
    if manifest.model_digest is None:
        return None, "the trainer gave no digest of the model"
    if digest != manifest.model_digest:
        raise DigestMismatchError(
            f"the engine's weights have digest {digest}, the trainer published {manifest.model_digest}",
            version=str(manifest.version),
        )
    return digest, None


def prove_patch(loader: WeightLoader, base: PatchBase, manifest: Manifest, changes: dict[str, ShardSum]) -> str:
    """Base + change is the published digest, with the change taken from what is live now; fills in `changes`.

    Raises:
        DigestMismatchError: it is not. Nothing was changed.
    """
    names: list[str] = []

    def parts() -> Iterator[PatchPart]:
        for each in loader.prepare_patch():
            names.append(each.spec.name)
            yield each.spec, each.positions, each.old, each.new, each.checked

    sums = patch_sums(parts())
    changes.update(zip(names, sums, strict=True))
    digest = patched_digest(base.model_digest, sum(sums, ShardSum.zero()))
    if digest != manifest.model_digest:
        raise DigestMismatchError(
            f"with this patch the engine's weights would have digest {digest}, the trainer published "
            f"{manifest.model_digest}",
            version=str(manifest.version),
            state_left="nothing was changed",
        )
    return digest


def check_base(
    base: PatchBase, served: Served | None, loader: WeightLoader, *, version: Version, damage: str | None
) -> None:
    """Refuses a patch on anything but what is live and whole, and proved unless the loader `takes_patch` all the same;
    `damage`: what an audit found.

    Raises:
        VersionError: nothing was changed: load it in full.
    """
    reason = None
    if "patch" not in loader.accepts:
        reason = "this engine takes whole tensors alone"
    elif served is None or (served.version, served.digest) != (base.version, base.model_digest):
        live = f"{served.version} of digest {served.digest}" if served else "nothing that was synced"
        reason = f"the patch is one on {base.version} of digest {base.model_digest}, this engine serves {live}"
    elif not served.proved and not loader.takes_patch:
        reason = f"nobody has proved that the live weights are {served.version}"
    elif not loader.healthy:
        reason = "the live weights are half-loaded"
    else:
        reason = damage
    check_undamaged(version, reason)


def check_undamaged(version: Version, damage: str | None) -> None:
    """Raises VersionError where there is a reason against a patch on what is live."""
    if damage is not None:
        raise VersionError(damage, version=str(version), state_left="nothing was changed: load it in full")


def auditable(served: Served | None, loader: WeightLoader) -> Served:
    """What is served, where somebody can tell whether that is what was committed.

    Raises:
        UnsupportedError: nobody can, and why.
    """
    if served is None:
        raise UnsupportedError("nothing was synced yet")
    if served.digest is None:
        raise UnsupportedError("the trainer gave no digest of the model")
    if not served.proved and loader.takes_patch:
        next(iter(loader.live_tensors()), None)  # it says why they can't be read
    return served


def check_immutable(served: Served | None, manifest: Manifest) -> None:
    """Raises VersionError where that version is served with other bytes."""
    if served and served.version == manifest.version and served.digest != manifest.model_digest:
        raise VersionError(
            "this version is served already with other bytes: a version is immutable", version=str(manifest.version)
        )


def _live_digest(loader: WeightLoader, manifest: Manifest) -> str:
    """From the memory that will serve."""
    if (digest := loader.live_digest()) is not None:
        return digest
    whole, table = loader.live_whole(), manifest.table
    if whole is None or whole.keys() != table.by_name.keys():  # what lacks or is too much is told in words
        return digest_of(loader.live_tensors(), table)
    return whole_digest(table, [whole[spec.name] for spec in table])
