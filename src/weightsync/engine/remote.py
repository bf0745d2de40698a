"""RemoteWeightLoader: a loader whose model is another engine's, which is spoken to as every engine is."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

import msgspec
import torch

from weightsync.codec.full import FullCodec
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.whole import SummedChunks
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.by_url import engine_at, read_engine_url
from weightsync.handles.fanout import EngineFanout, own_words
from weightsync.handles.sglang import SGLangEngine
from weightsync.load.base import WeightLoader
from weightsync.load.whole import check_closed, check_complete, check_open, check_verified, whole_tensor
from weightsync.net.routes import address_towards
from weightsync.observe import LONG_RUN_BYTES, Recorder
from weightsync.threads import batches
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.sglang import SGLangTransferStrategy
from weightsync.types import (
    AnyUpdateRequest,
    Deadline,
    DescribeRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    HeldTensor,
    Manifest,
    Update,
    Version,
    WeightChunk,
)
from weightsync.types.deadline import check_wait_s
from weightsync.update.group import TransferGroup
from weightsync.update.session import UpdateSession

_UNKNOWN = "not known: the other engine may or may not have done it, and is not called healthy until a later commit"
_LOOK_S, _JOIN_S = 10.0, 30.0  # what a bracket may wait for an answer, and for the transfer group
_ASK_S, _FRESH_S = 3.0, 1.0  # what `lost` waits for an answer, and for how long one will do


class RemoteWeightLoader(WeightLoader):
    """Takes the bracket to another engine, as a push to that one: its own workers receive, prove and commit.

    `verify` has the other engine prove its bytes against the digests of what was sent, and `live_digest` is what it
    computed from its own memory. `live_tensors` are not to be had here. It pauses its generations by itself, for the
    commit; for the whole bracket where it writes over live weights.

    One trainer at a time: another one that begins takes over, and the bracket that was open fails with that reason.
    An answer that never came leaves the other engine unknown: `healthy` is then False until a later commit.

    Args:
        engine: its URL, of an `EngineServer`, a vLLM or an SGLang, see `handles.by_url`; or a handle, which stays the
            caller's.
        token, verify: for a URL, see `engine_at`.
        strategy: how bytes move: one that sends. Else a gloo broadcast (SGLang's own form of it for an SGLang) from
            this machine's address that a URL's host sees; on loopback for a handle.
        timeout_s: for a whole bracket; the other engine then ends it by itself.
        pause_timeout_s: how long the other engine may take to finish running generations, within that.
        chunk_bytes: updates travel together up to so many bytes; a larger one alone.

    Raises:
        ConfigError: the URL is none, or of no engine that can be pushed to; or the strategy lends memory instead of
            sending it.
        EngineUnreachableError: nobody answers there.
    """

    def __init__(
        self,
        engine: str | EngineHandle,
        *,
        token: str | None = None,
        verify: bool | str = True,
        strategy: WeightTransferStrategy | None = None,
        timeout_s: float = 300.0,
        pause_timeout_s: float = 30.0,
        chunk_bytes: int = 64 << 20,
    ) -> None:
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        self._pause_timeout_s = check_wait_s("pause_timeout_s", pause_timeout_s)
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is at least 1, not {chunk_bytes}")
        self._chunk_bytes = chunk_bytes
        if strategy is not None and (sharer := strategy.create_sharer()) is not None:
            sharer.close()
            raise ConfigError(f"strategy {strategy.name} lends memory to engines beside it: use one that sends")
        self._is_own = isinstance(engine, str)
        self._engine: EngineHandle = (
            engine_at(engine, token=token, verify=verify, timeout_s=min(_LOOK_S, timeout_s))
            if isinstance(engine, str)
            else engine
        )
        self._recorder = Recorder(self._engine.engine_id, max_bytes=LONG_RUN_BYTES)
        self._group: TransferGroup | None = None
        self._model_id: str | None = None
        self._load: _Load | None = None
        self._digest: str | UnsupportedError = UnsupportedError("nothing was synced yet")
        self._healthy = False
        self._committed: Version | None = None
        self._seen: Version | None = None  # that the other engine has said last, and when
        self._seen_s = -math.inf
        self._unsure = False  # whether a commit was not answered, and none has been since
        try:
            self._strategy = strategy or self._chosen(engine)
            self._look()
        except BaseException:
            self.close()
            raise

    def _chosen(self, engine: str | EngineHandle) -> WeightTransferStrategy:
        kind = SGLangTransferStrategy if isinstance(self._engine, SGLangEngine) else BroadcastTransferStrategy
        urls = [read_engine_url(engine).url] if isinstance(engine, str) else []
        address = address_towards(urls, instead=f"give strategy={kind.__name__}(master_addr=...)")
        return kind(master_addr=address or "127.0.0.1", transfer_timeout_s=self._timeout_s)

    @property
    def healthy(self) -> bool:
        return self._healthy and not self._unsure

    def lost(self) -> str | None:
        """See the base class. The other engine may have been started again, or loaded by another trainer.

        Raises:
            EngineUnreachableError, DeadlineExceededError: it does not answer.
        """
        committed = self._committed
        if committed is None or self._load is not None:
            return None
        asked_s = time.monotonic()
        if asked_s >= self._seen_s + _FRESH_S:
            reply = self._engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=min(_ASK_S, self._timeout_s))
            if self._load is not None or self._committed != committed:  # a bracket was opened meanwhile
                return None
            self._seen, self._seen_s = reply.version if reply.intact else None, asked_s
        if self._seen == committed:
            return None
        return f"{self._engine.engine_id} serves {self._seen or 'nothing that was loaded'}, and not {committed}"

    def begin(self, manifest: Manifest) -> None:
        """See the base class.

        Raises:
            VersionError: that engine serves a newer version of this run, or is another run's by now.
            GroupJoinError: it did not come to the transfer group.
            EngineUnreachableError, DeadlineExceededError: no answer. A bracket that was opened nevertheless is told to
                end, and ends by itself in `timeout_s`.
        """
        check_closed(None if self._load is None else self._load.manifest)
        reply, deadline = self._look(), Deadline(self._timeout_s)
        if self._group is None or self._model_id != manifest.model_id:
            self.leave()
            self._model_id = manifest.model_id
            self._group = TransferGroup(
                self._strategy, model_id=manifest.model_id, join_timeout_s=_JOIN_S, recorder=self._recorder
            )
        with own_words():
            client = _OneEngine([self._engine])
            self._group.join(client, {self._engine.engine_id: reply}, run_id=manifest.version.run_id, deadline=deadline)
            load = _Load(manifest, deadline, client, self._pause_timeout_s, self._recorder)
            try:
                load.session.begin(manifest)
                load.session.pause_live_writers()
            except WeightSyncError as error:
                load.session.abort(f"begin failed: {error.message}")
                raise
        self._load = load

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class. Returns when the other engine has loaded all of them."""
        load = self._opened()
        assert self._group is not None
        assert self._group.sender is not None  # begin has seen to both
        load.proved = None
        self._healthy = self._healthy and not self.writes_live
        summed = SummedChunks(load.chunks(updates, self._chunk_bytes))
        sent, name = load.encoder.encode(summed), load.session.name
        with own_words():
            self._group.sender.send_chunks(sent, load.client, session=name, deadline=load.deadline)
        load.total += summed.total

    def verify(self) -> None:
        """See the base class.

        Raises:
            DigestMismatchError: what the other engine would serve is not what was sent; the caller aborts.
        """
        load = self._opened()
        check_complete(load.specs, load.came)
        digest = model_digest(load.manifest.table, load.total)
        with own_words():
            unprovable = load.session.stage(load.manifest.with_digests(load.encoder.digests(), digest))
        load.proved = UnsupportedError(*unprovable.values()) if unprovable else digest

    def live_tensors(self) -> Iterator[HeldTensor]:
        """Never: they lie in the other engine. See `live_digest`."""
        raise UnsupportedError("these weights lie in another engine, which proves them itself")

    def live_digest(self) -> str:
        """See the base class. Computed by the other engine from the memory that it serves, or will serve."""
        digest = self._digest if self._load is None or self._load.proved is None else self._load.proved
        if isinstance(digest, UnsupportedError):
            raise UnsupportedError(digest.message)
        return digest

    def commit(self, version: Version) -> None:
        """See the base class.

        Raises:
            EngineUnreachableError, DeadlineExceededError: no answer: it serves the old version or the new one, and
                `healthy` is False until a later commit says which.
        """
        load = self._opened()
        check_verified(load.manifest, version, verified=load.proved is not None)
        assert load.proved is not None
        before, self._healthy, self._committed = self._committed, False, None
        try:
            with own_words():
                load.session.commit()
        except WeightSyncError as error:
            unanswered = isinstance(error, EngineUnreachableError | DeadlineExceededError)
            if unanswered and load.session.is_paused:
                self._unsure = True
                error.state_left = error.state_left or _UNKNOWN
            else:  # `lost` asks what it serves now
                self._committed, self._seen_s = before, -math.inf
            raise
        self._seen, self._seen_s = version, time.monotonic()
        self._load, self._digest, self._committed = None, load.proved, version
        self._healthy, self._unsure = True, False

    def abort(self, reason: str) -> None:
        """See the base class.

        Raises:
            EngineUnreachableError, DeadlineExceededError: no answer. Here the bracket is closed and the next begin
                works; there it ends in `timeout_s`.
        """
        load, self._load = self._load, None
        if load is not None:
            load.session.abort(reason)
            self._look()

    def leave(self) -> None:
        """Leaves the transfer group; the next bracket joins another one. Idempotent."""
        if self._group is not None:
            self._group.leave()

    def close(self) -> None:
        """Leaves the transfer group, and ends the connections where they are its own. Idempotent."""
        self.leave()
        if self._is_own:
            self._engine.close()  # type: ignore[attr-defined]  # those of URLs have it

    def _look(self) -> EngineReply:
        """What the other engine is now."""
        timeout_s = min(_LOOK_S, self._timeout_s)
        reply = self._engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=timeout_s)
        self._healthy, self.writes_live = reply.intact, reply.writes_live
        return reply

    def _opened(self) -> _Load:
        check_open(None if self._load is None else self._load.manifest)
        assert self._load is not None
        return self._load


