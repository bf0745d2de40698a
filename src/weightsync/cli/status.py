"""`weightsync status`: how a controller, a rollout service, an agent or an engine is, for eyes and for scripts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.shared import MAX_S, Token, Verify, plain, refuse_given, told, was_given
from weightsync.errors import AuthError, ConfigError, WeightSyncError

if TYPE_CHECKING:
    from rich.console import Group

    from weightsync.cli.faces import Face, Seen

_STYLES = {"wrong": "bold red", "busy": "yellow", "ok": "green"}
_WRONG, _REFUSED, _NO_ANSWER = 1, 2, 3


def status(
    context: typer.Context,
    url: Annotated[
        str, typer.Argument(help="Of a controller, a rollout service, an agent or an engine: http://127.0.0.1:8700.")
    ],
    token: Token = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the token from this file instead.")
    ] = None,
    verify: Verify = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, once.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="How often to look with --watch.")] = 1.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="Seconds that it has to answer.")] = 10.0,
) -> None:
    """Shows how a controller, a rollout service, an agent or an engine is; it is asked which of these it is.

    The first lines say it in words, the worst first; a transfer that takes long says how far it is. In a controller's
    fleet, "12" is a version of the trainer's run, "2 behind" how far it is from the newest, and a lease of "none" means
    that the instance answers nobody.

    Exit codes: 0: all is well. 1: something is wrong: an instance is evicted, suspect or not heard any more, or has an
    engine that is gone, a sync or a pull failed, an agent that a host asks is gone, a model is overdue, a set waits
    longer than it may, an engine refuses its weights or is left paused, or a host's engines answer nobody. 2: a wrong
    option or token. 3: no controller answers, nor anything else of ours.

    Examples: weightsync status http://127.0.0.1:8700 --watch, or in a script:
    weightsync status $URL --json | jq '.models.actor.staleness'
    """
    with told(otherwise=_NO_ANSWER, of_files=_REFUSED):
        if json and watch:
            raise ConfigError("--json prints once: leave out --watch, and call it again")
        if not watch:
            refuse_given(context, ("every_s",), "it says how often --watch looks; add --watch")
        if token_file is not None and was_given(context, "token", by=("COMMANDLINE",)):
            raise ConfigError("--token and --token-file both name the token: give one of them")
        from weightsync.cli.faces import Face

        face = Face(url, token=_token(token, token_file), verify=verify or True)
        try:
            if watch:
                raise typer.Exit(_watch(face, every_s=every_s, timeout_s=timeout_s))
            raise typer.Exit(_once(face, as_json=json, timeout_s=timeout_s))
        finally:
            face.close()


def _token(token: str | None, file: Path | None) -> str | None:
    if file is None:
        return token
    found = file.read_text(encoding="utf-8", errors="replace").strip()
    if not found:
        raise ConfigError(f"--token-file {file} is empty: it has to hold the token")
    return found


def _once(face: Face, *, as_json: bool, timeout_s: float) -> int:
    from weightsync.cli.tables import console
    from weightsync.net.messages import encode

    seen = face.look(timeout_s)
    if as_json:
        print(encode(seen.raw).decode())
    else:
        console().print(_rendered(seen), highlight=False)
    return _code(seen)


def _watch(face: Face, *, every_s: float, timeout_s: float) -> int:
    """Until Ctrl-C; the code of what was shown last."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from weightsync.cli.tables import console
    from weightsync.control.web.headline import seconds_text

    shown: Group | None = None
    code = _NO_ANSWER
    answered = time.monotonic()
    out = console()
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=out, auto_refresh=False)) if out.is_terminal else None

        def show(now: Group) -> None:
            if live is not None:
                live.update(now, refresh=True)
            else:  # one look after the other
                out.print(now, highlight=False)

        while True:
            try:
                seen = face.look(timeout_s)
                shown, code, answered = _rendered(seen), _code(seen), time.monotonic()
                show(shown)
            except (ConfigError, AuthError):
                raise
            except WeightSyncError as error:
                code = _NO_ANSWER
                since = seconds_text(time.monotonic() - answered)
                gone = Text(f"No answer since {since} ({plain(str(error))})", style="bold red")
                show(Group(gone, *(shown.renderables if shown is not None else ())))
            time.sleep(every_s)
    return code


def _code(seen: Seen) -> int:
    return _WRONG if any(fact.level == "wrong" for fact in seen.facts) else 0


def _rendered(seen: Seen) -> Group:
    """Sentences, then tables."""
    from rich.console import Group
    from rich.text import Text

    sentences = [Text(plain(str(fact)), style=_STYLES[fact.level]) for fact in seen.facts]
    return Group(*sentences, *(part for table in seen.tables for part in (Text(), table)))
