"""What travels through vLLM's weight-update calls: our requests inside its dicts, typed errors inside its texts.

vLLM hands a dict to every worker and returns nothing, or an exception's text. So a request is an envelope with exactly
one of our messages in it, and an error is written into the text so that it can be found again behind whatever vLLM
puts around it (the executor's "Worker failed with error '...'", the HTTP layer's JSON).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from typing import Any

import msgspec

from weightsync.errors import InvalidRequestError, StateError, WeightSyncError, error_from_dict
from weightsync.handles.lora_messages import AdapterOrder
from weightsync.net.messages import decode, encode
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    InitRequest,
    LiveLayer,
    PhaseRecord,
    StageRequest,
    Version,
)
from weightsync.types.message import learn

BACKEND = "weightsync"
"""Name of the backend, as in vLLM's `--weight-transfer-config '{"backend":"weightsync"}'`."""
UNPROVABLE = "vLLM's own loader fuses and may repack weights: live bytes are compared in the commit of a full load"
"""Why a stage reply has no digest of live weights; each tensor's digest was checked as it arrived."""

_MARK_WORD = "weightsync-error:"
_MARK = re.compile(_MARK_WORD + r"([A-Za-z0-9_\-=]+):end")


class VllmAudit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a reading of live weights has ended.

    Attributes:
        name: that its asker gave it.
        version, digest: of what was read.
        equal: whether it was what was published; None where that was not found out.
        said: what was found, or why nothing was.
        began_s, ended_s: seconds since the epoch.
    """

    name: str
    version: Version | None = None
    digest: str | None = None
    equal: bool | None = None
    said: str | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    def phase(self, track: str) -> PhaseRecord:
        """As it stands in a timeline."""
        failed = {True: "", False: ", failed: DigestMismatchError", None: ", failed: unknown"}[self.equal]
        detail = f"{self.version or self.name}{failed}"
        return PhaseRecord(name="audit", start_s=self.began_s, end_s=self.ended_s, track=track, detail=detail)


class VllmState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all workers of one vLLM engine agree on; the default is that of a server that has just started.

    Attributes:
        group: the transfer group that all are in; None where they are in none, or in different ones.
        run_id: the run that last made them join; None where its trainer has ended in order.
        version: the version whose bytes all serve; None before the first commit, and where they differ.
        digest: model digest of what was committed as that version, as it was proved on its way in; None likewise.
        healthy: whether every worker's live weights are those of that one version.
        updating: whether vLLM holds a weight update for active, on any worker.
        session: the session that is open on any worker.
        writes_live: whether loading goes into live weights.
        accepts: kinds of updates that all workers take now.
        proved: whether every worker has found its live weights to be that version, to the bit.
        unprovable: why not, of one worker.
        audits: the last ones that have ended on every worker.
        unhealthy: what an audit has found, where it found other bytes.
        written: see `EngineReply`.
        layers: of all workers, where it was asked for.
    """

    group: str | None = None
    run_id: str | None = None
    version: Version | None = None
    digest: str | None = None
    healthy: bool = True
    updating: bool = False
    session: str | None = None
    writes_live: bool = False
    accepts: tuple[str, ...] = ("full",)
    proved: bool = False
    unprovable: str | None = None
    audits: tuple[VllmAudit, ...] = ()
    unhealthy: str | None = None
    written: int | None = None
    layers: tuple[LiveLayer, ...] = ()


class VllmUpdateMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `update_info` of vLLM's `update_weights`, served between its start and finish. One of:

    Attributes:
        begin: open a session.
        update: receive and load one chunk.
        stage: prove the bytes.
        commit: serve them.
    """

    begin: BeginRequest | None = None
    update: AnyUpdateRequest | None = None
    stage: StageRequest | None = None
    commit: CommitRequest | None = None

    is_checkpoint_format = False  # releases that ask the message load nothing themselves then

    def __post_init__(self) -> None:
        _check_one(begin=self.begin, update=self.update, stage=self.stage, commit=self.commit)


class VllmInitMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `init_info` of vLLM's `init_weight_transfer_engine`, which is served in any state. One of:

    Attributes:
        init: join a transfer group.
        in_place: with `init`: load into live weights instead of beside them.
        abort: end a session badly.
        expect: answered well if this is the workers' state, and otherwise by a StateError that carries it: vLLM
            returns no data.
        layers: with `expect`: the state that is told has its layers.
        written: with `expect`: what the last commit has written counts too.
        step: an update message, of a client whose engine has several workers.
        audit: begin to read all live weights, under this name; the state tells how it has ended.
        adapter: something about a LoRA adapter; no session has to do with it.
    """

    init: InitRequest | None = None
    in_place: bool = False
    abort: AbortRequest | None = None
    expect: VllmState | None = None
    layers: bool = False
    written: bool = False
    step: VllmUpdateMessage | None = None
    audit: str | None = None
    adapter: AdapterOrder | None = None

    def __post_init__(self) -> None:
        _check_one(
            init=self.init, abort=self.abort, expect=self.expect, step=self.step, audit=self.audit, adapter=self.adapter
        )


learn(VllmInitMessage, VllmUpdateMessage, VllmState)


def as_info(message: VllmInitMessage | VllmUpdateMessage) -> dict[str, Any]:
    """The message as the dict that vLLM passes on."""
    body: dict[str, Any] = msgspec.json.decode(encode(message))
    return body


def init_message(info: dict[str, Any]) -> VllmInitMessage:
    """Reads an `init_info`.

    Raises:
        InvalidRequestError: it is none of ours, e.g. another backend's trainer speaks.
    """
    return decode(_json(info), VllmInitMessage, what="init_info")


def update_message(info: dict[str, Any]) -> VllmUpdateMessage:
    """Reads an `update_info`.

    Raises:
        InvalidRequestError: it is none of ours.
    """
    return decode(_json(info), VllmUpdateMessage, what="update_info")


def error_text(error: WeightSyncError) -> str:
    """The error in words, followed by itself in a form that no quoting changes."""
    packed = base64.urlsafe_b64encode(encode(error.to_dict())).decode("ascii")
    words = f"{type(error).__name__}: {error}".replace(_MARK_WORD, "weightsync-error ")  # it may quote another error
    return f"{words} {_MARK_WORD}{packed}:end"


def error_in_text(text: str, *, peer: str | None = None) -> WeightSyncError | None:
    """The last typed error that `error_text` wrote into `text` (others are quoted); None where there is none."""
    found = _MARK.findall(text)
    if not found:
        return None
    with contextlib.suppress(InvalidRequestError, binascii.Error, ValueError):
        return error_from_dict(decode(base64.urlsafe_b64decode(found[-1]), dict[str, Any], what="error"), peer=peer)
    return None


def other_state(state: VllmState) -> StateError:
    """The answer to an `expect` that expected something else."""
    return StateError("the engine's state is another", answers="expect", state=msgspec.to_builtins(state))


def state_in(error: StateError) -> VllmState | None:
    """The state that `other_state` told; None where the error is another one.

    Raises:
        InvalidRequestError: what it told is no state.
    """
    if error.details.get("answers") != "expect":
        return None
    try:
        return msgspec.convert(error.details.get("state"), VllmState)
    except msgspec.ValidationError as odd:
        raise InvalidRequestError(f"the state does not fit: {odd}") from odd


def version_in(text: str | None) -> Version | None:
    """The version that vLLM's weight version names; None where it names none of ours ("default")."""
    run_id, slash, number = (text or "").rpartition("/")
    if not slash or not run_id or not (number.isascii() and number.isdigit()):
        return None
    with contextlib.suppress(InvalidRequestError):
        return Version(run_id=run_id, number=int(number))
    return None


def _json(info: dict[str, Any]) -> bytes:
    try:
        return encode(info)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the info is no JSON: {error}") from error


def _check_one(**messages: object) -> None:
    given = [name for name, message in messages.items() if message is not None]
    if len(given) != 1:
        raise InvalidRequestError(f"exactly one of {', '.join(messages)} is given, not {given or 'none'}")
