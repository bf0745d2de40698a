"""The states of a model as a picture in Markdown, drawn from `control.state` by trying every event in every state.

`python docs/control_states.py > docs/control-states.md` renews the page.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterator

from weightsync.control.events import (
    Action,
    BatchDropped,
    BatchReady,
    Event,
    EvictFailed,
    GiveUp,
    RetryDue,
    Synced,
    SyncFailed,
    Trained,
    ValidationEnded,
)
from weightsync.control.state import Mode, ModelState, Policy, dataloader_locked, pool_locked, services_blocked, step

_MAX_VERSION = 5
_MAX_PENDING = 2
_NEW_RUN = "new run"
"""A trainer's first word of another run, and the end of a sync of the run before."""

_WORDS = {
    "running": "running",
    "need_sync": "need_sync until the step ends",
    "retry": "need_sync until the retry",
    "syncing": "syncing",
    "validating": "a validation runs",
    "overdue_running": "overdue and running",
    "overdue_need_sync": "overdue and need_sync",
    "overdue_syncing": "overdue and syncing",
}
_COLORS = {
    "free": "fill:#e6f6ee,stroke:#0b6b43,color:#0b3d27",
    "waits": "fill:#fff4d9,stroke:#7a5200,color:#3d2900",
    "locked": "fill:#e8e4f8,stroke:#4b3d8f,color:#241c4d",
    "late": "fill:#ffe9ea,stroke:#b3001b,color:#5c000e",
}

_HEAD = """\
# States of a model

You want to know what a controller does next, in every state. Drawn from the code:
`python docs/control_states.py > docs/control-states.md` writes this page, and a test
compares. Every event was tried in every state that small numbers lead to, under every policy of the mode, but for a
sync that is asked for by hand, or since instances came or went: it begins when no sync, retry or validation is in its
way. "Validation wanted", of what is served, was tried where a retry is scheduled; elsewhere it begins when no sync and
no other validation runs. What the modes and the words mean: [when to sync](control.md).

Colours: green: nobody waits. Yellow: rollout waits, the trajectory pool is locked. Violet: dataloader and pool are
locked, rollout goes on. Red: overdue, nobody waits however far behind, until a sync succeeds.
"""


@dataclasses.dataclass(kw_only=True)
class Drawing:
    """What was found of one set of policies.

    Attributes:
        nodes: by group of states: (phase, rollout waits, pool is locked, dataloader is locked) of each state in it.
        edges: by (from, to): what leads there. Within one group only what makes the controller act.
        num_states: states that were seen.
    """

    nodes: dict[str, set[tuple[str, bool, bool, bool]]] = dataclasses.field(default_factory=dict)
    edges: dict[tuple[str, str], set[str]] = dataclasses.field(default_factory=dict)
    num_states: int = 0


def explore(*modes: Mode) -> Drawing:
    """Every state within small numbers, breadth first, of each policy of these modes."""
    drawing = Drawing()
    for mode in modes:
        for validate_freq in (0, 2):
            policies = (
                Policy(mode=mode, validate_freq=validate_freq, retries_s=(1.0,)),
                Policy(mode=mode, validate_freq=validate_freq, retries_s=(1.0,), after_failure="evict"),
            )
            for policy in policies:
                _explore(policy, drawing)
    return drawing


def _explore(policy: Policy, drawing: Drawing) -> None:
    start = ModelState()
    seen = {start}
    waiting = collections.deque(seen)
    while waiting:
        state = waiting.popleft()
        here = _group(state)
        drawing.nodes.setdefault(here, set()).add(
            (state.phase, services_blocked(state, policy), pool_locked(state, policy), dataloader_locked(state))
        )
        for name, event in _events(state):
            after, actions = step(state, event, policy)
            there = _group(after)
            if here != there or actions:
                drawing.edges.setdefault((here, there), set()).add(name + _said(actions))
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    drawing.num_states += len(seen)


