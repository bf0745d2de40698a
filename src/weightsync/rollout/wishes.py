"""Wishes: what a service was told to serve, and what of that it believes.

Nobody's word alone counts for longer than `patience_s`. Another run, or another agent, is asked whether it has what it
is said to have before anything is pulled from it; a version that does not come gives way to what there is; and what was
announced once more under a name that is served already is compared with what its agent says. Whoever waits for a
version is told as soon as its agent says that there is none.

One set of rules under one lock. Threads are in `asker`, what is known of one agent in `sender`, what agents deny in
`denials`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from weightsync.errors import NotPublishedError, StateError, TransferAbortedError, VersionError
from weightsync.rollout.adoption import ANOTHER_LIFE, Adoption, Verdict, published_anew
from weightsync.rollout.asker import Asker
from weightsync.rollout.denials import Denials, judge_promises, judge_served
from weightsync.rollout.sender import OtherRun, Sender, Ticket, Wish
from weightsync.types import Deadline, Version
from weightsync.types.publication import AgentVersion

_MAX_RUNS_OVER = 1000
_MAX_RUNS_WAITING = 8
"""Of one agent; another agent's runs never give way to them."""
_MAX_LOOKED_AT = 8
_LONGEST_RETRY_S = 1.0

_logger = logging.getLogger(__name__)


