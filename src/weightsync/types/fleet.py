"""The messages between a controller's pool and its rollout services."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.deadline import check_wait_s
from weightsync.types.manifest import Version
from weightsync.types.message import Message, learn
from weightsync.types.progress import TransferProgress
from weightsync.types.service import ModelStatus
from weightsync.types.spec import check_id

MAX_MODELS = 256
MAX_LEASE_S = 3600.0
MAX_WORDS = 1000
"""Characters of what is said of an adapter, or of an engine that is gone."""
MAX_GONE = 16
"""Engines that are told of."""
LEASE_MIDDLEWARE = "weightsync.engine.vllm.lease_middleware.LeaseMiddleware"
"""What a vLLM that answers under a lease alone is started with, as `--middleware`."""
LEASE_PATH = "/weightsync/lease"
"""GET: the lease middleware of an engine answers it, with a lease or without. An engine without has no such route."""
_MAX_URL = 2048
_MAX_ERROR = 4000
_MAX_DIGEST = 200


class ModelVersion(Message, frozen=True, kw_only=True):
    """A version of a model.

    Attributes:
        model_id, run_id, version: which.
        sender_endpoint: URL of the agent that has it; "" where nobody needs to know.
    """

    model_id: str
    run_id: str
    version: int
    sender_endpoint: str = ""

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        check_id("run_id", self.run_id)
        if self.version < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.version}")
        if self.sender_endpoint and not _is_url(self.sender_endpoint):
            raise InvalidRequestError(f"an endpoint is an http URL, not {self.sender_endpoint[:100]!r}")

    @property
    def of(self) -> Version:
        """Its run and number."""
        return Version(run_id=self.run_id, number=self.version)


class AbsentVersion(Message, frozen=True, kw_only=True):
    """A version that its agent has not, as it says itself.

    Attributes:
        of: which.
        newest: what the agent has of that run instead, or is about to have; None: it names another run.
    """

    of: ModelVersion
    newest: int | None = None

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.newest}")


NOT_STARTED = "has not started yet"
"""So begins in `HeartbeatRequest.gone` what is said of an engine that never answered, and at whose address nobody
listens."""


class HeartbeatRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout service is there.

    Attributes:
        instance_id: its name in the pool.
        incarnation: of this process: another one of the same name begins anew.
        url: where the controller calls it.
        number: rises with each heartbeat of a process, from 1 on: one may be delivered late. 0: it is not said.
        serves: what it serves of each of its models, with whom it pulls it from.
        lacks: models of it that serve nothing of ours.
        staged: what every engine of a model has staged, and waits with.
        whole: whether its models are of one set; False after a set that it could not commit as a whole.
        leased: whether it may answer as it sends this. One that may not answers nothing before it is lent something
            anew.
        left_s: for how long it may answer yet; 0: not at all, or it does not say.
        error: what failed there last.
        leaving: it ends, and answers nothing any more: its last message.
        absent: what it was told to serve, and what is not there.
        digests: of what it serves, by model, where it knows them.
        progress: of transfers under way, by model.
        adapters: of those that are adapters, rank and base in words, by model.
        gone: why engines do not answer their service, by engine.
    """

    instance_id: str
    incarnation: str
    url: str
    number: int = 0
    leased: bool = True
    left_s: float = 0.0
    serves: tuple[ModelVersion, ...] = ()
    lacks: tuple[str, ...] = ()
    staged: tuple[ModelVersion, ...] = ()
    whole: bool = True
    error: str | None = None
    leaving: bool = False
    absent: tuple[AbsentVersion, ...] = ()
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    progress: dict[str, TransferProgress] = msgspec.field(default_factory=dict)
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    gone: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_id("instance_id", self.instance_id)
        check_id("incarnation", self.incarnation)
        if not _is_url(self.url):
            raise InvalidRequestError(f"an instance's url is an http URL, not {self.url[:100]!r}")
        for each in self.lacks:
            check_id("model_id", each)
        if not 0 <= self.left_s <= MAX_LEASE_S:  # NaN, too
            raise InvalidRequestError(f"a lease has 0 to {MAX_LEASE_S:g} s left, not {self.left_s}")
        if self.error is not None and len(self.error) > _MAX_ERROR:
            raise InvalidRequestError(f"an error has at most {_MAX_ERROR} characters")
        if len(self.absent) > MAX_MODELS or len(self.staged) > MAX_MODELS:
            raise InvalidRequestError(f"at most {MAX_MODELS} versions are absent, or staged")
        _check_digests(self.digests)
        if len(self.adapters) > MAX_MODELS or any(len(text) > MAX_WORDS for text in self.adapters.values()):
            raise InvalidRequestError(f"at most {MAX_MODELS} adapters are told of, in {MAX_WORDS} characters each")
        if len(self.gone) > MAX_GONE or any(max(len(who), len(why)) > MAX_WORDS for who, why in self.gone.items()):
            raise InvalidRequestError(f"at most {MAX_GONE} engines are gone, in {MAX_WORDS} characters each")
        if len(self.progress) > MAX_MODELS:
            raise InvalidRequestError(f"transfers are of at most {MAX_MODELS} models")
        for model_id in self.progress:
            check_id("model_id", model_id)
        names = [each.model_id for each in self.serves] + list(self.lacks)
        if not 1 <= len(names) <= MAX_MODELS or len(set(names)) != len(names):
            raise InvalidRequestError(f"an instance has 1 to {MAX_MODELS} models, each named once")


