"""Every error that weightsync raises, with the data an operator needs at 3 a.m.

One root, `WeightSyncError`. Each error says in words what happened, where, what state was left and
what to do; the same facts are kept as fields, so that a program can act on them, and they cross
process borders as plain JSON (`to_dict`, `error_from_dict`), never as a pickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

_MAX_DEPTH = 16
_MAX_TEXT = 10_000
_FIELDS = ("rank", "peer", "version", "parameter", "state_left")


class WeightSyncError(Exception):
    """The root of all errors of this library.

    Args:
        message: what went wrong and what to do about it, one or two sentences.
        rank: the rank (of the trainer or of the transfer group) that is concerned.
        peer: the engine, host or process that is concerned.
        version: the version that was being moved, as `Version.__str__` writes it or a number.
        parameter: the parameter's name in manifest coordinates.
        state_left: what holds now, e.g. "the engine serves its old version".
        details: further JSON-able facts.
    """

    http_status: ClassVar[int] = 500
    follows: ClassVar[bool] = False
    """Whether an error of this kind usually follows from another one elsewhere (a peer failed, so the
    connection broke). Reports prefer the error that came first."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: str | None = None,
        version: str | int | None = None,
        parameter: str | None = None,
        state_left: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.version = version
        self.parameter = parameter
        self.state_left = state_left
        self.details = details

    @property
    def retry_after_s(self) -> float | None:
        """Of a push that left engines out and did not ask them: after so many seconds they are asked again. None where
        all were asked."""
        found = self.details.get("retry_after_s")
        return found if isinstance(found, int | float) else None

    def __str__(self) -> str:
        return self._in_words()

    def _in_words(self, *, peer: str | None = None) -> str:
        """The text, less what whoever names `peer` before it has said."""
        facts = [f"{key}={value}" for key in _FIELDS if (value := getattr(self, key)) is not None]
        url = str(self.peer)
        if self.peer is not None and (url == peer or ("://" in url and _has_url(self.message, url))):
            facts.remove(f"peer={url}")  # it need not be read twice
        facts += [f"{key}={_shown(value)}" for key, value in self.details.items()]
        return _visible(f"{self.message} [{', '.join(facts)}]" if facts else self.message)

    def to_dict(self) -> dict[str, Any]:
        """This error as JSON-able data; `error_from_dict` is the inverse."""
        body: dict[str, Any] = {"error": type(self).__name__, "message": _text(self.message)}
        body.update({key: _jsonable(value) for key in _FIELDS if (value := getattr(self, key)) is not None})
        if self.details:
            body["details"] = _jsonable(self.details)
        return body


class ConfigError(WeightSyncError):
    """A configuration has an unknown key, a wrong value or a contradiction. Nothing was started."""

    http_status = 422


class MissingDependencyError(WeightSyncError):
    """An optional package is needed here and is not installed."""


class UnsupportedError(WeightSyncError):
    """What was asked for can't be done by this part (a placement, a dtype, an engine's generation)."""

    http_status = 422


class InvalidRequestError(WeightSyncError):
    """A message or a value doesn't fit its type: wrong lengths, sizes, names. Nothing was changed."""

    http_status = 422


class UnknownLayoutError(WeightSyncError):
    """A message names a list of tensors by its digest alone, and the receiver does not have it. Nothing was changed;
    the sender says it in full."""

    http_status = 409


class VersionError(WeightSyncError):
    """Versions of different runs were compared, or a version went backwards within its run."""

    http_status = 409


class NotPublishedError(VersionError):
    """A version was announced that its agent has not, as the agent says itself. Its detail `newest` is the number that
    the agent has of that run, or is about to have; None: it names another run, or its trainer has ended."""

    @property
    def newest(self) -> int | None:
        """See above."""
        found = self.details.get("newest")
        return found if type(found) is int else None


class ManifestMismatchError(WeightSyncError):
    """The announced tensors don't fit the model: wrong shape, dtype, missing or extra name."""

    http_status = 422


class WrongArtifactError(UnsupportedError):
    """A publication of a kind that the engine does not take: an adapter where whole models are loaded, or a model where
    adapters are. Nothing was changed."""


class WrongBaseError(WeightSyncError):
    """An adapter was trained on another base than the engine has. Nothing was changed: publish the base there first, or
    the adapter of this base."""

    http_status = 409


class DigestMismatchError(WeightSyncError):
    """Bytes that arrived, or weights that were loaded, are not those that were published."""


