"""InstanceCalls: what a sync of a fleet says to one instance, and what it makes of the answer."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from weightsync.clients.host import RolloutClient
from weightsync.control.instance import Member
from weightsync.control.methods.spans import Spans
from weightsync.control.pool import RolloutPool
from weightsync.errors import VersionError, WeightSyncError
from weightsync.types import Deadline
from weightsync.types.fleet import CommitVersionsRequest, ModelVersion, PrepareReply, PrepareRequest, ReleaseRequest
from weightsync.types.service import ServiceStatus

_COMMIT_AGAIN_S = 0.2
_RELEASE_S = 5.0

_logger = logging.getLogger(__name__)

Set: TypeAlias = tuple[ModelVersion, ...]
Hook: TypeAlias = Callable[[str, str], None]


class InstanceCalls:
    """Thread-safe.

    Args:
        pool: whose instances are called; one that leaves it is not told again.
        changed: notified when the pool changes.
        token, verify: see `JsonClient`.
        prepare_timeout_s: how long one may take to fetch and stage.
        hook: told (step, instance_id) before each step.
    """

    def __init__(
        self,
        pool: RolloutPool,
        changed: threading.Condition,
        *,
        token: str | None,
        verify: bool | str,
        prepare_timeout_s: float,
        hook: Hook,
    ) -> None:
        self._pool = pool
        self._changed = changed
        self._prepare_timeout_s = prepare_timeout_s
        self.hook = hook
        self.client = functools.lru_cache(maxsize=1024)(lambda url: RolloutClient(url, token=token, verify=verify))

    def prepare(self, member: Member, versions: Set, spans: Spans) -> None:
        """Returns when it has staged those of its models.

        Raises:
            VersionError: it has staged something else.
            WeightSyncError: it failed, or can't be reached.
        """
        self.hook("prepare", member.instance_id)
        mine = tuple(each for each in versions if each.model_id in member.models)
        with spans.of("transfer", who=member.instance_id) as span:
            request = PrepareRequest(versions=mine, wait_s=self._prepare_timeout_s)
            reply: PrepareReply = self.client(member.url).prepare_versions(request)
            span.first("agent", reply.waited_s)
            span.moved(sum(status.received_bytes for status in reply.models.values()))
        staged = {each.model_id: each.of for each in reply.versions}
        for each in mine:
            if staged.get(each.model_id) != each.of:
                raise VersionError(
                    f"it has staged {staged.get(each.model_id)} of model {each.model_id}: the trainer has gone on",
                    version=str(each.of),
                )
        self.hook("prepared", member.instance_id)

    def commit(self, member: Member, versions: Set, deadline: Deadline, spans: Spans) -> None:
        """Returns when it serves them. One that fails is told again until the deadline, while it takes part.

        Raises:
            VersionError: it says that all is well, and serves something else.
            WeightSyncError: it failed, or can't be reached.
        """
        mine = tuple(each for each in versions if each.model_id in member.models)
        again = False
        while True:
            self.hook("commit", member.instance_id)
            try:
                with spans.of("commit", who=member.instance_id):
                    request = CommitVersionsRequest(versions=mine, wait_s=max(0.1, deadline.remaining_s))
                    report: ServiceStatus = self.client(member.url).commit_versions(request)
                break
            except WeightSyncError as error:
                if deadline.remaining_s < 2 * _COMMIT_AGAIN_S or not self._pool.takes_part(member):
                    raise
                if not again:
                    _logger.warning("instance %s is told again to commit: %s", member.instance_id, error)
                again = True
            with self._changed:
                self._changed.wait(_COMMIT_AGAIN_S)
        for each in mine:
            status = report.models.get(each.model_id)
            if status is None or (status.run_id, status.version) != (each.run_id, each.version):
                serves = None if status is None else f"{status.run_id}/{status.version}"
                raise VersionError(f"it answered commit well and serves {serves}", version=str(each.of))
            spans.of_status(member.instance_id, status)
        self.hook("committed", member.instance_id)

    def release(self, member: Member, versions: Set, why: str) -> None:
        """What it has staged is let go.

        Raises:
            WeightSyncError: it can't be reached.
        """
        names = tuple(each.model_id for each in versions if each.model_id in member.models)
        self.hook("release", member.instance_id)
        self.client(member.url).release_versions(ReleaseRequest(model_ids=names, why=why), timeout_s=_RELEASE_S)