class _OneEngine(EngineFanout):
    """The other engine as a sender sees it in one bracket: chunks count on from call to call of `load_weights`."""

    _numbers: Iterator[int] | None = None

    def update_weights(self, request: AnyUpdateRequest, *, timeout_s: float) -> Future[Mapping[str, EngineReply]]:
        self._numbers = self._numbers or itertools.count()
        return super().update_weights(msgspec.structs.replace(request, seq=next(self._numbers)), timeout_s=timeout_s)


class _Load:
    """One bracket.

    Attributes:
        session: there.
        came: names of what was sent.
        encoder: has the digests of that.
        total: what it adds to the model's digest.
        proved: the digest that the other engine has proved, or why it can't; None before that.
    """

    def __init__(
        self, manifest: Manifest, deadline: Deadline, client: _OneEngine, pause_timeout_s: float, recorder: Recorder
    ) -> None:
        self.manifest = manifest
        self.deadline = deadline
        self.client = client
        self.session = UpdateSession(
            client, manifest.version, deadline, pause_timeout_s=pause_timeout_s, recorder=recorder
        )
        self.specs = manifest.by_name()
        self.came: set[str] = set()
        self.encoder = FullCodec().encoder()
        self.total = ShardSum.zero()
        self.proved: str | UnsupportedError | None = None

    def chunks(self, updates: Iterable[Update], chunk_bytes: int) -> Iterator[WeightChunk]:
        """The updates as they travel, each of them looked at."""
        came: dict[str, torch.Tensor] = {}
        for update in updates:
            came[update.name] = whole_tensor(update, self.specs, self.came).contiguous()
            self.came.add(update.name)
        names, tensors = tuple(came), tuple(came.values())
        for cut in batches([tensor.nbytes for tensor in tensors], chunk_bytes):
            yield WeightChunk(names=names[cut], tensors=tensors[cut])