class AuthError(WeightSyncError):
    """The bearer token is missing or wrong."""

    http_status = 401


class NotRegisteredError(AuthError):
    """The token is right, and an endpoint or a receiver is not known there. Nobody was called."""

    http_status = 403


class ForbiddenError(AuthError):
    """A request that a web page of somebody else's may have sent: a foreign Origin or Host. Nothing was done."""

    http_status = 403


class SyncInProgressError(WeightSyncError):
    """Another sync of this model is running. Nothing was changed; try again when it has ended."""

    http_status = 409


class StateError(WeightSyncError):
    """A call came in a state that does not allow it (commit without begin, resume of a half-loaded engine)."""

    http_status = 409


class NotServingError(WeightSyncError):
    """The engine refuses to answer: it is paused past the caller's deadline, or fenced."""

    http_status = 503


class BusyError(WeightSyncError):
    """A server has as much under way as it takes at once. Nothing was done; try again."""

    http_status = 503


class NoSlotError(BusyError):
    """All places for adapters of an engine are taken by versions that still answer. Nothing was changed; the old one
    is served on."""


class CanaryError(WeightSyncError):
    """An engine's log-probabilities of a known prompt are not the trainer's: what was delivered is not what serves. Its
    detail `still` says whether they stand where they stood with the version before. The old version is served on."""


class DeadlineExceededError(WeightSyncError):
    """A wait ended without what was waited for."""

    http_status = 504


class TransferError(WeightSyncError):
    """Moving bytes failed."""

    follows = True


class GroupJoinError(TransferError):
    """Not every member joined the transfer group in time."""

    follows = False


class TransferAbortedError(TransferError):
    """The transfer was ended on purpose: a peer failed, or a newer session took over."""

    http_status = 409


class SharedMemoryError(WeightSyncError):
    """Named shared memory can't be had or mapped: it is full, gone, or not this user's."""


class NoRoomError(SharedMemoryError):
    """There is too little shared memory for what was asked for, and waiting for it is not this caller's business."""


class StorageError(WeightSyncError):
    """A file or folder can't be written: its disk is full or broken, or it is not this user's. What was there stays."""

    http_status = 507


class DeltaFormatError(TransferError):
    """A delta's blob is damaged, of another version, or does not fit the layout or the base. Nothing was written."""


class DeltaTooLargeError(WeightSyncError):
    """A delta grew past the bytes it was allowed. Nothing of it is left; a full is better."""


class LoadError(WeightSyncError):
    """The engine's loader failed on an update."""


class ExtractError(WeightSyncError):
    """The trainer's weights could not be extracted."""


class TrainerRankError(WeightSyncError):
    """A training rank is gone or doesn't answer in time. This library's group of the ranks is given up."""


class EngineError(WeightSyncError):
    """An engine answered with an error that is not one of ours."""


class EngineUnreachableError(EngineError):
    """An engine doesn't answer: it is dead, or the network is."""

    http_status = 502


class StoreUnavailableError(EngineUnreachableError):
    """An object store does not answer, or answers "slow down" (429, 503), as often as it is asked within the deadline.
    What was being written there is not pointed to; what was being read is not taken."""

    http_status = 503


class StoreAuthError(AuthError):
    """An object store refuses the credential: it is wrong, expired, or may not do this. Nobody asks again with it at
    once. What is there stays."""

    http_status = 403


class ObjectMissingError(WeightSyncError):
    """An object is not in the store. Nothing was taken."""

    http_status = 404


class ObjectConflictError(WeightSyncError):
    """A conditional put found another object than it was to replace, or found one where there was to be none. The store
    is unchanged."""

    http_status = 409


class StoreDamagedError(DigestMismatchError):
    """What an object store gave is not what was written there: damaged, cut off, or swapped. It names the object, and
    nothing of it was taken."""


class SignatureError(AuthError):
    """A manifest or a pointer is not signed by the key that is trusted here, or is of another place or run. Nothing of
    it was taken."""

    http_status = 403


class RunClaimedError(StateError):
    """Another trainer writes into this place of an object store. What it writes stays; this one writes nothing (more)
    there."""


class NoEnginesError(EngineError):
    """There is no engine to sync to. That is a failure, never a success."""

    waits = False
    """Whether nothing has failed, and some are about to come. Another process is not told that."""


