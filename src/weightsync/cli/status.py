"""`weightsync status`: how a controller is, for eyes and for scripts."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.shared import Token, plain
from weightsync.errors import AuthError, ConfigError, WeightSyncError
from weightsync.types.control import (
    BarrierStatus,
    ControllerStatus,
    InstanceStatus,
    RolloutServiceState,
    SyncRecord,
    SyncSpan,
)

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from weightsync.clients.controller import ControllerClient
    from weightsync.control.web.headline import Fact

_STYLES = {"wrong": "bold red", "busy": "yellow", "ok": "green"}
_STATES = {"evicted": "bold red", "suspect": "bold yellow", "joining": "yellow", "live": "green"}
_WIDTH_OF_A_PIPE = 160
_MOST_SYNCS = 8
_MOST_WAITS = 3
_WRONG, _REFUSED, _NO_ANSWER = 1, 2, 3


def status(
    url: Annotated[str, typer.Argument(help="URL of the controller, e.g. http://127.0.0.1:8700.")],
    token: Token = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the token from this file instead.")
    ] = None,
    verify: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of the authority of an https controller.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, once.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="How often to look with --watch.")] = 1.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds that the controller has to answer.")] = 10.0,
) -> None:
    """Shows how a controller is: what is wrong, its models, its fleet, what waits for what, and the last syncs.

    The first lines say it in words, the worst first. In the fleet, "12" is a version of the trainer's run, "2 behind"
    how far it is from the newest, and a lease of "none" means that the instance answers nobody.

    Exit codes: 0: all is well. 1: something is wrong: an instance is evicted or suspect, a sync failed, a model is
    overdue, or a set waits longer than it may. 2: a wrong option or token. 3: no controller answers.

    Examples: weightsync status http://127.0.0.1:8700 --watch, or in a script:
    weightsync status $URL --json | jq '.models.actor.staleness'
    """
    with _told():
        if json and watch:
            raise ConfigError("--json prints once: leave out --watch, and call it again")
        client = _client(url, _token(token, token_file), verify or True)
        try:
            if watch:
                raise typer.Exit(_watch(client, every_s=every_s, timeout_s=timeout_s))
            raise typer.Exit(_once(client, as_json=json, timeout_s=timeout_s))
        finally:
            client.close()


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(status)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Typed errors as one line, and the exit codes that `status` promises."""
    try:
        yield
    except (WeightSyncError, OSError) as error:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        given = isinstance(error, ConfigError | AuthError | OSError)
        raise typer.Exit(_REFUSED if given else _NO_ANSWER) from None


def _token(token: str | None, file: Path | None) -> str | None:
    if file is None:
        return token
    found = file.read_text(encoding="utf-8", errors="replace").strip()
    if not found:
        raise ConfigError(f"{file} is empty: it should hold the controller's token")
    return found


def _client(url: str, token: str | None, verify: bool | str) -> ControllerClient:
    from weightsync.clients.controller import ControllerClient

    return ControllerClient(url, token=token, verify=verify)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


def _once(client: ControllerClient, *, as_json: bool, timeout_s: float) -> int:
    from weightsync.control.web.headline import facts
    from weightsync.net.messages import encode

    now = client.status(timeout_s=timeout_s)
    said = facts(now)
    if as_json:
        print(encode(now).decode())
    else:
        _console().print(render(now, said), highlight=False)
    return _code(said)


def _watch(client: ControllerClient, *, every_s: float, timeout_s: float) -> int:
    """Until Ctrl-C; the code of what was shown last."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from weightsync.control.web.headline import facts, seconds_text

    shown: Group | None = None
    code = _NO_ANSWER
    answered = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Live(console=_console(), auto_refresh=False) as live:
        while True:
            try:
                now = client.status(timeout_s=timeout_s)
                said = facts(now)
                shown, code, answered = render(now, said), _code(said), time.monotonic()
                live.update(shown, refresh=True)
            except (ConfigError, AuthError):
                raise
            except WeightSyncError as error:
                code = _NO_ANSWER
                since = seconds_text(time.monotonic() - answered)
                gone = Text(f"No answer from the controller since {since} ({plain(str(error))})", style="bold red")
                live.update(Group(gone, *(shown.renderables if shown is not None else ())), refresh=True)
            time.sleep(every_s)
    return code


def _code(said: tuple[Fact, ...]) -> int:
    return _WRONG if any(fact.level == "wrong" for fact in said) else 0


def render(now: ControllerStatus, said: tuple[Fact, ...]) -> Group:
    """Sentences, then tables; parts that have nothing to show are left out."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Table | Text] = [Text(plain(str(fact)), style=_STYLES[fact.level]) for fact in said]
    parts += [Text(), _models(now)]
    if now.barriers:
        parts += [Text(), _barriers(now.barriers)]
    if now.instances:
        parts += [Text(), _fleet(now)]
    if now.syncs:
        parts += [Text(), _syncs(now)]
    return Group(*parts)


