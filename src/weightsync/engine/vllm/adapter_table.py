"""AdapterTable: which adapters a server of vLLM or SGLang has, which one answers for which model, and who still uses an
old one. Pure: no I/O, one event loop.

    staged --commit--> current --another one's commit--> retired --last request ended--> gone
       └----- drop, its deadline, or another staged one of its model -----^
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from weightsync.errors import NoSlotError, StateError, TransferAbortedError
from weightsync.handles.lora_messages import LoadAdapter, LoadedAdapter, internal_name
from weightsync.memory import PrivateFolder
from weightsync.types import Deadline, Version


@dataclasses.dataclass(kw_only=True, eq=False)
class Held:
    """One adapter.

    Attributes:
        load: how it came.
        folder: what it was loaded from; this process's, until it goes.
        until: a staged one goes then.
        lora_id: vLLM's number for it, once it is loaded.
        unprovable: see `LoadedAdapter`.
        state: see `LoadedAdapter`.
        in_flight: requests that it is answering.
        loading: whether vLLM has not loaded it yet.
        leaving: whether it is being unloaded.
    """

    load: LoadAdapter
    folder: PrivateFolder
    until: Deadline
    lora_id: int | None = None
    unprovable: str | None = None
    state: Literal["staged", "current", "retired"] = "staged"
    in_flight: int = 0
    loading: bool = False
    leaving: bool = False

    @property
    def name(self) -> str:
        """vLLM's."""
        return internal_name(self.load.model_id, self.load.session)

    @property
    def version(self) -> Version:
        """Of the publication."""
        return self.load.version

    @property
    def is_over(self) -> bool:
        """Whether nobody needs it any more."""
        return self.state == "retired" and not self.in_flight


class AdapterTable:
    """See the module.

    Args:
        advice: how the engine is started with more slots.
    """

    def __init__(self, advice: str = "Start vLLM with a greater --max-loras") -> None:
        self._advice = advice
        self._by_name: dict[str, Held] = {}
        self._current: dict[str, Held] = {}

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._by_name.values()))

    def told(self) -> tuple[LoadedAdapter, ...]:
        """All of them, in the order in which they came."""
        return tuple(
            LoadedAdapter(
                name=each.name, session=each.load.session, model_id=each.load.model_id, version=each.version,
                model_digest=each.load.model_digest, lora_id=each.lora_id, state=each.state, in_flight=each.in_flight,
                unprovable=each.unprovable,
            )
            for each in self._by_name.values()
        )  # fmt: skip

    def current(self, model_id: str) -> Held | None:
        """The one that answers for a model."""
        return self._current.get(model_id)

    def named(self, name: str) -> Held | None:
        """The one of vLLM's name."""
        return self._by_name.get(name)

    def of_session(self, session: str) -> Held | None:
        """The one that a session brought."""
        return next((each for each in self._by_name.values() if each.load.session == session), None)

    def add(self, held: Held, *, max_loras: int, others: int) -> None:
        """Takes a new one in, staged.

        Raises:
            StateError: its session has one already.
            NoSlotError: there is no slot left.
        """
        if held.name in self._by_name:
            raise StateError(f"session {held.load.session} has loaded its adapter already")
        taken = len(self._by_name) + others
        if taken >= max_loras:
            raise self.full(held.load.model_id, str(held.version), max_loras=max_loras, others=others)
        self._by_name[held.name] = held

    def full(self, model_id: str, version: str, *, max_loras: int, others: int) -> NoSlotError:
        """What a load without a slot is answered."""
        who = "; ".join(f"{each.name} ({each.state}, {each.in_flight} requests)" for each in self._by_name.values())
        return NoSlotError(
            f"all {max_loras} slots are taken: {who or 'none of ours'}{f', and {others} of others' if others else ''}. "
            f"{self._advice}: for each adapter the versions that may be under way at once "
            "(staleness + 1), and one that is being loaded; or wait until old requests have ended",
            version=version,
            state_left=f"{model_id} is served as before",
            max_loras=max_loras,
        )

    def commit(self, session: str) -> Held:
        """Makes a staged one its model's current one, and the former one retired. Again: nothing.

        Raises:
            TransferAbortedError: there is none of that session: it was dropped, or its time ran out.
            StateError: vLLM is loading it still.
        """
        held = self.of_session(session)
        if held is None or held.leaving or held.state == "retired":
            raise TransferAbortedError(f"session {session} has no adapter here: it was dropped, or its time ran out")
        if held.loading:
            raise StateError(f"session {session} commits, and vLLM is loading its adapter still", state_left="staged")
        former = self._current.get(held.load.model_id)
        if former is not None and former is not held:
            former.state = "retired"
        held.state = "current"
        self._current[held.load.model_id] = held
        return held

    def drop(self, session: str) -> Held | None:
        """Retires a staged one; None where there is none of that session, or it has committed."""
        held = self.of_session(session)
        if held is None or held.state != "staged":
            return None
        held.state = "retired"
        return held

    def begin(self, model: str) -> Held | None:
        """A request for a model's name, or for vLLM's own name of an adapter, begins; None: it is for neither."""
        held = self._current.get(model) or self._by_name.get(model)
        if held is None or held.leaving:
            return None
        held.in_flight += 1
        return held

    def end(self, held: Held) -> None:
        """That request has ended."""
        held.in_flight -= 1

    def expire(self) -> None:
        """Retires staged ones whose time has run out."""
        for each in self._by_name.values():
            if each.state == "staged" and each.until.expired:
                each.state = "retired"

    def over(self) -> list[Held]:
        """Those that are to go now; each is told once."""
        found = [each for each in self._by_name.values() if each.is_over and not each.leaving]
        for each in found:
            each.leaving = True
        return found

    def remove(self, held: Held) -> None:
        """It is gone."""
        if self._by_name.get(held.name) is held:  # and not another one that its session brought
            del self._by_name[held.name]