class Wishes:
    """The wishes for one model. Thread-safe, under its owner's lock.

    Args:
        model_id: which model.
        changed: the owner's lock.
        ask: what an agent says of itself, by endpoint; may raise anything.
        served: what each engine serves; None: nothing, or it does not say.
        answering: the same of those that are there.
        taken_over: called under the lock when another run took over.
        told: called without the lock after every change that did not come by `add`.
        settle: called under the lock with the life of what was taken over, see `EngineGroup.settle`.
        patience_s: after so long a version that does not come gives way to what is there.
        timeout_s: how long an agent may take to have a run that is announced beside the one that is followed.
        poll_s: how often agents are asked what they have, though nothing is announced; None: until each has told a
            version once.
    """

    def __init__(
        self,
        model_id: str,
        changed: threading.Condition,
        *,
        ask: Callable[[str], AgentVersion],
        served: Callable[[], Mapping[str, Version | None]],
        answering: Callable[[], Mapping[str, Version | None]],
        taken_over: Callable[[], None],
        told: Callable[[], None],
        settle: Callable[[str | None], None],
        patience_s: float,
        timeout_s: float,
        poll_s: float | None = None,
    ) -> None:
        self._model_id = model_id
        self._changed = changed
        self._ask = ask
        self._served = served
        self._answering = answering
        self._taken_over = taken_over
        self._told = told
        self._settle = settle
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._asker = Asker(self._turn, name=f"weightsync-ask-agent-{model_id}")
        self._senders: dict[str, Sender] = {}
        self._run_id: str | None = None
        self._current: str | None = None
        self._pulled = -1
        self._life: str | None = None
        self._adoption: Adoption | None = None
        self.is_anew = False
        """The followed run is published anew under numbers that are served, by another life of its trainer."""
        self._runs_over: dict[str, str] = {}
        self._denials = Denials()
        self._closed = False
        self.count = 0

    # --- what it is told ---

    def know(self, endpoint: str) -> None:
        """That agent may be called."""
        with self._changed:
            self._senders.setdefault(endpoint, Sender())

    def look_at(self, endpoint: str) -> None:
        """That agent is asked what it has: where nothing was announced yet, that is the wish.

        Raises:
            StateError: no thread can be started for it.
        """
        with self._changed:
            self._senders.setdefault(endpoint, Sender()).look = True
            self._asker.soon(endpoint)

    def add(self, wish: Wish, *, waits: bool = True, grace_s: float | None = None) -> Ticket:
        """Notes a wish.

        Args:
            wish: what is said to be there.
            waits: whether somebody looks at the ticket later.
            grace_s: from so many seconds on the ticket is refused when its agent says that it has no such version;
                None: it is not refused for that.

        Raises:
            StateError: the service is closing, or no thread can be started.
            TransferAbortedError: another run took over from that one.
        """
        with self._changed:
            self._check_run(wish.version)
            self.count += 1
            ticket = Ticket(number=self.count, wish=wish, until=Deadline(self._timeout_s))
            number, run_id = wish.version.number, wish.version.run_id
            sender = self._senders.setdefault(wish.endpoint, Sender())
            if self._run_id is None:
                self._follow(run_id, wish.endpoint)
            if run_id == self._run_id and number <= self._pulled:
                ticket.checked = False
                if waits or not sender.unchecked:
                    sender.unchecked.append(ticket)
                self._ask_now(wish.endpoint)
            elif run_id == self._run_id and (sender.verified or wish.endpoint == self._current):
                self._announce(wish.endpoint, number)
            else:
                self._wait_for_run(sender, ticket, waits=waits)
                self._ask_now(wish.endpoint)
            if grace_s is not None and ticket.checked:
                self._denials.watch(ticket, grace_s=grace_s)
                sender.hurry()
                self._soon(wish.endpoint, self._denials.next_look_s(wish.endpoint, self._run_id, self._pulled) or 0.0)
            return ticket

    def ask_about(self, wish: Wish, *, grace_s: float) -> Ticket:
        """Its agent is asked whether it has it; nothing is pulled for that. See `check`, and `Ticket.there`.

        Raises:
            StateError: no thread can be started for it.
        """
        with self._changed:
            ticket = Ticket(number=self.count, wish=wish, until=Deadline(self._timeout_s))
            sender = self._senders.setdefault(wish.endpoint, Sender())
            self._denials.watch(ticket, grace_s=grace_s)
            sender.look = True
            self._ask_now(wish.endpoint)
            return ticket

    def pulled(self, endpoint: str, version: Version, life: str | None) -> None:
        """A version has come from an agent, proved."""
        with self._changed:
            if version.run_id != self._run_id:
                return
            self._pulled, self._life, self._adoption = version.number, life, None
            sender = self._senders.setdefault(endpoint, Sender())
            sender.verified, sender.broken, sender.has = True, False, version.number
            if sender.doubted is not None and sender.doubted <= version.number:
                sender.doubted = None
            for each in self._senders.values():
                each.numbers = {number: until for number, until in each.numbers.items() if number > version.number}

    def loaded(self) -> None:
        """Every engine serves what was pulled last."""
        self.is_anew = False

    def adopted(self, adoption: Adoption, endpoint: str | None = None) -> None:
        """Engines serve it already; where nothing is followed yet, that run is, from this agent, or the first to name
        it. Agents are asked whether it is theirs."""
        with self._changed:
            if self._run_id is None:
                self._adoption = adoption
                if endpoint is not None:
                    self._senders.setdefault(endpoint, Sender())
                    self._follow(adoption.version.run_id, endpoint)

    def struggles(self, endpoint: str) -> None:
        """A pull from an agent does not get on: once patience ends, it is asked what it has."""
        with self._changed:
            sender = self._senders.setdefault(endpoint, Sender())
            if not sender.look:
                sender.look = True
                self._soon(endpoint, self._patience_s)

    def failed(self, endpoint: str) -> None:
        """A pull from an agent has failed: others that have something come first, until one from it succeeds."""
        with self._changed:
            self._senders[endpoint].broken = True
            self._look_at_others(endpoint)

    def close(self) -> None:
        """No wish is taken any more."""
        with self._changed:
            self._closed = True
        self._asker.close()

    # --- what it says ---

    def check(self, ticket: Ticket) -> None:
        """Whether a wish may still come true.

        Raises:
            StateError: the service is closing.
            TransferAbortedError: another run took over from that one.
            NotPublishedError: its sender says that it has it not.
            VersionError: its sender never had that run, or publishes it anew.
        """
        with self._changed:
            self._check_run(ticket.wish.version)
            if ticket.absent:
                raise NotPublishedError(ticket.refused or "", version=str(ticket.wish.version), newest=ticket.newest)
            if ticket.refused is not None:
                raise VersionError(ticket.refused, version=str(ticket.wish.version))

    def follows(self, version: Version) -> bool:
        """Whether that version's run is the one that is followed."""
        with self._changed:
            return self._run_id == version.run_id

    @property
    def wanted(self) -> Wish | None:
        """The newest version that was announced, whether it is there or not, and who is pulled from."""
        with self._changed:
            if self._run_id is None or self._current is None:
                return None
            numbers = [self._pulled]
            for sender in self._senders.values():
                numbers += [*sender.numbers, *([] if sender.doubted is None else [sender.doubted])]
            return Wish(version=Version(run_id=self._run_id, number=max(0, *numbers)), endpoint=self._current)

    @property
    def sender_errors(self) -> dict[str, str]:
        """Why agents could not be asked, by endpoint; without those that could."""
        with self._changed:
            found = self._senders.items()
            return {endpoint: sender.error for endpoint, sender in found if sender.error is not None}

    @property
    def doubts(self) -> str | None:
        """What was announced and is not there, or is there with other bytes; None where all is well."""
        with self._changed:
            if self.is_anew and self._run_id is not None:
                return published_anew(Version(run_id=self._run_id, number=self._pulled), self._pulled)
            for endpoint, sender in self._senders.items():
                if sender.doubted is not None:
                    return f"{self._run_id}/{sender.doubted} was announced, and {endpoint} has it not: {sender.why}"
            return None

    def target(self) -> Wish | None:
        """The lowest version that a pull has to bring by now, and from whom; None where nothing is to be pulled."""
        with self._changed:
            if self._run_id is None:
                return None
            everywhere = min(_numbers(self._served().values(), self._run_id), default=-1)
            # what those need that are there; and where they need nothing, what the others would
            found = self._offers(self._low()) or self._offers(everywhere)
            if not found:
                return None
            _, _, least, _, self._current = min(found)
            return Wish(version=Version(run_id=self._run_id, number=least), endpoint=self._current)

    def still(self, wish: Wish) -> Version:
        """What a pull for a wish has to bring by now.

        Raises:
            TransferAbortedError: another run or another sender took its place, or it gave way; or the service closes.
        """
        with self._changed:
            now = self.target()
            if self._closed or now is None or now.endpoint != wish.endpoint or not self.follows(wish.version):
                raise TransferAbortedError("what was announced gave way to something else, or the service is closing")
            return now.version

    # --- what is asked ---

    def _turn(self, endpoint: str) -> float | None:
        with self._changed:
            sender, began, asked_s = self._senders[endpoint], self.count, time.monotonic()
            pause_s = self._pause_s(endpoint, sender)
            if pause_s is None or pause_s > 0:
                return pause_s
            sender.look, sender.again = False, None
        said: AgentVersion | None
        newest: Version | None = None
        try:
            said = self._ask(endpoint)
            if said.run_id is not None and said.version is not None:
                newest = Version(run_id=said.run_id, number=said.version)
            why, error_text = f"it has {newest or 'nothing yet'}", None
        except Exception as error:  # whatever it is: this thread asks for others who wait, too
            said, why = None, f"{type(error).__name__}: {error}"
            error_text = why
        with self._changed:
            if self._closed:
                return None
            if error_text is not None and sender.error is None:
                _logger.warning("model %s: %s does not say what it has: %s", self._model_id, endpoint, error_text)
            sender.why, sender.error = why, error_text
            sender.known = sender.known or newest is not None
            sender.ask_again(self._poll_s)
            had = self._run_id if sender.verified else None
            self._heard(endpoint, sender, said, newest, began)
            for ticket in self._denials.judge(endpoint, said, asked_s=asked_s, had=had):
                self._absent(sender, ticket)
            pause_s = self._pause_s(endpoint, sender)
            if pause_s == 0:
                pause_s, sender.retry_s = sender.retry_s, min(2 * sender.retry_s, _LONGEST_RETRY_S)
        self._told()
        return pause_s

    def _pause_s(self, endpoint: str, sender: Sender) -> float | None:
        """When it is to be asked; 0: now."""
        if sender.look or sender.runs or sender.unchecked:
            return 0.0
        low = self._low()
        claims_s = self._denials.next_look_s(endpoint, self._run_id, max(low, self._pulled))
        if claims_s == 0:
            return 0.0
        waits = [] if claims_s is None else [claims_s]
        waits += [until.remaining_s for number, until in sender.numbers.items() if until is not None and number > low]
        if sender.doubted is not None:
            waits.append(sender.poll.remaining_s)
        if sender.again is not None:
            waits.append(sender.again.remaining_s)
        return min(waits, default=None)

    def _heard(
        self, endpoint: str, sender: Sender, said: AgentVersion | None, newest: Version | None, began: int
    ) -> None:
        """What an agent said, None where it did not, and its newest version, None before its first."""
        if newest is not None:
            if self._run_id is None and newest.run_id not in self._runs_over:
                self._follow(newest.run_id, endpoint)
                self.count += 1
                _logger.info("model %s: %s has %s", self._model_id, endpoint, newest)
                sender.announce(newest.number, None)
            polled = self._poll_s is not None and endpoint == self._current
            if polled and newest.run_id not in (self._run_id, *sender.runs, *self._runs_over):
                wish = Wish(version=newest, endpoint=endpoint)
                sender.runs[newest.run_id] = OtherRun(wish=wish, until=Deadline(self._timeout_s), tickets=[])
            if newest.run_id in sender.runs:
                self._accept(endpoint, sender, newest)
            if newest.run_id == self._run_id:
                sender.verified, sender.has = True, newest.number
                if newest.number > self._low():
                    sender.announce(newest.number, None)
        for run_id, other in tuple(sender.runs.items()):
            if run_id in self._runs_over or other.until.expired:
                del sender.runs[run_id]
                self._refuse(other, f"{endpoint} did not have it within {other.until.timeout_s:g} s: {sender.why}")
        if self._adoption is not None and said is not None:
            self._judge(self._adoption, said)
        ours = newest is not None and newest.run_id == self._run_id
        self.is_anew = self.is_anew and not (ours and said is not None and said.life == self._life)
        unsure = self._adoption is not None and not self._adoption.sure and self._life is None
        for ticket in judge_served(sender, None if unsure else said, began=began, life=self._life, pulled=self._pulled):
            _logger.warning("model %s: %s", self._model_id, ticket.refused)
            self.is_anew = self.is_anew or ours
        self._check_promises(endpoint, sender, answers=said is not None)

    def _accept(self, endpoint: str, sender: Sender, newest: Version) -> None:
        """It has a run that it was said to have: whoever was followed before is not any more."""
        other, before = sender.runs.pop(newest.run_id), self._run_id
        if newest.run_id in self._runs_over:
            return
        self.count += 1
        if before != newest.run_id:
            if before is not None:
                self._runs_over[before] = newest.run_id
                while len(self._runs_over) > _MAX_RUNS_OVER:
                    del self._runs_over[next(iter(self._runs_over))]
            for each in self._senders.values():
                each.begin_anew()
            self._run_id, self._current, self._pulled, self._life = newest.run_id, endpoint, -1, None
            self._adoption, self.is_anew = None, False
            _logger.info("model %s: run %s takes over from %s", self._model_id, newest.run_id, before)
            self._taken_over()
        sender.verified = True
        self._announce(endpoint, other.wish.version.number)

    def _absent(self, sender: Sender, ticket: Ticket) -> None:
        """Its agent denies it: it is not pulled, unless somebody else was told of it."""
        version = ticket.wish.version
        if version.run_id == self._run_id:
            sender.numbers.pop(version.number, None)
        else:
            sender.runs.pop(version.run_id, None)
        _logger.warning("model %s: %s was announced and is given up: %s", self._model_id, version, ticket.refused)

    def _check_promises(self, endpoint: str, sender: Sender, *, answers: bool) -> None:
        """Who did not keep a promise, or is silent while an engine needs something, gives way to others."""
        broken = judge_promises(sender, answers=answers, patience_s=self._patience_s)
        if broken or (not answers and self._low() < self._pulled):
            sender.broken = True
            self._look_at_others(endpoint)

    def _look_at_others(self, endpoint: str) -> None:
        others = [(not each.verified, each.looked, name) for name, each in self._senders.items() if name != endpoint]
        for _, _, name in sorted(others)[:_MAX_LOOKED_AT]:
            sender = self._senders[name]
            if not sender.look:
                sender.look, sender.looked = True, sender.looked + 1
                self._soon(name)

    def is_sure_of(self, version: Version) -> bool:
        """Whether what is served under that name may be a success: nobody vouches for what was taken over before an
        agent, or a controller, has said so."""
        with self._changed:
            known = self._adoption
            return known is None or known.sure or known.version.run_id != version.run_id

    # --- helpers, under the lock ---

    def _follow(self, run_id: str, endpoint: str) -> None:
        self._run_id, self._current = run_id, endpoint
        if self._adoption is not None and self._adoption.version.run_id == run_id:
            self._pulled = self._adoption.version.number

    def _judge(self, adoption: Adoption, said: AgentVersion) -> None:
        verdict = adoption.judge(said)
        if verdict is Verdict.ANEW:
            if not self.is_anew:
                _logger.warning("model %s: the run of %s is published anew", self._model_id, adoption.version)
            self._life, self.is_anew = ANOTHER_LIFE, True
        elif verdict is Verdict.OURS:
            self._life, self._adoption = said.life, None
            self._settle(said.life)
        elif verdict is Verdict.UNPROVED and not adoption.sure:
            self._pulled, self._life, self._adoption = -1, None, None
            self._settle(None)

    def _check_run(self, version: Version) -> None:
        if self._closed:
            raise StateError("this service is closing", version=str(version))
        if (by := self._runs_over.get(version.run_id)) is not None:
            raise TransferAbortedError(f"run {version.run_id} was taken over by {by}", version=str(version))

    def _low(self) -> int:
        """What every engine that is there serves of the followed run, or more."""
        return min(_numbers(self._answering().values(), self._run_id), default=-1)

    def _offers(self, low: int) -> list[tuple[bool, bool, int, bool, str]]:
        """What each agent could bring to engines that serve `low`, the best first."""
        return [
            (not sender.verified, sender.broken, least, endpoint != self._current, endpoint)
            for endpoint, sender in self._senders.items()
            if (sender.verified or endpoint == self._current) and (least := sender.least(low, self._pulled)) is not None
        ]

    def _announce(self, endpoint: str, number: int) -> None:
        sender = self._senders[endpoint]
        sender.announce(number, Deadline(self._patience_s))
        self._soon(endpoint, self._patience_s)

    def _soon(self, endpoint: str, in_s: float = 0.0) -> None:
        """As `Asker.soon`, where nobody is there to be told that it can't be done now."""
        try:
            self._asker.soon(endpoint, in_s)
        except StateError as error:
            _logger.warning("model %s: %s", self._model_id, error)

    def _ask_now(self, endpoint: str) -> None:
        self._senders[endpoint].hurry()
        self._asker.soon(endpoint)

    def _wait_for_run(self, sender: Sender, ticket: Ticket, *, waits: bool) -> None:
        wish = ticket.wish
        known = sender.runs.pop(wish.version.run_id, None) or OtherRun(wish=wish, until=ticket.until, tickets=[])
        if wish.version.is_newer_than(known.wish.version):
            known.wish = wish
        if waits:
            known.tickets.append(ticket)
        sender.runs[wish.version.run_id] = known
        while len(sender.runs) > _MAX_RUNS_WAITING:
            dropped = sender.runs.pop(next(iter(sender.runs)))
            self._refuse(dropped, f"{_MAX_RUNS_WAITING} other runs were announced at {wish.endpoint} after it")

    def _refuse(self, other: OtherRun, why: str) -> None:
        _logger.warning("model %s: %s was not taken up: %s", self._model_id, other.wish.version, why)
        for ticket in other.tickets:
            ticket.refused = f"run {ticket.wish.version.run_id} was not taken up: {why}"


def _numbers(served: Iterable[Version | None], run_id: str | None) -> list[int]:
    return [each.number if each is not None and each.run_id == run_id else -1 for each in served]
