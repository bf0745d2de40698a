"""UpdateSession: brings N engines from the version that they serve to the next one. Push and pull both use it.

    begin -> [pause] -> chunks -> stage: each proves its bytes, or says why it can't -> [pause] -> commit -> resume
                    any failure -> abort: they serve their old version, or nothing

Where one engine loads into live weights, all are paused before the first chunk; else they are for the commit alone.
The caller moves the chunks, between `pause_live_writers` and `finish`, and calls `abort` after any failure.
"""

from __future__ import annotations

import collections
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Concatenate, TypeVar

from weightsync.errors import DigestMismatchError, EngineError, WeightSyncError
from weightsync.observe import Recorder, paused_s
from weightsync.observe.events import usable
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EngineReply,
    InferenceEngineClient,
    Manifest,
    PatchBase,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    StageRequest,
    Version,
)

_R = TypeVar("_R")

COMMIT_S = 10.0
"""How long a commit may take before paused engines go on without it."""
ABORT_TIMEOUT_S = 5.0
OTHER_CHECKSUM = "engines that were given the same version have other checksums of their live weights"

_logger = logging.getLogger(__name__)


class UpdateSession:
    """One session that is open on all of these engines. Used once, by one thread.

    Args:
        client: the engines; one that fails fails all.
        version: what they are to serve.
        deadline: of the whole.
        pause_timeout_s: how long an engine may take to finish running generations.
        recorder: where phases go, engines' own included.
        may_pause: called once, before the first engine is paused; returns when that is allowed, or raises.
        abort_timeout_s: how long engines may take to answer an abort.

    Attributes:
        name: of the session.
        checksums: engines' own, of their live weights, by engine; of those that have one.
        resumed: what each engine has said when it went on: one that can't prove its live weights before the commit may
            have by then.
    """

    def __init__(
        self,
        client: InferenceEngineClient,
        version: Version,
        deadline: Deadline,
        *,
        pause_timeout_s: float,
        recorder: Recorder,
        may_pause: Callable[[], None] = lambda: None,
        abort_timeout_s: float = ABORT_TIMEOUT_S,
    ) -> None:
        self.name = f"{version}#{uuid.uuid4().hex[:8]}"
        self._client = client
        self._version = version
        self._deadline = deadline
        self._pause_timeout_s = pause_timeout_s
        self._recorder = recorder
        self._may_pause = may_pause
        self._abort_timeout_s = abort_timeout_s
        self._phases: list[PhaseRecord] = []
        self._pauses_first = False
        self._paused = False
        self.checksums: dict[str, str] = {}
        self.resumed: Mapping[str, EngineReply] = {}

    @property
    def is_paused(self) -> bool:
        """Whether every engine has said that it paused: none is told to commit before."""
        return self._paused

    @property
    def paused_s(self) -> float:
        """How long no generation could start, by what engines have told so far."""
        return paused_s(self._phases)

    def begin(self, manifest: Manifest, base: PatchBase | None = None) -> None:
        """Opens the session on every engine; with `base` it takes changes of that alone."""
        deadline_s = self._deadline.check("time to begin")
        request = BeginRequest(session=self.name, manifest=manifest, deadline_s=deadline_s, base=base)
        replies = self._call("begin", self._client.begin, request)
        self._pauses_first = any(
            reply.pauses_first or (base is None and reply.writes_live) for reply in replies.values()
        )

    def pause_live_writers(self) -> None:
        """Pauses all for the rest of the update where one of them loads into live weights."""
        if self._pauses_first:
            self._pause(lease_s=self._deadline.remaining_s)

    def update(self, request: AnyUpdateRequest) -> None:
        """Announces one chunk, and waits until every engine has loaded it."""
        left = self._deadline.check("time to load a chunk")
        self._note(self._client.update_weights(request, timeout_s=left).result())

    def finish(self, manifest: Manifest) -> dict[str, str]:
        """Every chunk is there: `stage`, and then `commit`."""
        unprovable = self.stage(manifest)
        self.commit()
        return {
            who: reply.unprovable or unprovable[who]
            for who, reply in self.resumed.items()
            if who in unprovable and not (reply.digests_equal and reply.model_digest == manifest.model_digest)
        }

    def stage(self, manifest: Manifest) -> dict[str, str]:
        """Has each engine prove its bytes, or say why it can't.

        Args:
            manifest: that of `begin`, with the digests of what was published.

        Returns:
            Why an engine can't prove its live bytes, by engine; the others have proved them.

        Raises:
            DigestMismatchError: an engine answered well, and has proved nothing; or engines were given the same, and
                have other checksums of their live weights.
            WeightSyncError: an engine failed, or the deadline is over.
        """
        staged = self._call("stage", self._client.stage, StageRequest(session=self.name, manifest=manifest))
        self._compare(staged)
        return _check_proofs(staged, manifest)

    def commit(self) -> None:
        """Has what was staged served by every engine.

        Raises:
            EngineError: one answered well, and serves something else.
            WeightSyncError: an engine failed, or the deadline is over.
        """
        if not self._paused:
            self._pause(lease_s=self._pause_timeout_s + COMMIT_S)
        committed = self._call("commit", self._client.commit, CommitRequest(session=self.name))
        try:
            self._go_on(committed)
        except WeightSyncError as error:
            error.state_left = error.state_left or (
                f"every engine has answered the commit of {self._version} well, and serves that once its pause ends, "
                "unless this error says otherwise"
            )
            raise

    def _go_on(self, committed: Mapping[str, EngineReply]) -> None:
        """Resumes engines that have committed what was meant."""
        for who, reply in committed.items():
            if reply.version != self._version:
                raise EngineError(
                    f"it answered commit well and serves {reply.version}", peer=who, version=str(self._version)
                )
        self._compare(committed)
        self.resumed = self._call("resume", self._client.resume, ResumeRequest(session=self.name))

    def abort(self, reason: str) -> None:
        """Never raises: engines that hear nothing end the session at its own deadline. The log says which."""
        request = AbortRequest(session=self.name, reason=reason[:500])
        try:
            failed: Mapping[str, Exception] = self._client.abort(request, timeout_s=self._abort_timeout_s)
        except Exception as error:  # a client of somebody else's
            failed = dict.fromkeys(self._client.engine_ids, error)
        for who, why in failed.items():
            _logger.warning("engine %s: session %s could not be aborted: %s", who, self.name, why)

    def _pause(self, *, lease_s: float) -> None:
        """Should this process die, engines go on by themselves after `lease_s`."""
        self._may_pause()
        left = self._deadline.check("time to pause")
        request = PauseRequest(
            session=self.name, timeout_s=min(self._pause_timeout_s, left), lease_s=min(lease_s, left)
        )
        self._call("pause", self._client.pause, request)
        self._paused = True

    def _compare(self, replies: Mapping[str, EngineReply]) -> None:
        self.checksums |= {who: reply.checksum for who, reply in replies.items() if reply.checksum is not None}
        for who in unequal(self.checksums):
            raise DigestMismatchError(OTHER_CHECKSUM, peer=who, version=str(self._version))

    def _call(
        self, name: str, step: Callable[Concatenate[_R, ...], Mapping[str, EngineReply]], request: _R
    ) -> Mapping[str, EngineReply]:
        with self._recorder.phase(f"wait for {name}"):  # the phases of that name are the engines' own
            replies = step(request, timeout_s=self._deadline.check(f"time to {name}"))
        self._note(replies)
        return replies

    def _note(self, replies: Mapping[str, EngineReply]) -> None:
        for reply in replies.values():
            self._phases.extend(usable(reply.phases))
            self._recorder.extend(reply.phases)


