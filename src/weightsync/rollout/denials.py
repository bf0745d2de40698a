"""Denials: versions that somebody waits for and whose agent says that it has them not.

An announcement is a claim, and the agent is who knows. What it is about to prove counts as there; before its first
version it denies nothing, as it may have been started again. A claim is given `grace_s`, since the trainer may tell of
a version before its agent has read the order. A number that was denied once is denied at once when it comes again.
"""

from __future__ import annotations

import dataclasses
import time

from weightsync.rollout.adoption import published_anew
from weightsync.rollout.sender import POLL_S, Sender, Ticket
from weightsync.types import Deadline, Version
from weightsync.types.publication import AgentVersion

_MAX_TICKETS = 256
_MAX_AGENTS = 1000
_LONGEST_POLL_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Claim:
    ticket: Ticket
    grace_s: float


class Denials:
    """Of one model. Not thread-safe: its owner's lock."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._denied_from: dict[str, Version] = {}  # by agent: the lowest number that it has denied, and not passed

    def watch(self, ticket: Ticket, *, grace_s: float) -> None:
        """From now on its agent is asked about it, until it has it, or denies it, or the ticket's time is over."""
        self._claims.append(_Claim(ticket=ticket, grace_s=grace_s))
        del self._claims[:-_MAX_TICKETS]

    def next_look_s(self, endpoint: str, run_id: str | None, number: int) -> float | None:
        """Seconds until this agent's word about them matters; None: nobody waits for it.

        Args:
            endpoint: which agent.
            run_id, number: what was brought, or is served, up to here: nobody asks about that.
        """

        def there(version: Version) -> bool:
            return version.run_id == run_id and version.number <= number

        for each in self._claims:
            each.ticket.there = each.ticket.there or there(each.ticket.wish.version)
        self._claims = [each for each in self._claims if not (each.ticket.until.expired or each.ticket.there)]
        now = time.monotonic()
        return min(
            (
                max(0.0, each.ticket.began_s + each.grace_s - now) if not self._known(endpoint, each.ticket) else 0.0
                for each in self._claims
                if each.ticket.wish.endpoint == endpoint
            ),
            default=None,
        )

    def judge(self, endpoint: str, said: AgentVersion | None, *, asked_s: float, had: str | None) -> list[Ticket]:
        """Those that are denied by what an agent has said; they are refused and watched no longer.

        Args:
            endpoint: which agent.
            said: what it said, None where it did not.
            asked_s: when it was asked, by the monotonic clock.
            had: the run that it was known to have: where it names another one now, that one is over at once.
        """
        if said is None or said.run_id is None or said.version is None:
            return []
        mark = self._denied_from.get(endpoint)
        if mark is not None and (mark.run_id != said.run_id or _newest(said, mark.run_id) >= mark.number):
            del self._denied_from[endpoint]
        denied = []
        for each in tuple(self._claims):
            ticket, version = each.ticket, each.ticket.wish.version
            if ticket.wish.endpoint != endpoint:
                continue
            newest = _newest(said, version.run_id)
            if newest >= version.number:
                ticket.there = said.run_id == version.run_id and said.version >= version.number
                if ticket.there:
                    self._claims.remove(each)
                continue
            over = newest < 0 and had == version.run_id
            if asked_s < ticket.began_s + each.grace_s and not over and not self._known(endpoint, ticket):
                continue
            self._claims.remove(each)
            ticket.absent, ticket.newest = True, newest if newest >= 0 else None
            ticket.refused = f"{endpoint} did not have it: it has {said.run_id}/{said.version}"
            if newest >= 0:
                self._deny(endpoint, version)
            denied.append(ticket)
        return denied

    def _known(self, endpoint: str, ticket: Ticket) -> bool:
        """Whether it is denied already."""
        mark, version = self._denied_from.get(endpoint), ticket.wish.version
        return mark is not None and mark.run_id == version.run_id and version.number >= mark.number

    def _deny(self, endpoint: str, version: Version) -> None:
        mark = self._denied_from.get(endpoint)
        if mark is None or mark.run_id != version.run_id or mark.number > version.number:
            self._denied_from[endpoint] = version
            while len(self._denied_from) > _MAX_AGENTS:
                del self._denied_from[next(iter(self._denied_from))]


def judge_served(
    sender: Sender, said: AgentVersion | None, *, began: int, life: str | None, pulled: int
) -> list[Ticket]:
    """Versions that seem to be served may be those of an earlier life of the same run: those that are refused for it.

    Args:
        sender: whose unchecked tickets these are; what is judged is not there any more.
        said: what it said, None where it did not.
        began: number of the last ticket when it was asked.
        life, pulled: of the trainer, and the number, that was pulled last.
    """
    refused = []
    for ticket in tuple(sender.unchecked):
        version = ticket.wish.version
        if said is not None and ticket.number <= began:
            other_life = said.life not in (None, life) and life is not None
            if other_life and said.run_id in (None, version.run_id):
                ticket.refused = published_anew(version, pulled)
                refused.append(ticket)
            else:
                ticket.checked = True
        elif ticket.until.expired:
            ticket.refused = f"{ticket.wish.endpoint} does not say whether what is served is its own: {sender.why}"
        if ticket.checked or ticket.refused is not None:
            sender.unchecked.remove(ticket)
    return refused


def judge_promises(sender: Sender, *, answers: bool, patience_s: float) -> bool:
    """Patience with some versions has ended: those that it has not give way, and are asked for by and by, until they
    are given up. Whether there are such.

    Args:
        sender: whose promises.
        answers: whether it has said what it has; one that is silent has more time.
        patience_s: how much.
    """
    late = [number for number, until in sender.numbers.items() if until is not None and until.expired]
    has = -1 if sender.has is None else sender.has
    for number in late:
        if number <= has:
            sender.numbers[number] = None
        elif answers:
            del sender.numbers[number]
            sender.doubted = max(number, sender.doubted or 0)
            sender.poll = Deadline(POLL_S)
        else:
            sender.numbers[number] = Deadline(patience_s)
    if sender.doubted is not None and has >= sender.doubted:
        sender.doubted = None
    if sender.doubted is not None and sender.poll.expired:
        if sender.poll.timeout_s >= _LONGEST_POLL_S:
            sender.doubted = None
        sender.poll = Deadline(min(2 * sender.poll.timeout_s, _LONGEST_POLL_S))
    return any(number > has for number in late)


def _newest(said: AgentVersion, run_id: str) -> int:
    """What it has of that run, or is about to have; -1: nothing."""
    has = said.version if said.run_id == run_id and said.version is not None else -1
    return max(has, said.coming if said.coming_run_id == run_id and said.coming is not None else -1)