class SyncFailedError(WeightSyncError):
    """A sync failed on one or several engines; `causes` has one error for each of them."""

    def __init__(self, message: str, *, causes: Mapping[str, WeightSyncError] | None = None, **facts: Any) -> None:
        self.causes = dict(causes or {})
        facts.setdefault("causes_by_engine", {peer: error.to_dict() for peer, error in self.causes.items()})
        super().__init__(message, **facts)

    @property
    def is_consequence(self) -> bool:
        """Whether every cause follows from something else."""
        return bool(self.causes) and all(is_consequence(error) for error in self.causes.values())

    def _in_words(self, *, peer: str | None = None) -> str:
        head = {key: getattr(self, key) for key in _FIELDS if getattr(self, key) is not None}
        facts = ", ".join(f"{key}={value}" for key, value in head.items())
        added = {peer: error for peer, error in self.causes.items() if str(error) not in self.message}
        causes = "; ".join(
            ("" if self.message.endswith(f" failed on {who}") else f"{who}: ")
            + f"{type(error).__name__}: {error._in_words(peer=who)}"
            for who, error in added.items()
        )
        return _visible(f"{self.message}{f' [{facts}]' if facts else ''}{f' ({causes})' if causes else ''}")


def is_consequence(error: BaseException) -> bool:
    """Whether `error` most likely follows from another failure elsewhere."""
    if isinstance(error, SyncFailedError):
        return error.is_consequence
    return isinstance(error, WeightSyncError) and error.follows


def error_from_dict(body: Mapping[str, Any], *, peer: str | None = None, depth: int = 0) -> WeightSyncError:
    """Rebuilds the typed error that `WeightSyncError.to_dict` wrote.

    Args:
        body: what came from the other side. Unknown error names become `EngineError`, so a newer
            peer never breaks an older one; nothing in it is executed or imported.
        peer: who sent it; recorded when the error itself names nobody.
        depth: how deep in other errors' causes this one lies; causes end somewhere.
    """
    name = str(body.get("error", "EngineError"))
    kind = _KINDS.get(name, EngineError)
    facts: dict[str, Any] = {key: _readable(body[key]) for key in _FIELDS if body.get(key) is not None}
    facts.setdefault("peer", peer)
    raw = body.get("details")
    details = {str(key): _readable(value) for key, value in raw.items()} if isinstance(raw, Mapping) else {}
    details = {key: value for key, value in details.items() if key not in {*_FIELDS, "self", "message", "causes"}}
    message = str(_readable(str(body.get("message", "the peer gave no message"))))
    if issubclass(kind, SyncFailedError):
        inner = details.pop("causes_by_engine", {})
        inner = inner if isinstance(inner, Mapping) and depth < _MAX_DEPTH else {}
        causes = {
            str(who): error_from_dict(what, depth=depth + 1) for who, what in inner.items() if isinstance(what, Mapping)
        }
        return kind(message, causes=causes, **facts, **details)
    if name not in _KINDS:
        details["remote_error"] = name
    return kind(message, **facts, **details)


def as_weightsync_error(
    error: BaseException, kind: type[WeightSyncError], message: str, **facts: Any
) -> WeightSyncError:
    """`error` itself where it is typed already, else a `kind` that carries its words."""
    if isinstance(error, WeightSyncError):
        return error
    wrapped = kind(f"{message}: {type(error).__name__}: {error}", **facts)
    wrapped.__cause__ = error
    return wrapped


def _jsonable(value: Any, depth: int = 0) -> Any:
    """`value` as strict JSON can say it: what it can't say becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)  # bool is an int
    if value is None:
        return None
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {_text(key): _jsonable(item, depth + 1) for key, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item, depth + 1) for item in value]
    return _text(value)


def _text(value: object) -> str:
    """As UTF-8 can say it: names of files come with lone surrogates in them."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _has_url(text: str, url: str) -> bool:
    """Whether the text names it, and not one that is longer."""
    return re.search(re.escape(url) + r"(?![\w.:-]*\w)", text) is not None


def _visible(text: str) -> str:
    """A text that moves no terminal's cursor and styles nothing: much of it came from elsewhere. Lines stay lines."""
    if text.isprintable():
        return text
    shown = (char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text)
    return "".join(shown)


def _shown(value: object) -> str:
    """A detail in an error's text: the whole of it stays in `details`."""
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _readable(value: Any) -> Any:
    """Text of a size that a log can take."""
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[:_MAX_TEXT]}... ({len(value)} characters)"
    return value


def _all_kinds(root: type[WeightSyncError]) -> dict[str, type[WeightSyncError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_all_kinds(child))
    return found


_KINDS = _all_kinds(WeightSyncError)