class HeartbeatReply(Message, frozen=True, kw_only=True):
    """What becomes of it.

    Attributes:
        state: see `InstanceStatus`.
        lease_s: it may answer for so many seconds after it sent its heartbeat; 0: it refuses at once. While it joins:
            for what it was lent before, no longer.
        admitted: it comes in with this answer: what held it back before is over.
        catch_up: what it has to serve before it comes in.
        digests: of these, by model, where an instance that served them has told: who has it already may say so.
        every_s: seconds until its next heartbeat.
        why: why it has no lease.
    """

    state: Literal["joining", "live", "suspect", "evicted"]
    lease_s: float
    every_s: float
    admitted: bool = False
    catch_up: tuple[ModelVersion, ...] = ()
    why: str | None = None
    digests: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_digests(self.digests)
        if not 0 <= self.lease_s <= MAX_LEASE_S or not 0 < self.every_s <= MAX_LEASE_S:
            raise InvalidRequestError(f"a lease of {self.lease_s} s, asked for every {self.every_s} s, can't be")


class _SetRequest(Message, frozen=True, kw_only=True):
    """What is asked of the models of one set."""

    versions: tuple[ModelVersion, ...]
    wait_s: float

    def __post_init__(self) -> None:
        names = [each.model_id for each in self.versions]
        if not 1 <= len(names) <= MAX_MODELS or len(set(names)) != len(names):
            raise InvalidRequestError(f"a set has 1 to {MAX_MODELS} models, each named once")
        check_wait_s("wait_s", self.wait_s)


class PrepareRequest(_SetRequest, frozen=True, kw_only=True):
    """Fetch, prove and stage these versions, and wait with them.

    Attributes:
        versions: of the models of one set.
        wait_s: answer when all are staged, at most after so many seconds.
    """


class PrepareReply(Message, frozen=True, kw_only=True):
    """All are staged, or served already.

    Attributes:
        versions: what is: maybe newer than was asked for.
        models: how it went, by model.
        waited_s: seconds from the request until the last model's agent had its version; 0: they had all before.
    """

    versions: tuple[ModelVersion, ...]
    models: dict[str, ModelStatus]
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.waited_s < math.inf:  # NaN fails both
            raise InvalidRequestError(f"a wait is a number of seconds from 0 on, not {self.waited_s}")


class CommitVersionsRequest(_SetRequest, frozen=True, kw_only=True):
    """Serve these versions, together.

    Attributes:
        versions: what was prepared.
        wait_s: answer when all are served, at most after so many seconds.
    """


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """What is staged of these models is not committed; what is served stays."""

    model_ids: tuple[str, ...]
    why: str


def _check_digests(digests: dict[str, str]) -> None:
    if len(digests) > MAX_MODELS or any(not 0 < len(text) <= _MAX_DIGEST for text in digests.values()):
        raise InvalidRequestError(f"digests are of at most {MAX_MODELS} models, each of 1 to {_MAX_DIGEST} characters")


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://")) and len(text) <= _MAX_URL


learn(HeartbeatRequest, HeartbeatReply, PrepareRequest, PrepareReply, CommitVersionsRequest, ReleaseRequest)
