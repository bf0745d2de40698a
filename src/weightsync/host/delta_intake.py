"""DeltaIntake: whether a puller asks for deltas, and what it does with those that come.

They go into memory, onto the staging, and are laid out for engines that take patches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping

from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    MissingDependencyError,
    StateError,
    TransferAbortedError,
)
from weightsync.handles.fanout import in_thread
from weightsync.handles.stepped import check_choice
from weightsync.host.agent_calls import Agents, Granted
from weightsync.host.delta_apply import Changed
from weightsync.host.delta_pull import Read, apply_blobs, fetch_blobs, lay_out_patch, places_to_keep
from weightsync.host.progress import all_at_once
from weightsync.host.staged_version import StagedPatch
from weightsync.host.staging import Held, Staging, Target
from weightsync.memory import Segment
from weightsync.observe import Recorder
from weightsync.types import Manifest
from weightsync.types.publication import DeltaBase
from weightsync.types.transfer_messages import MODES

_CUTS_UNTIL_FULL = 2

_logger = logging.getLogger(__name__)


class DeltaIntake:
    """Of one puller, and called by the thread that pulls.

    Args:
        agents: the puller's conversation with its agents.
        staging: what deltas are applied to.
        recorder: where phases go.
        mode: see `Puller`.
        patch_limit: see `Puller`.

    Attributes:
        mode: the same; "full" from the moment on where deltas can't be read here.

    Raises:
        ConfigError: there is no such mode.
    """

    def __init__(
        self, agents: Agents, staging: Staging, recorder: Recorder, *, mode: str, patch_limit: Callable[[], float]
    ) -> None:
        check_choice("mode", mode, MODES)
        self.mode = mode
        self._agents = agents
        self._staging = staging
        self._recorder = recorder
        self._patch_limit = patch_limit
        self._full_next = False
        self._loads_codec = False
        self._num_cut = 0

    def base(self, source: int | None) -> DeltaBase | None:
        """What a delta of that source may build on; None: a full is asked for."""
        held = None if self._full_next or self.mode == "full" else self._staging.held
        if held is None or source is None or source >= len(held.digests):
            return None
        return DeltaBase(run_id=held.version.run_id, version=held.version.number, digest=held.digests[source])

    def begin(self) -> None:
        """Bytes are about to come: the codec is loaded beside the first, which come in full. The deltas that came last
        are given up."""
        if self._agents.shelf is not None:
            self._agents.shelf.withdraw(staged=False)
        if not self._loads_codec and self.mode != "full":
            self._loads_codec = True
            in_thread(_load_codec, name="weightsync-delta-codec")

    def fetch(
        self, deltas: Mapping[int, Granted], read: Read, arrived: Callable[[int], None], *, cancel: Callable[[], None]
    ) -> dict[int, list[memoryview]]:
        """Every source's deltas, all sources at once: while one is read the grants of the others would run out.

        Raises:
            WeightSyncError: see `fetch_blobs`. Of deltas nothing is kept: those that fail twice so are given up for a
                full, of which every block is kept from pull to pull.
        """
        blobs: dict[int, list[memoryview]] = {}
        any_came = threading.Event()

        def counted(num_bytes: int) -> None:
            any_came.set()
            arrived(num_bytes)

        def fetch(index: int, each: Granted) -> None:
            blobs[index] = fetch_blobs(self._agents, each, read, counted)

        try:
            all_at_once([functools.partial(fetch, index, each) for index, each in deltas.items()], cancel=cancel)
        except (TransferAbortedError, DeadlineExceededError, DigestMismatchError) as error:
            # Given up, too slow or unreadable: a full goes on where it was cut off. Who sends nothing is asked again.
            if any_came.is_set() or not isinstance(error, DeadlineExceededError):
                self._num_cut += 1
                self._full_next = self._num_cut >= _CUTS_UNTIL_FULL
            raise
        self._num_cut = 0
        return blobs

    def apply(
        self, granted: Mapping[int, Granted], blobs: Mapping[int, list[memoryview]], target: Target, held: Held | None
    ) -> list[Changed] | str:
        """Deltas onto the staging, on which the rest of the version is already; what has changed, or why nobody is
        told.

        Raises:
            StateError: they did not give what was published; the next attempt takes a full.
        """
        deltas = {index: each for index, each in granted.items() if each.grant.delta is not None}
        if not deltas:
            return "it came in full"
        assert held is not None
        manifest = next(iter(deltas.values())).grant.publication.manifest
        in_part = any(
            each.grant.proof.digest not in held.digests[index : index + 1]
            for index, each in granted.items()
            if index not in deltas
        )
        num_deltas = max(map(len, blobs.values()))
        keep_at_most = 0 if in_part else places_to_keep(manifest.tensors, self._patch_bytes(manifest), num_deltas)
        changes: list[Changed] | None = []
        try:
            with self._recorder.phase("apply delta", detail=str(manifest.version)):
                for index, each in deltas.items():
                    found = apply_blobs(each, blobs[index], target, held, keep_at_most=keep_at_most)
                    changes = None if found is None or changes is None else changes + found
                    keep_at_most = 0 if changes is None else keep_at_most - sum(len(one.places) for one in found or ())
        except Exception as error:  # whatever it is: a full does not need what failed here
            self._staging.forget()
            self._full_next = True
            if isinstance(error, MissingDependencyError | ImportError):
                self.mode = "full"
                _logger.warning("no deltas are taken any more: %s", error)
            raise StateError(
                f"a delta did not give what was published, a full is taken: {type(error).__name__}: {error}"
            ) from error
        if in_part:
            return "a part of it came in full: what has changed there is not known"
        return self._too_much() if changes is None else changes

    def lay_out(
        self, changes: list[Changed] | str, target: Target, held: Held | None, manifest: Manifest
    ) -> tuple[StagedPatch, Segment] | str:
        """What was changed, for engines that take patches, or why there is nothing for them; the segment is the
        caller's to close."""
        self._full_next, self._num_cut = False, 0  # a version has come, whole
        if isinstance(changes, str):
            return changes
        if not self._patch_limit():
            return self._too_much()
        assert held is not None
        return lay_out_patch(changes, target, held, self._patch_bytes(manifest)) or self._too_much()

    def _too_much(self) -> str:
        """Why changes are not laid out."""
        limit = self._patch_limit()
        if not limit:
            return "no engine takes changes, as far as was known when it came, or patch_limit is 0"
        return f"more has changed than patch_limit allows, {limit:.0%} of the model's bytes with positions"

    def _patch_bytes(self, manifest: Manifest) -> int:
        """The most that a patch may take."""
        return int(self._patch_limit() * manifest.total_bytes)


def _load_codec() -> None:
    """So that the first delta need not wait for it."""
    from weightsync.codec.delta import warm_up

    with contextlib.suppress(ImportError):
        warm_up()
