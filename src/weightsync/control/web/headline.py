"""What is to be said of a controller, the worst first: one list of sentences for the page, the command and scripts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from weightsync.types.control import BarrierStatus, ControllerStatus, InstanceStatus, RolloutServiceState, SyncRecord

Level = Literal["wrong", "busy", "ok"]

_LEVELS: tuple[Level, ...] = ("wrong", "busy", "ok")
_STATES = ("evicted", "suspect", "joining", "live")
_NAMED = 3
_DETAIL_CHARS = 300
_LONG_STEP_S = 60.0
_NOBODY_HAS_IT = "if its trainer has died: the next one publishes what it starts with before it waits for rollout"
_OLD_S = 2.0
"""What was heard longer ago is said with its age."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence about a controller.

    Attributes:
        level: "wrong": somebody should look; "busy": it goes on by itself; "ok".
        text: the sentence. It stays the same while the same holds.
        detail: what changes from second to second, and errors; "" where there is none.
    """

    level: Level
    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def facts(status: ControllerStatus) -> tuple[Fact, ...]:
    """What is to be said, the worst first; at least one. Names and errors in it are others' text."""
    newest: dict[str, SyncRecord] = {}
    for record in status.syncs:
        newest.setdefault(record.model_tag, record)
    found = [
        *(_of_barrier(barrier) for barrier in status.barriers),  # first: a sync that waits or failed is its doing
        *_of_silence(status),
        *(
            fact
            for tag, model in status.models.items()
            for fact in _of_model(tag, model, newest.get(tag), status.instances)
        ),
        *_of_instances(status.instances, status.models),
        *_served(status),
    ]
    return worst_first(found)


def worst_first(found: Iterable[Fact]) -> tuple[Fact, ...]:
    """By level; of one level in the order in which they come."""
    return tuple(sorted(found, key=lambda fact: _LEVELS.index(fact.level)))


def troubled_first(instances: Sequence[InstanceStatus]) -> tuple[InstanceStatus, ...]:
    """Those first that somebody should look at; then those behind; then by name, "inst-9" before "inst-10"."""

    def rank(each: InstanceStatus) -> tuple[object, ...]:
        parts = re.split("([0-9]{1,18})", each.instance_id)
        name = [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]
        return _STATES.index(each.state), all(lag == 0 for lag in each.lag.values()), name

    return tuple(sorted(instances, key=rank))


def short_version(version: str | None, model: RolloutServiceState | None) -> str:
    """A version as it is shown: the number alone where it is of the trainer's run."""
    if version is None:
        return "none"
    run_id, _, number = version.rpartition("/")
    return number if model is not None and run_id == model.run_id else version


