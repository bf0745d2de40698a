"""PatchingLoader: the bracket of a patch, which every loader has that writes changes into what is live."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Generic, TypeVar

from weightsync.errors import LoadError, as_weightsync_error
from weightsync.load.base import WeightLoader
from weightsync.load.live import ShardPatch
from weightsync.load.patching import Change, LivePatch
from weightsync.types import Manifest

AnyPatch = TypeVar("AnyPatch", LivePatch, ShardPatch)

NOT_UNDONE = "refuses to serve until the next full load"


class PatchingLoader(WeightLoader, Generic[AnyPatch]):
    """Opened by a subclass, which makes the patch and adds to it: `begin_patch` and `load_weights`. From there on the
    bracket is here: gather before the pause, write within it, take back what failed here or elsewhere.

    What fails in the writes has been undone when it is raised, or `healthy` is False.
    """

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._healthy = True
        self._patch: AnyPatch | None = None  # of the bracket that is open
        self._undo: AnyPatch | None = None  # of the last commit
        self._prepared = False

    # --- what a subclass adds ---

    @abc.abstractmethod
    def _check_live(self) -> None:
        """Sees that live tensors are those that the patch was made for.

        Raises:
            LoadError: one was moved, or another took its place.
        """

    def _apply(self, patch: AnyPatch) -> None:
        """Writes it, in the pause."""
        patch.apply()

    def _unapply(self, patch: AnyPatch) -> None:
        """Takes it back, in the pause, whatever of it was written."""
        patch.undo()

    def _undone(self) -> None:
        """The last commit was undone by `rollback`."""

    def _stays(self, patch: AnyPatch) -> None:
        """The last commit stays; outside of the pause. Raises nothing."""

    def _not_undone(self) -> None:
        """A patch could not be undone: live weights are of no version."""

    # --- the bracket ---

    @property
    def healthy(self) -> bool:
        return self._healthy

    @property
    def can_roll_back(self) -> bool:
        return self._undo is not None

    def prepare_patch(self) -> Iterator[Change]:
        if self._patch is None:
            return super().prepare_patch()
        self._check_live()
        self._patch.gather()
        self._prepared = True
        return self._patch.changes()

    def rollback(self) -> None:
        if self._undo is None or self._manifest is not None:
            return super().rollback()
        undo, self._undo = self._undo, None
        try:
            self._take_back(undo)
        finally:
            undo.close()
        self._undone()
        return None

    def settle(self) -> None:
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        try:
            self._stays(undo)
        finally:
            undo.close()

    def _write(self, patch: AnyPatch) -> None:
        """All of what was prepared, or none of it. It can be taken back from then on, by `rollback`."""
        patch.check_memory()
        self._prepared = self._healthy = False  # one that fails is not tried again
        try:
            self._apply(patch)
        except BaseException as error:
            self._take_back(patch)
            raise as_weightsync_error(error, LoadError, "writing a patch failed; it was undone") from error
        self._undo, self._patch = patch, None
        self._healthy = True

    def _take_back(self, patch: AnyPatch) -> None:
        self._healthy = False
        try:
            self._unapply(patch)
        except BaseException as error:
            self._not_undone()
            raise LoadError(f"a patch could not be undone: {error}", state_left=NOT_UNDONE) from error
        self._healthy = True

    def _drop_patch(self) -> None:
        """The bracket ends without a commit."""
        self._prepared = False
        if self._patch is not None:
            self._patch.close()
            self._patch = None