def _events(state: ModelState) -> Iterator[tuple[str, Event]]:
    if state.num_pending < _MAX_PENDING:
        yield "batch ready", BatchReady()
    if state.num_pending:
        yield "batch dropped", BatchDropped(num=1)
    if state.train_version < _MAX_VERSION:
        yield "trained", Trained(worker="w", run_id=state.run_id or "first")
    if state.run_id == "first":
        yield _NEW_RUN, Trained(worker="w", run_id="second", version=1)
    if state.syncing is not None:
        current = state.syncing.run_id == state.run_id
        yield "synced" if current else _NEW_RUN, Synced(version=state.syncing.version)
        yield "sync failed" if current else _NEW_RUN, SyncFailed()
    if state.phase == "need_sync" and state.num_failed:
        if not state.retry_due:
            yield "retry due", RetryDue()
        if state.rollout_version > max(0, state.evaluated_to):
            version = state.rollout_version
            yield "validation wanted", Trained(worker="v", run_id=state.run_id, version=version, evaluate=True)
    if state.validation is not None:
        yield "validation ended", ValidationEnded()


def _group(state: ModelState) -> str:
    if state.validation is not None:
        return "validating"
    if state.overdue:
        return f"overdue_{state.phase}"
    return "retry" if state.phase == "need_sync" and state.num_failed else state.phase


def _said(actions: tuple[Action, ...]) -> str:
    if any(isinstance(action, EvictFailed) for action in actions):
        return ", evicts"
    return ", gives up" if any(isinstance(action, GiveUp) for action in actions) else ""


def _color(name: str, facts: set[tuple[str, bool, bool, bool]]) -> str:
    if name.startswith("overdue"):
        return "late"
    if any(waits for _, waits, _, _ in facts):
        return "waits"
    return "locked" if any(locked for _, _, locked, _ in facts) else "free"


def mermaid(drawing: Drawing) -> str:
    """The picture, without what a new run does: that would be an arrow from everywhere."""
    order = [name for name in _WORDS if name in drawing.nodes]
    lines = ["stateDiagram-v2", f"    [*] --> {order[0]}"]
    lines += [f"    {name}: {_WORDS[name]}" for name in order]
    for here in order:
        for there in order:
            events = sorted(drawing.edges.get((here, there), set()) - {_NEW_RUN})
            if events:
                lines.append(f"    {here} --> {there}: {' or '.join(events)}")
    lines += [f"    classDef {name} {style}" for name, style in _COLORS.items()]
    lines += [f"    class {name} {_color(name, drawing.nodes[name])}" for name in order]
    return "\n".join(lines)


def _of_new_run(drawing: Drawing) -> str:
    order = [name for name in _WORDS if name in drawing.nodes]
    ends: dict[str, list[str]] = {}
    for here in order:
        for there in order:
            if _NEW_RUN in drawing.edges.get((here, there), ()):
                ends.setdefault(there, []).append(here)
    told = [
        f"to *{_WORDS[there]}* from {', '.join(f'*{_WORDS[here]}*' for here in froms)}" for there, froms in ends.items()
    ]
    return f"Not drawn: a trainer's new run, and the end of a sync of the run before, lead {'; '.join(told)}."


def _table(drawing: Drawing) -> str:
    lines = ["| state | `state` of `/status` | rollout | pool | dataloader |", "| --- | --- | --- | --- | --- |"]
    for name in (name for name in _WORDS if name in drawing.nodes):
        facts = drawing.nodes[name]
        phases = ", ".join(f"`{phase}`" for phase in sorted({phase for phase, *_ in facts}))
        waits = _either({waits for _, waits, _, _ in facts}, "waits", "goes on")
        pool = _either({locked for _, _, locked, _ in facts}, "locked", "free")
        loader = _either({locked for *_, locked in facts}, "locked", "free")
        lines.append(f"| {_WORDS[name]} | {phases} | {waits} | {pool} | {loader} |")
    return "\n".join(lines)


def _either(values: set[bool], yes: str, no: str) -> str:
    return f"{yes} or {no}" if len(values) == 2 else yes if True in values else no


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, drawing in (
        ("`sync` and `batch-async`", explore("sync", "batch-async")),
        ("`fully-async`", explore("fully-async")),
    ):
        picture = f"```mermaid\n{mermaid(drawing)}\n```"
        parts.append(f"## {title}\n\n{picture}\n\n{_table(drawing)}\n\n{_of_new_run(drawing)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
