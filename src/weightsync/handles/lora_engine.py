"""LoraEngine: an `EngineHandle` for the LoRA adapters of one model in a server with our `LoraMiddleware`: vLLM's
(`vllm_lora`) or SGLang's (`two_kinds`), which say what differs.

What each step becomes (design/0035-lora-engines.md has the reasons):

    begin   the manifest is checked: slots and rank by what the middleware says, the rest by the workers
    update  bytes go from the staging into a file of a new private folder in shared memory: one copy a host
    stage   the engine's own route loads it under a new name, from inside the server, into every replica; the workers
            prove what they hold; the canary is asked, one answer a replica
    pause   nothing: no request waits
    commit  the middleware gives new requests to the new name; running ones end on the old one, which is then unloaded
    abort   what was staged is unloaded; the folder goes

The folder is never written again, and goes when the server has unloaded it. It belongs to the server from the moment
that it is loaded: it stays when this process is killed, and is removed when the server is.
"""

from __future__ import annotations

import abc
import threading
from typing import ClassVar

import msgspec

from weightsync.errors import (
    AuthError,
    ConfigError,
    EngineError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
    WrongArtifactError,
)
from weightsync.handles.lora_canary import CanaryWatch
from weightsync.handles.lora_folder import AdapterFolder
from weightsync.handles.lora_messages import (
    COMMIT_PATH,
    DROP_PATH,
    LOAD_PATH,
    SCORE_PATH,
    STATE_PATH,
    AdapterState,
    CommitAdapter,
    DropAdapter,
    LoadAdapter,
    LoadedAdapter,
    ScoreAdapter,
    Scored,
)
from weightsync.handles.stepped import SteppedEngine
from weightsync.net.client import JsonClient
from weightsync.net.http_edge import told_error
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EngineReply,
    InitRequest,
    Manifest,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    Version,
)
from weightsync.types.adapter import Adapter


class AdapterClient(JsonClient):
    """Orders to the middleware. Thread-safe.

    Args:
        url: of the server.
        how_to_start: for the error where the middleware is not there.
        token: see `JsonClient`.
        verify: see `JsonClient`.
    """

    def __init__(self, url: str, *, how_to_start: str, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs="a server with LoraMiddleware", token=token, verify=verify)
        self._how_to_start = how_to_start

    def state(self, deadline: Deadline) -> AdapterState:
        """What the server has."""
        return self.call("GET", STATE_PATH, AdapterState, timeout_s=deadline.check("answer", peer=self.peer))

    def order(self, path: str, message: object, deadline: Deadline) -> AdapterState:
        """Gives an order; what the server has then."""
        left = deadline.check("answer", peer=self.peer)
        return self.call("POST", path, AdapterState, message=message, timeout_s=left)

    def score(self, message: ScoreAdapter, deadline: Deadline) -> tuple[float, ...]:
        """The canary's answer."""
        left = deadline.check("answer of the canary", peer=self.peer)
        return self.call("POST", SCORE_PATH, Scored, message=message, timeout_s=left).logprobs

    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        typed = told_error(body, peer=self.peer)
        if typed is not None and "remote_error" not in typed.details:
            return typed
        if status in (401, 403):
            return AuthError(f"{self.url} refuses the token for {path}", peer=self.peer)
        if status in (404, 405):
            return UnsupportedError(
                f"{self.url} takes no adapters: {self._how_to_start}", peer=self.peer, status=status
            )
        return super()._error_in(status, body, path)


