"""Admission: whether an instance may come in or stay, by what it serves and what its fleet is to serve; in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weightsync.control.goals import FleetGoals
from weightsync.control.instance import Instance
from weightsync.control.learning import Learning
from weightsync.types.fleet import ModelVersion


class Admission:
    """Not thread-safe: its pool's lock.

    Args:
        goals: what the fleet is to serve.
        learning: until when this controller listens alone.
        syncs: what each sync that runs brings; empty: nobody knows.
    """

    def __init__(self, goals: FleetGoals, learning: Learning, syncs: Sequence[Mapping[str, ModelVersion]]) -> None:
        self._goals = goals
        self._learning = learning
        self._syncs = syncs
        self._left_out: dict[str, frozenset[str]] = {}  # by model: whom its next sync goes on without

    def leave_out(self, model_id: str, instance_ids: Iterable[str]) -> bool:
        """These do not come in until this is called again for that model; whether there were others before."""
        before, now = self._left_out.pop(model_id, None), frozenset(instance_ids)
        if now:
            self._left_out[model_id] = now
        return before is not None

    def held_up(self, known: Instance, now: float) -> str | None:
        """Why it may not come in; None: it serves what is current, and no sync is on its way to something else."""
        served = known.serves()
        if (behind := self.behind(known)) is not None:
            return behind
        if known.beat.gone and not any(served.values()):  # though nobody has decided for anything yet
            return "it serves nothing"
        if (ahead := self.ahead(known)) is not None:
            return f"{ahead}, which is older: it comes in when the fleet has come so far, by a sync"
        if any(known.beat.instance_id in names for names in self._left_out.values()):
            return "the next sync goes on without it"
        if now < self._learning.until_s:
            return "the controller has just started, and waits to hear what its instances serve"
        if self._goals.apart(served):
            return "it serves other numbers of models that belong together"
        for goals in self._syncs:
            mine = [each for tag, each in goals.items() if tag in served]
            if not goals or any(self._goals.current.get(each.model_id) != each for each in mine):
                return "it waits until a sync has ended"
        return None

    def why(self, known: Instance, now: float, late_s: float) -> str | None:
        """Why it takes no part, or is about to; one that was not heard for `late_s` is silent."""
        silent_s = now - known.heard_s
        held = self.held_up(known, now) if known.state == "joining" else None
        silent = f"not heard for {silent_s:.1f} s" if silent_s > late_s else None
        left = f"it was left out: {known.why}" if held and known.why else known.why
        return "; ".join(filter(None, (silent, held, left))) or None

    def behind(self, known: Instance) -> str | None:
        """Why it may not answer with what it serves; None: it may."""
        exact = True
        for tag, served in known.serves().items():
            current = self._goals.current.get(tag)
            exact = exact and current is not None and served == current.of
            if current is not None and (served is None or served != current.of):
                newer = served is not None and served.run_id == current.run_id and served.number > current.version
                if not newer:
                    return f"{served or 'nothing'} of {tag}, and the fleet is to serve {current.of}"
        return None if known.beat.whole or exact else "part of a set"

    def ahead(self, known: Instance) -> str | None:
        """What it serves that nobody has decided for; None: nothing."""
        for tag, served in known.serves().items():
            current = self._goals.current.get(tag)
            if served is None or current is None or served.run_id != current.run_id:
                continue
            if served.number > current.version:
                return f"{served} of {tag}, and the fleet is to serve {current.of}"
        return None
