"""`weightsync verify`: engines read all of their live weights, and say whether they are what was published."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.shared import MAX_S, Token, Verify, is_the_users, plain, told
from weightsync.errors import ConfigError, DeadlineExceededError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.types import EngineReply

_WRONG, _UNKNOWN = 1, 3
_ASK_S = 10.0  # to say what it is
_QUIET_S, _AGAIN_S = 2.0, 10.0  # until it says who is waited for


def verify(
    url: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Engines: vllm+http://..., or http://..., asked what it is.")
    ],
    token: Token = None,
    verify: Verify = None,
    timeout_s: Annotated[
        float, typer.Option(min=1.0, max=MAX_S, help="Seconds that all of them have: gigabytes are read on one core.")
    ] = 600.0,
) -> None:
    """Makes engines read all of their live weights and compare them with what was published; they serve meanwhile.
    Who takes longer than two seconds is named on standard error.

    A line for each: "proved" with the digest; "wrong" where live bytes are others: load a version in full, until then
    an engine of ours refuses to serve, and a vLLM server answers on; "unknown" with the reason where nobody can tell:
    repacked or quantised weights, a version that is being loaded, no answer.

    Exit codes: 0: all are proved. 1: one is wrong. 2: a wrong option, URL or token. 3: none is wrong, and one is
    unknown.

    Example: weightsync verify vllm+http://127.0.0.1:8000 http://127.0.0.1:8650
    """
    with told():
        from weightsync.handles.by_url import read_engine_url
        from weightsync.handles.fanout import in_thread

        for each in url:
            if "+" in each.partition("://")[0]:
                read_engine_url(each)
        asked = {each: in_thread(lambda e=each: _asked(e, token, verify or True, timeout_s), name="weightsync-verify")  # type: ignore[misc]
                 for each in url}  # fmt: skip
        found = [_line(each, asked) for each in asked]
    raise typer.Exit(_WRONG if _WRONG in found else _UNKNOWN if _UNKNOWN in found else 0)


def _asked(url: str, token: str | None, verify: bool | str, timeout_s: float) -> EngineReply:
    from weightsync.cli.faces import refuse_a_service
    from weightsync.handles.by_url import engine_at
    from weightsync.types import AuditRequest, Deadline, EngineOp

    deadline = Deadline(timeout_s)
    try:
        handle = engine_at(url, token=token, verify=verify, timeout_s=min(_ASK_S, timeout_s))
    except ConfigError:
        with contextlib.suppress(DeadlineExceededError):
            left_s = min(_ASK_S, deadline.check("answer", peer=url))
            refuse_a_service(url, token=token, verify=verify, timeout_s=left_s)
        raise
    try:
        return handle.call(EngineOp.AUDIT, AuditRequest(), timeout_s=deadline.check("answer", peer=url))
    finally:
        handle.close()  # type: ignore[attr-defined]


def _line(url: str, asked: Mapping[str, Future[EngineReply]]) -> int:
    pause_s = _QUIET_S
    while wait([asked[url]], pause_s).not_done:
        late = [who for who, answer in asked.items() if not answer.done()]
        print(plain(f"{', '.join(late)}: no answer yet"), file=sys.stderr, flush=True)
        pause_s = _AGAIN_S
    try:
        reply = asked[url].result()
    except WeightSyncError as error:
        if is_the_users(error):
            raise
        return _say(_UNKNOWN, url, f"{type(error).__name__}: {error}")
    if reply.digests_equal and reply.version is not None:
        return _say(0, url, f"serves {reply.version}, its live weights have digest {reply.model_digest}")
    if reply.digests_equal is False:
        return _say(_WRONG, url, f"{reply.unhealthy or 'its live weights are others'}; load a version in full")
    return _say(_UNKNOWN, url, reply.unprovable or "it did not say")


def _say(code: int, url: str, text: str) -> int:
    word = {0: "proved", _WRONG: "wrong", _UNKNOWN: "unknown"}[code]
    print(plain(f"{word:<8} {url}: {text}"), flush=True)
    return code