class LoraEngine(SteppedEngine):
    """Thread-safe.

    Attributes:
        kind: what the server is, for messages.
        how_to_start: what it needs.
        slots_option: of its command line.

    Args:
        peer: how errors name the server.
        client: of its middleware.
        model_id: whose adapter; what `InitRequest` says where not given.
        engine_id: name for messages; the server's URL where not given.
    """

    kind: ClassVar[str]
    how_to_start: ClassVar[str]
    slots_option: ClassVar[str]
    with_manifest: ClassVar[bool] = False
    """Whether the server's workers find the publication's manifest in the folder."""

    def __init__(
        self, peer: str, client: AdapterClient, *, model_id: str | None = None, engine_id: str | None = None
    ) -> None:
        super().__init__(peer, engine_id)
        self._client = client
        self._model_id = model_id
        self._folder: AdapterFolder | None = None
        self._state: AdapterState | None = None
        self._unprovable: str | None = None
        self._canary = CanaryWatch()
        self._files = threading.Lock()

    def of_model(self, model_id: str) -> None:
        """Whose adapter it has, where no session has said so yet."""
        self._model_id = model_id

    def close(self) -> None:
        self._close_folder()
        self._client.close()

    # --- the steps ---

    def _describe(self, deadline: Deadline) -> EngineReply:
        self._look(deadline)
        return self._reply(drain=False)

    def _init(self, request: InitRequest, deadline: Deadline) -> None:
        self._session.end(TransferAbortedError("a service joins anew"))
        self._close_folder()
        self._model_id = request.model_id
        self._run_id = request.run_id
        self._group = request.info.group_name

    def _begin(self, request: BeginRequest, deadline: Deadline) -> None:
        manifest = request.manifest
        if manifest.artifact != "lora" or manifest.adapter is None:
            raise WrongArtifactError(
                f"{manifest.model_id} has adapters at this engine, and this is a whole model",
                version=str(manifest.version),
                state_left="nothing was changed",
            )
        if request.base is not None:
            raise UnsupportedError(f"an adapter goes to {self.kind} whole", state_left="nothing was changed")
        state = self._look(deadline)
        self._check_server(manifest, manifest.adapter, state)
        self._check_at_workers(manifest, deadline)
        self._session.end(TransferAbortedError("the engine has none open"))
        self._close_folder()
        folder = AdapterFolder(manifest)
        with self._files:
            self._folder = folder
        self._session.start(request.session, manifest.version)

    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        with self._files:
            if self._folder is None:
                raise TransferAbortedError(f"session {update.session} has no folder any more")
            self._folder.take(update)

    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply:
        manifest = request.manifest
        with self._files:  # an abort closes its descriptor
            folder = self._folder
            if folder is None:
                raise TransferAbortedError(f"session {request.session} has no folder any more")
            name = folder.sealed(manifest, with_manifest=self.with_manifest)
        assert self._model_id is not None
        order = LoadAdapter(
            session=request.session, model_id=self._model_id, version=manifest.version,
            model_digest=manifest.model_digest, folder=name, deadline_s=deadline.check("load it"),
        )  # fmt: skip
        with self._log.phase("load", detail=f"into {self.kind}"):
            self._state = self._client.order(LOAD_PATH, order, deadline)
        folder.hand_over()
        held = next((each for each in self._state.adapters if each.session == request.session), None)
        if held is None:
            raise EngineError("it answered well, and has no such adapter", state_left="the old adapter is served on")
        with self._log.phase("verify"):
            self._unprovable = self._proved(manifest, name, held, deadline)
            self._ask_canary(request, self._state.num_replicas, deadline)
        return msgspec.structs.replace(
            self._reply(),
            digests_equal=True if self._unprovable is None else None,
            model_digest=manifest.model_digest if self._unprovable is None else None,
            unprovable=self._unprovable,
        )

    def _pause(self, request: PauseRequest, deadline: Deadline) -> None:
        """No request has to wait."""

    def _commit(self, request: CommitRequest, version: Version, deadline: Deadline) -> None:
        with self._log.phase("commit"):
            self._state = self._client.order(COMMIT_PATH, CommitAdapter(session=request.session), deadline)
        assert self._model_id is not None
        current = self._state.current(self._model_id)
        if current is None or current.version != version:
            raise EngineError(f"it answered well, and serves {current and current.version}")
        self._canary.committed()
        self._session.end()
        self._close_folder()

    def _resume(self, request: ResumeRequest, deadline: Deadline) -> None:
        """No request has waited."""

    def _abort(self, request: AbortRequest, deadline: Deadline) -> None:
        self._session.end(TransferAbortedError(f"aborted: {request.reason}"), name=request.session)
        try:
            self._state = self._client.order(DROP_PATH, DropAdapter(session=request.session), deadline)
            if any(each.session == request.session for each in self._state.adapters):
                self._hand_over()  # the load had come, and its answer was lost: the engine may read it still
        finally:
            self._close_folder()

    # --- what the steps share ---

    def _check_server(self, manifest: Manifest, adapter: Adapter, state: AdapterState) -> None:
        if not state.max_loras or not state.updating:
            raise ConfigError(
                f"this {self.kind} takes no adapters: {self.how_to_start}", state_left="nothing was changed"
            )
        if adapter.max_rank > state.max_lora_rank:
            raise ConfigError(
                f"the adapter has rank {adapter.max_rank}, and {self.kind} takes at most {state.max_lora_rank}: start "
                f"it with --max-lora-rank {adapter.max_rank}",
                version=str(manifest.version),
                state_left="nothing was changed; the adapter that was served is served on",
            )
        if state.max_loras < 2:
            raise ConfigError(
                f"{self.kind} has less than two slots for adapters, and a new version is loaded beside the old one: "
                f"start it with {self.slots_option} or more, for each adapter staleness + 1, and one",
                state_left="nothing was changed",
            )

    @abc.abstractmethod
    def _check_at_workers(self, manifest: Manifest, deadline: Deadline) -> None:
        """Raises where the workers could not load it; nothing is changed."""

    @abc.abstractmethod
    def _proved(self, manifest: Manifest, folder: str, held: LoadedAdapter, deadline: Deadline) -> str | None:
        """Why the workers can't prove what they hold; None: they have. Raises where it is something else."""

    def _ask_canary(self, request: StageRequest, num_replicas: int, deadline: Deadline) -> None:
        canary = request.manifest.canary
        if canary is None:
            if self._unprovable is not None:
                self._unprovable = f"{self._unprovable}; and the trainer publishes no canary"
            return
        replicas: list[int | None] = [None] if num_replicas == 1 else list(range(num_replicas))
        for replica in replicas:
            asked = ScoreAdapter(session=request.session, tokens=canary.tokens, replica=replica)
            scores = self._client.score(asked, deadline)
            self._canary.check(request.manifest, canary, scores, replica=replica)

    def _look(self, deadline: Deadline) -> AdapterState:
        self._state = self._client.state(deadline)
        return self._state

    def _hand_over(self) -> None:
        with self._files:
            if self._folder is not None:
                self._folder.hand_over()

    def _close_folder(self) -> None:
        with self._files:
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _reply(self, *, drain: bool = True) -> EngineReply:
        current = None if self._state is None or self._model_id is None else self._state.current(self._model_id)
        return EngineReply(
            engine_id=self._engine_id,
            world_size=self._world_size,
            serving=True,
            version=None if current is None else current.version,
            model_digest=None if current is None else current.model_digest,
            group=self._group,
            run_id=self._run_id,
            unprovable=self._unprovable,
            canary=self._canary.last,
            artifacts=("lora",),
            phases=self._log.drain() if drain else (),
        )