def _table(title: str, heads: tuple[str, ...], *, numbers: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 1, 0, 0)
    for head in heads:
        right = head in numbers
        table.add_column(plain(head), justify="right" if right else "left", overflow="fold")
    return table


def _cell(text: str | None, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text or ""), style=style)


def _models(now: ControllerStatus) -> Table:
    heads = ("model", "mode", "run", "trained", "served", "behind", "state", "rollout", "validation", "last error")
    table = _table("Models", heads, numbers=("trained", "served", "behind"))
    for tag, model in now.models.items():
        served = model.rollout_model_version
        validation = model.waiting_for_validation
        table.add_row(
            _cell(tag, "bold"), _cell(now.sync_mode.get(tag)), _cell(model.run_id or "none"),
            str(model.train_model_version), "none" if served < 0 else str(served), str(model.staleness),
            _state(model), _cell("waits" if model.blocked else "goes on", "yellow" if model.blocked else ""),
            _cell(f"of {validation.version}" if validation else None, "yellow"), _cell(model.last_error),
        )  # fmt: skip
    return table


def _state(model: RolloutServiceState) -> Text:
    words = {"running": "running", "need_sync": "sync is due", "syncing": "syncing"}
    text = "overdue" if model.overdue else words[model.state]
    if model.num_failed:
        text += f", failed {model.num_failed} in a row"
    wrong = model.overdue or model.num_failed
    return _cell(text, "bold red" if wrong else "" if model.state == "running" else "yellow")


def _fleet(now: ControllerStatus) -> Table:
    from weightsync.control.web.headline import seconds_text, troubled_first

    tags = tuple(now.models)
    table = _table("Fleet", ("instance", "state", *tags, "heartbeat", "lease left", "why"), numbers=())
    for each in troubled_first(now.instances):
        lease = seconds_text(each.lease_left_s) if each.lease_left_s > 0 else "none"
        table.add_row(
            _cell(each.instance_id, "bold"), _cell(each.state, _STATES[each.state]),
            *(_version(each, tag, now.models[tag]) for tag in tags),
            seconds_text(each.heartbeat_age_s), lease, _cell(each.why),
        )  # fmt: skip
    return table


def _version(instance: InstanceStatus, tag: str, model: RolloutServiceState) -> Text:
    from weightsync.control.web.headline import short_version

    lag = instance.lag.get(tag)
    text = short_version(instance.models.get(tag), model)
    return _cell(f"{text}, {lag} behind", "yellow") if lag else _cell(text)


def _barriers(barriers: tuple[BarrierStatus, ...]) -> Table:
    from weightsync.control.web.headline import seconds_text

    heads = ("set", "has to reach", "missing", "waited", "at most")
    table = _table("Sets that wait", heads, numbers=("has to reach",))
    for each in barriers:
        published = ", ".join(f"{tag} {'none' if v is None else v}" for tag, v in each.versions.items())
        table.add_row(
            _cell(published), str(each.version), _cell(", ".join(each.waits_for), "yellow"),
            seconds_text(each.waited_s), seconds_text(each.timeout_s),
        )  # fmt: skip
    return table


def _syncs(now: ControllerStatus) -> Table:
    from weightsync.control.web.headline import seconds_text

    table = _table("Last syncs", ("sync", "began", "took", "outcome", "longest waits", "error"), numbers=())
    for each in now.syncs[:_MOST_SYNCS]:
        style = {"served": "green", "failed": "bold red"}.get(each.outcome, "yellow")
        table.add_row(
            _cell(f"{each.model_tag} {each.version}", "bold"),
            f"{seconds_text(max(0.0, now.now_s - each.started_s))} ago", seconds_text(each.seconds),
            _cell(each.outcome, style), _cell(_waits(each)), _cell(each.error),
        )  # fmt: skip
    return table


def _waits(record: SyncRecord) -> str:
    """The longest span of each name, of the three names that took longest."""
    from weightsync.control.web.headline import seconds_text

    longest: dict[str, SyncSpan] = {}
    for span in sorted(record.spans, key=lambda span: -span.seconds):
        longest.setdefault(span.name, span)
    first = list(longest.values())[:_MOST_WAITS]
    return ", ".join(f"{span.name}{f' {span.who}' if span.who else ''} {seconds_text(span.seconds)}" for span in first)
