"""What travels about adapters to a vLLM or SGLang server: to its middleware over HTTP, to vLLM's workers inside vLLM's
own calls.

    GET  /weightsync/adapters           AdapterState
    POST /weightsync/adapters/load      LoadAdapter     a folder of this host becomes a staged adapter
    POST /weightsync/adapters/score     ScoreAdapter    log-probabilities of a prompt, by a staged adapter: the canary
    POST /weightsync/adapters/commit    CommitAdapter   from now on requests for its model are given to it
    POST /weightsync/adapters/drop      DropAdapter     a staged one goes

All but the first are answered by an AdapterState, or by a typed error.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types import Manifest, Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.message import Message, learn
from weightsync.types.spec import check_id

STATE_PATH = "/weightsync/adapters"
LOAD_PATH = f"{STATE_PATH}/load"
SCORE_PATH = f"{STATE_PATH}/score"
COMMIT_PATH = f"{STATE_PATH}/commit"
DROP_PATH = f"{STATE_PATH}/drop"
MIDDLEWARE = "weightsync.engine.vllm.lora_middleware.LoraMiddleware"
SGLANG_VARIABLE = "WEIGHTSYNC_SGLANG_LORA"
"""Set to 1 in SGLang's environment: our plug-in does what it is there for. Else it does nothing."""
TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
MANIFEST_FILE = "weightsync_manifest.json"
_MAX_SESSION = 600
_MAX_TOKENS = 1 << 16


def internal_name(model_id: str, session: str) -> str:
    """The name under which vLLM knows one version: a session's is unique, so it is never given to other bytes."""
    return f"{model_id}@{session}"


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Makes the server load a folder and take it over.

    Attributes:
        session: of the update, unique.
        model_id: whose adapter it is; clients ask for that name.
        version, model_digest: of the publication that lies in the folder.
        folder: name of a shared `PrivateFolder` of this user on the server's host.
        deadline_s: without a commit it goes after so long.
    """

    session: str
    model_id: str
    version: Version
    model_digest: str | None
    folder: str
    deadline_s: float

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        check_wait_s("deadline_s", self.deadline_s)
        _check_session(self.session)


class CommitAdapter(Message, frozen=True, kw_only=True):
    """Makes a staged adapter its model's current one, in one step."""

    session: str


class DropAdapter(Message, frozen=True, kw_only=True):
    """Ends a staged adapter. A session that is not known is no error; one that has committed stays."""

    session: str


class ScoreAdapter(Message, frozen=True, kw_only=True):
    """Asks for the log-probability of every token of a prompt but the first.

    Attributes:
        session: whose staged adapter.
        tokens: token ids.
        replica: which data-parallel one; None: whichever vLLM takes.
    """

    session: str
    tokens: tuple[int, ...]
    replica: int | None = None

    def __post_init__(self) -> None:
        _check_session(self.session)
        if not 2 <= len(self.tokens) <= _MAX_TOKENS or min(self.tokens) < 0:
            raise InvalidRequestError(f"a canary's prompt has 2 to {_MAX_TOKENS} token ids")
        if self.replica is not None and not 0 <= self.replica < 1 << 16:
            raise InvalidRequestError(f"there is no replica {self.replica}")


class Scored(Message, frozen=True, kw_only=True):
    """The answer to `ScoreAdapter`: one number a token but the first."""

    logprobs: tuple[float, ...]


class LoadedAdapter(Message, frozen=True, kw_only=True):
    """One adapter that the server has.

    Attributes:
        name: the engine's.
        session, model_id, version, model_digest: see `LoadAdapter`.
        lora_id: vLLM's number for it in its workers; None where this release does not say.
        state: "staged": loaded, and given no request; "current": given all new ones; "retired": no new ones, and goes
            when its last one has ended.
        in_flight: requests that it is answering.
        unprovable: of SGLang: why its workers have not compared what they hold; None: they have.
    """

    name: str
    session: str
    model_id: str
    version: Version
    model_digest: str | None
    lora_id: int | None
    state: Literal["staged", "current", "retired"]
    in_flight: int
    unprovable: str | None = None


class AdapterState(Message, frozen=True, kw_only=True):
    """What a server with the middleware says of its adapters.

    Attributes:
        max_loras: slots: how many adapters may be in one batch; 0: the engine was started without `--enable-lora`.
        max_cpu_loras: how many its workers keep.
        max_lora_rank: the highest rank that it takes.
        num_replicas: data-parallel ones behind this address.
        updating: whether it was started so that it takes adapters at run time.
        others: adapters that somebody else has loaded: they take slots, too.
        adapters: those that were loaded by `LoadAdapter`.
    """

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    num_replicas: int
    updating: bool
    others: int
    adapters: tuple[LoadedAdapter, ...]

    def current(self, model_id: str) -> LoadedAdapter | None:
        """The one that answers for a model."""
        return next((each for each in self.adapters if each.model_id == model_id and each.state == "current"), None)


class AdapterOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What workers are told about an adapter, inside a `VllmInitMessage`.

    Attributes:
        what: "check": whether it could be loaded, before anything is; "prove": what they have loaded against the
            manifest; "drop": let go of it.
        lora_id: of "prove" and "drop": vLLM's number for it; None with "prove": the newest one.
        manifest: of "check" and "prove"; the latter's has digests.
        folder: of "prove": the private folder that it was loaded from.
    """

    what: Literal["check", "prove", "drop"]
    lora_id: int | None = None
    manifest: Manifest | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        if (self.what == "drop") != (self.manifest is None) or (self.what == "drop" and self.lora_id is None):
            raise InvalidRequestError("a worker drops an adapter by its number, and checks one by its manifest")
        if (self.what == "prove") != (self.folder is not None):
            raise InvalidRequestError("a worker proves an adapter against a folder")


def _check_session(session: str) -> None:
    if not 0 < len(session) <= _MAX_SESSION or not session.isprintable() or not session.isascii() or '"' in session:
        raise InvalidRequestError(f"a session's name is up to {_MAX_SESSION} printable characters")


learn(LoadAdapter, CommitAdapter, DropAdapter, ScoreAdapter, Scored, AdapterState, AdapterOrder)