def unequal(checksums: Mapping[str, str]) -> tuple[str, ...]:
    """Engines whose checksum differs from that of most engines with as many workers; all of them where none is most.

    Args:
        checksums: by engine, as `EngineReply.checksum` has them: the number of workers stands before the colon.
    """
    alike: dict[str, dict[str, str]] = {}
    for who, checksum in checksums.items():
        alike.setdefault(checksum.partition(":")[0], {})[who] = checksum
    wrong: list[str] = []
    for each in alike.values():
        counts = collections.Counter(each.values()).most_common(2)
        tied = len(counts) == 2 and counts[0][1] == counts[1][1]
        wrong += [who for who, checksum in each.items() if tied or checksum != counts[0][0]]
    return tuple(wrong)


def _check_proofs(staged: Mapping[str, EngineReply], manifest: Manifest) -> dict[str, str]:
    """Why some can't prove their bytes; one that answered well, and neither proved them nor says why, is a failure."""
    unprovable: dict[str, str] = {}
    for who, reply in staged.items():
        if reply.digests_equal is None and reply.unprovable:
            unprovable[who] = reply.unprovable
        elif reply.digests_equal is not True or reply.model_digest != manifest.model_digest:
            raise DigestMismatchError(
                f"it answered stage without a proof: digests_equal {reply.digests_equal}, model_digest "
                f"{reply.model_digest}; published was {manifest.model_digest}",
                peer=who,
                version=str(manifest.version),
            )
    return unprovable