def seconds_text(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def brief(error: str | None, most: int) -> str:
    """An error in at most so many characters, without its facts in brackets but the tensor's name, and without the
    errors that only hold others."""
    text = re.sub(r" \[[a-z_]+=[^\[\]]*\]", _tensor_in, error or "").replace("SyncFailedError: ", "")
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _tensor_in(facts: re.Match[str]) -> str:
    name = re.search(r"\bparameter=([^,\]]+)", facts[0])
    return f" ({name[1]})" if name else ""


def _of_silence(status: ControllerStatus) -> Iterator[Fact]:
    """Models that no instance of the fleet may answer with."""
    for tag, model in status.models.items():
        mine = [each for each in status.instances if tag in each.models]
        comes = any(each.state == "joining" and not each.gone and not each.failed for each in mine)
        if model.num_answering == 0:
            is_new = not mine and model.run_id is None
            lacks = any(each.state == "joining" and each.failed and not each.gone for each in mine)
            yield Fact(
                level="busy" if comes or is_new else "wrong",
                text=f"{tag}: nobody answers",
                detail="" if comes or not lacks else _NOBODY_HAS_IT,
            )


def _of_model(
    tag: str, model: RolloutServiceState, newest: SyncRecord | None, instances: Sequence[InstanceStatus]
) -> Iterator[Fact]:
    error = brief(model.last_error or (newest.error if newest else None), _DETAIL_CHARS)
    version = newest.version if newest is not None else model.train_model_version
    if model.num_failed:
        times = "once" if model.num_failed == 1 else f"{model.num_failed} times"
        then = "trying again now" if model.state == "syncing" else "it is tried again"
        if model.state != "syncing" and model.retry_in_s is not None:
            then = f"next try in {seconds_text(model.retry_in_s)}"
        then += f": {error}" if error else ""
        waits = "rollout waits" if model.blocked else _goes_on(model)
        yield Fact(level="wrong", text=f"{tag}: the sync of version {version} failed {times}, {waits}", detail=then)
    elif model.overdue:
        text = f"{tag}: version {version} could not be synced, {_goes_on(model)}"
        yield Fact(level="wrong", text=text, detail=error)
    elif newest is not None and newest.outcome == "failed":
        yield Fact(level="wrong", text=f"{tag}: the sync of version {version} failed", detail=error)
    elif model.state == "syncing":
        so_far = f"{seconds_text(newest.seconds)} so far" if newest is not None else ""
        detail = "; ".join(filter(None, (so_far, _slowest(tag, instances))))
        yield Fact(level="busy", text=f"Syncing {tag} to version {version}", detail=detail)
    elif model.state == "need_sync" and model.blocked:
        text = f"{tag}: rollout waits for the end of a training step, and its sync"
        yield Fact(level="busy", text=text, detail=_so_long(model.step_waited_s))
    if model.lost_step is not None:
        then = "rollout waits for the next one" if model.blocked else _goes_on(model)
        yield Fact(level="wrong", text=f"{tag}: no step gives a version, {then}", detail=model.lost_step)
    if model.waiting_for_validation is not None:
        yield Fact(level="busy", text=f"{tag}: version {model.waiting_for_validation.version} is being validated")


def _so_long(waited_s: float | None) -> str:
    """Since when a step is waited for, and where that is long, what to do."""
    if waited_s is None:
        return ""
    hint = "; where its trainer has died, the next one says so: trajectory_pool_notify_batch_dropped"
    return f"for {seconds_text(waited_s)}{hint if waited_s > _LONG_STEP_S else ''}"


def _slowest(tag: str, instances: Sequence[InstanceStatus]) -> str:
    """How far the transfer is that has most to go yet, of those that take long."""
    moves = [(each.instance_id, moved) for each in instances if (moved := each.progress.get(tag)) and moved.is_long]
    if not moves:
        return ""
    name, moved = max(moves, key=lambda move: math.inf if move[1].left_s is None else move[1].left_s)
    others = f" (the slowest of {len(moves)})" if len(moves) > 1 else ""
    return f"{name[:100]} has {moved}{others}"


def _of_instances(instances: Sequence[InstanceStatus], models: Mapping[str, RolloutServiceState]) -> Iterator[Fact]:
    total = len(instances)
    levels: tuple[tuple[str, Level], ...] = (("evicted", "wrong"), ("suspect", "wrong"), ("joining", "busy"))
    for state, level in levels:
        those = [instance for instance in instances if instance.state == state]
        if not those:
            continue
        head = f"All {total} instances are" if len(those) == total > 1 else f"{len(those)} of {total} instances"
        verb = "" if head.endswith("are") else " is" if len(those) == 1 else " are"
        names = ", ".join(instance.instance_id[:100] for instance in those[:_NAMED])
        more = f" and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
        whys = [instance.why or f"heartbeat {seconds_text(instance.heartbeat_age_s)} ago" for instance in those]
        detail = "; ".join(dict.fromkeys(brief(why, _DETAIL_CHARS) for why in whys[:_NAMED]))
        yield Fact(level=level, text=f"{head}{verb} {state}: {names}{more}", detail=detail)
    for instance in [each for each in instances if each.state == "live" and each.failed and not each.gone][:_NAMED]:
        has = ", ".join(_range(tag, model, [instance]) for tag, model in models.items() if tag in instance.models)
        text = f"{instance.instance_id[:100]} is live with {has}, and something failed there"
        yield Fact(level="wrong", text=text, detail=brief(instance.why, _DETAIL_CHARS))
    for instance in [each for each in instances if each.gone][:_NAMED]:
        names = ", ".join(who[:100] for who in instance.gone[:_NAMED])
        heard = f"heard {seconds_text(instance.heartbeat_age_s)} ago"
        yield Fact(level="wrong", text=f"{instance.instance_id[:100]}: engine gone: {names}", detail=heard)


def _of_barrier(barrier: BarrierStatus) -> Fact:
    who = " and ".join(barrier.waits_for)
    so_far = f"{seconds_text(barrier.waited_s)} of {seconds_text(barrier.timeout_s)}"
    if barrier.waited_s >= barrier.timeout_s:
        return Fact(level="wrong", text=f"{who} did not publish {barrier.version} in time", detail=so_far)
    return Fact(level="busy", text=f"Waiting for {who} to publish {barrier.version}", detail=so_far)


def _served(status: ControllerStatus) -> Iterator[Fact]:
    """What the rollout side serves."""
    if not (
        any(model.rollout_model_version > 0 for model in status.models.values())
        or any(record.outcome == "served" for record in status.syncs)
        or any(version is not None for instance in status.instances for version in instance.models.values())
    ):
        yield Fact(level="ok", text="No sync yet")
        return
    if not status.instances:
        served = ", ".join(f"{tag} {_served_number(model)}" for tag, model in status.models.items())
        if all(model.num_answering is None for model in status.models.values()):
            yield Fact(level="ok", text=f"Rollout serves {served}")
        return
    serving = [each for each in status.instances if each.state in ("live", "suspect") and not each.gone]
    if not serving:
        return
    every = len(serving) == len(status.instances)
    who = f"All {len(serving)} instances serve" if every else f"{len(serving)} of {len(status.instances)} serve"
    if every and len(serving) == 1:
        who = f"{serving[0].instance_id[:100]} serves"
    found = ", ".join(_range(tag, model, serving) for tag, model in status.models.items())
    age_s = max(instance.heartbeat_age_s for instance in serving)
    yield Fact(level="ok", text=f"{who} {found}", detail=f"as of {seconds_text(age_s)} ago" if age_s >= _OLD_S else "")


def _range(tag: str, model: RolloutServiceState, serving: Sequence[InstanceStatus]) -> str:
    """ "actor 12", or how many serve what where they differ."""
    versions = Counter(short_version(instance.models.get(tag), model) for instance in serving)
    if len(versions) == 1:
        return f"{tag} {next(iter(versions))}"
    parts = ", ".join(f"{number} serve {version}" for version, number in versions.most_common(_NAMED))
    return f"{tag} ({parts}{', ...' if len(versions) > _NAMED else ''})"


def _goes_on(model: RolloutServiceState) -> str:
    return "nobody answers" if model.num_answering == 0 else f"rollout goes on with {_served_number(model)}"


def _served_number(model: RolloutServiceState) -> str:
    return str(model.rollout_model_version) if model.rollout_model_version >= 0 else "weights of an earlier run"
