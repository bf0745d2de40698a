"""The tables of `weightsync status` of a controller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weightsync.cli.tables import Cell, table
from weightsync.control.web.headline import brief, seconds_text, short_version, troubled_first
from weightsync.types.control import ControllerStatus, InstanceStatus, RolloutServiceState, SyncRecord, SyncSpan

if TYPE_CHECKING:
    from rich.table import Table

_STATES = {"evicted": "bold red", "suspect": "bold yellow", "joining": "yellow", "live": "green"}
_MOST_SYNCS = 8
_MOST_WAITS = 3
_ERROR_CHARS = 140


def tables_of(now: ControllerStatus) -> Iterator[Table]:
    yield _models(now)
    if now.barriers:
        yield _barriers(now)
    if now.instances:
        yield _fleet(now)
    if now.syncs:
        yield _syncs(now)


def _models(now: ControllerStatus) -> Table:
    heads = ("model", "mode", "run", "trained", "served", "behind", "state", "rollout", "validation", "last error")

    def row(tag: str, model: RolloutServiceState) -> tuple[Cell, ...]:
        served, validation = model.rollout_model_version, model.waiting_for_validation
        return (
            tag, now.sync_mode.get(tag), model.run_id or "none", str(model.train_model_version),
            *(("none", "all") if served < 0 else (str(served), str(model.staleness))), _state(model),
            _rollout(model), (f"of {validation.version}" if validation else None, "yellow"),
            brief(model.last_error, _ERROR_CHARS),
        )  # fmt: skip

    rows = (row(tag, model) for tag, model in now.models.items())
    return table("Models", heads, rows, right=("trained", "served", "behind"))


def _state(model: RolloutServiceState) -> Cell:
    words = {"running": "running", "need_sync": "sync is due", "syncing": "syncing"}
    text = "overdue" if model.overdue else words[model.state]
    if model.num_failed:
        text += f", failed {model.num_failed} in a row"
    wrong = model.overdue or model.num_failed
    return text, "bold red" if wrong else "" if model.state == "running" else "yellow"


def _rollout(model: RolloutServiceState) -> Cell:
    if model.num_answering == 0:
        return "nobody answers", "bold red"
    return ("waits", "yellow") if model.blocked else "goes on"


def _fleet(now: ControllerStatus) -> Table:
    tags = tuple(now.models)
    moves = {each.instance_id: _moves(each) for each in now.instances}
    moving = ("transfer",) if any(moves.values()) else ()

    def row(each: InstanceStatus) -> tuple[Cell, ...]:
        versions = (_version(each, tag, now.models[tag]) for tag in tags)
        lease = seconds_text(each.lease_left_s) if each.lease_left_s > 0 else "none"
        return (
            each.instance_id, (each.state, _STATES[each.state]), *versions,
            *((moves[each.instance_id], "yellow") for _ in moving), seconds_text(each.heartbeat_age_s), lease,
            brief(each.why, _ERROR_CHARS),
        )  # fmt: skip

    rows = map(row, troubled_first(now.instances))
    return table("Fleet", ("instance", "state", *tags, *moving, "heartbeat", "lease left", "why"), rows)


def _moves(instance: InstanceStatus) -> str:
    return "; ".join(f"{tag} {moved}" for tag, moved in instance.progress.items() if moved.is_long)


def _version(instance: InstanceStatus, tag: str, model: RolloutServiceState) -> Cell:
    lag = instance.lag.get(tag)
    text = short_version(instance.models.get(tag), model)
    text += f", {instance.adapters[tag]}" if tag in instance.adapters else ""
    return (f"{text}, {lag} behind", "yellow") if lag else text


def _barriers(now: ControllerStatus) -> Table:
    rows = (
        (
            ", ".join(f"{tag} {'none' if v is None else v}" for tag, v in each.versions.items()), str(each.version),
            (", ".join(each.waits_for), "yellow"), seconds_text(each.waited_s), seconds_text(each.timeout_s),
        )
        for each in now.barriers
    )  # fmt: skip
    heads = ("set", "has to reach", "missing", "waited", "at most")
    return table("Sets that wait", heads, rows, right=("has to reach",))


def _syncs(now: ControllerStatus) -> Table:
    styles = {"served": "green", "failed": "bold red"}
    shown = now.syncs[:_MOST_SYNCS]
    errors = [brief(each.error, _ERROR_CHARS) for each in shown]
    same = [False, *(one == other != "" for one, other in itertools.pairwise(errors))]
    rows = (
        (
            f"{each.model_tag} {each.version}", f"{seconds_text(max(0.0, now.now_s - each.started_s))} ago",
            seconds_text(each.seconds), (each.outcome, styles.get(each.outcome, "yellow")), _waits(each),
            "as before" if again else error,
        )
        for each, error, again in zip(shown, errors, same, strict=True)
    )  # fmt: skip
    return table("Last syncs", ("sync", "began", "took", "outcome", "longest waits", "error"), rows)


def _waits(record: SyncRecord) -> str:
    """The longest span of each name, of the three names that took longest."""
    longest: dict[str, SyncSpan] = {}
    for span in sorted(record.spans, key=lambda span: -span.seconds):
        longest.setdefault(span.name, span)
    first = list(longest.values())[:_MOST_WAITS]
    return ", ".join(f"{span.name}{f' {span.who}' if span.who else ''} {seconds_text(span.seconds)}" for span in first)
