"""engine_at: the handle of an engine, from its URL.

    vllm+http://HOST:8000       a vLLM server, by its own routes
    sglang+http://HOST:30000    an SGLang server, by its own routes
    weightsync+http://HOST:8123 an engine server of this library
    http://HOST:PORT            one of these: it is asked which

Each of them with `https`, too. What is there is asked before it is used, where it answers: a server of another kind, or
one without the routes that are needed, is refused in words that say what to do. Nothing is changed on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import socket
import ssl
from typing import Literal, TypeAlias, get_args

from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    WeightSyncError,
)
from weightsync.handles.http import HttpEngine
from weightsync.handles.probe import Capabilities, Feature, probe
from weightsync.handles.two_kinds import SGLangServerEngine, VllmServerEngine
from weightsync.net.http_edge import OF_A_PROXY, checked_url
from weightsync.types import Deadline, DescribeRequest, EngineHandle, EngineOp

Kind: TypeAlias = Literal["vllm", "sglang", "weightsync"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_SCHEMES = (*(f"{kind}+{scheme}" for kind in _KINDS for scheme in ("http", "https")), "http", "https")
_ASK_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineUrl:
    """An engine's URL, read.

    Attributes:
        kind: what the URL says that it is; None where it does not.
        url: plain, as HTTP takes it.
    """

    kind: Kind | None
    url: str


def read_engine_url(text: str) -> EngineUrl:
    """Reads a URL; asks nobody.

    Raises:
        ConfigError: it is none, or its scheme is none of ours; names the closest one.
    """
    if "@" in text:
        checked_url(text, whose="an engine's")  # a password is not quoted
    scheme, found, rest = text.partition("://")
    if not found or scheme not in _SCHEMES:
        close = difflib.get_close_matches(scheme if found else "", _SCHEMES, n=1)
        hint = f"did you mean {close[0]}://? " if close else "" if found else f"write http://{text}; "
        raise ConfigError(
            f"{text!r} is no engine's URL: {hint}it begins with one of {', '.join(f'{each}://' for each in _SCHEMES)}"
        )
    said, plus, plain = scheme.rpartition("+")
    kind = next((each for each in _KINDS if plus and each == said), None)
    return EngineUrl(kind=kind, url=checked_url(f"{plain}://{rest}", whose="an engine's"))


def engine_at(
    text: str,
    *,
    token: str | None = None,
    verify: bool | str = True,
    need: Feature = Feature.PUSH,
    must_answer: bool = True,
    leased: bool = False,
    timeout_s: float = _ASK_S,
) -> EngineHandle:
    """The handle of the engine at a URL; the caller closes it.

    Args:
        text: see the module. The handle's name is the URL without what stands before its `+`.
        token: bearer token of the engine, or of the proxy before it.
        verify: see `JsonClient`.
        need: what it has to be able to do.
        must_answer: False: an engine whose URL says what it is need not be there yet.
        leased: whether a vLLM is asked if it looks at a lease, see `VllmServerEngine`; others say it unasked.
        timeout_s: for all that it is asked.

    Raises:
        ConfigError: the URL is none; or what is there is of another kind, or can't do what is needed.
        EngineUnreachableError: nobody answers.
        AuthError: it refuses the token.
        EngineError: it is there, and fails.
    """
    said = read_engine_url(text)
    try:
        kind = kind_at(said, token=token, verify=verify, need=need, timeout_s=timeout_s)
    except (DeadlineExceededError, EngineError) as error:
        away = isinstance(error, EngineUnreachableError)
        may_come = isinstance(error, DeadlineExceededError) or error.details.get("status") in OF_A_PROXY
        if not away and (must_answer or said.kind is None or not may_come):
            raise
        if said.kind is None:
            if isinstance(error.__cause__, socket.gaierror | ssl.SSLError):
                raise  # no kind of engine in the URL would help
            error.message += f" It can't be asked what it is: start it, or write {' or '.join(_named(said.url))}"
            raise
        if must_answer:
            raise
        kind = said.kind
    match kind:
        case "vllm":
            return VllmServerEngine(said.url, token=token, verify=verify, leased=leased)
        case "sglang":
            return SGLangServerEngine(said.url, token=token, verify=verify)
        case "weightsync":
            return HttpEngine(said.url, token=token, verify=verify)


def kind_at(
    said: EngineUrl, *, token: str | None, verify: bool | str, need: Feature, timeout_s: float = _ASK_S
) -> Kind:
    """What runs there, where that can do what is needed. See `engine_at`."""
    deadline = Deadline(timeout_s)
    error: WeightSyncError | None = None
    if said.kind in (None, "weightsync"):
        error = _is_ours(said.url, token=token, verify=verify, deadline=deadline)
        if error is None:
            return "weightsync"
        if said.kind is not None and type(error) is not EngineError:
            raise error  # it is ours, and fails
    found = probe(said.url, token=token, verify=verify, timeout_s=deadline.check("answer", peer=said.url))
    kind: Kind | None = next((each for each in _KINDS if each == found.engine), None)
    if kind is None:
        if said.kind not in (None, "weightsync"):
            error = _is_ours(said.url, token=token, verify=verify, deadline=deadline)
        if error is not None:
            if type(error) is EngineError and not error.details.keys() & {"status", "remote_error"}:
                raise error  # the words of an engine server of ours, and not of who knows no such request
            raise ConfigError(_what_it_is(found), peer=said.url)
        kind = "weightsync"
    if said.kind not in (None, kind):
        what = "an engine server of weightsync" if kind == "weightsync" else kind
        raise ConfigError(
            f"{said.url} is {what}, and its URL says {said.kind}: write {_named(said.url, kind)[0]}", peer=said.url
        )
    found.need(need)
    return kind


def runs_at(url: str, *, token: str | None, verify: bool | str, timeout_s: float) -> str | None:
    """The engine that answers at a URL, as a URL that says what it is; None where none does, or it can't be told.

    Args:
        url: plain.
        token, verify: see `engine_at`.
        timeout_s: for all that it is asked.
    """
    deadline = Deadline(timeout_s)
    with contextlib.suppress(WeightSyncError):
        if _is_ours(url, token=token, verify=verify, deadline=deadline) is None:
            return f"weightsync+{url}"
        found = probe(url, token=token, verify=verify, timeout_s=deadline.check("answer", peer=url))
        return f"{found.engine}+{url}" if found.engine in _KINDS else None
    return None


def _is_ours(url: str, *, token: str | None, verify: bool | str, deadline: Deadline) -> WeightSyncError | None:
    """Why no engine server of ours answers there; None where one does.

    Raises:
        EngineUnreachableError, DeadlineExceededError: nobody answers at all.
        AuthError: it refuses the token.
    """
    with contextlib.closing(HttpEngine(url, token=token, verify=verify)) as engine:
        try:
            engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=deadline.check("answer", peer=url))
        except (EngineUnreachableError, DeadlineExceededError):
            raise
        except AuthError as error:
            error.message += "; give the token that the engine was started with: token= or WEIGHTSYNC_TOKEN"
            raise
        except WeightSyncError as error:
            return error
        return None


def _what_it_is(found: Capabilities) -> str:
    if found.engine == "sglang-router":
        return f"{found.url} is an SGLang router: weights go to its workers, so name each of them (sglang+http://...)"
    if found.url.rstrip("/").endswith("/v1"):
        return f"{found.url} is where clients of OpenAI's API ask: an engine's URL ends before the /v1"
    return (
        f"{found.url} answers, and is no engine that can be synced: neither vLLM, SGLang nor an EngineServer; look at "
        f"the port{or_another_part(found.url)}"
    )


def or_another_part(url: str) -> str:
    """What an error advises besides: all but `weightsync status` itself."""
    return f" (`weightsync status {url}` says whether it is another part of weightsync)"


def _named(url: str, *kinds: Kind) -> list[str]:
    return [f"{kind}+{url}" for kind in kinds or _KINDS]
