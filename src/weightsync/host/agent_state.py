"""AgentState: what one agent has said, what is claimed of it, and when it is asked next. No clock of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping

from weightsync.errors import NotPublishedError, TransferAbortedError, WeightSyncError
from weightsync.types import Version

WAIT_S = 30.0
"""So long a request waits at an agent, where nobody waits for its answer."""
SHORTEST_S = 0.02
"""From one request to the next, whatever an agent answers."""
OVERDUE_S = 1.0
"""So long a request waits, where somebody waits for what should be there."""
TURNS = 3
"""An agent names a new run when its trainer was started again. More often than so many times in a row, several trainers
answer at one address."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_MAX_CLAIMS = 256
"""Of one agent; another agent's never give way to them."""
_DOUBT_S = 120.0
_GONE = "the trainer's agent is gone, or cut off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A version to pull, and the agent that has said that it has it."""

    version: Version
    endpoint: str

    def gave_way(self, now: Target) -> bool:
        """Whether another run, or another agent, took its place."""
        return (now.endpoint, now.version.run_id) != (self.endpoint, self.version.run_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to an agent.

    Attributes:
        at_s: not before.
        after: the version that is known.
        wait_s: so long it may wait there for another one; 0: it is answered at once.
    """

    at_s: float
    after: Version | None
    wait_s: float


@dataclasses.dataclass(kw_only=True, eq=False)
class Claim:
    """Somebody says that an agent has a version. Times are of the clock of `FollowedRun`.

    Attributes:
        number: of the claim; they rise.
        version, endpoint: what is claimed, and of whom.
        began_s: since when.
        grace_s: a denial counts that was asked for so long after: a trainer may tell of a version before its agent has
            heard of it.
        until_s: how long its agent may be silent about it, or not have the run.
        is_told: somebody wants to hear of a denial; else its agent is asked on for a while, whatever run it has.
        checked: whether what is served may count as this version. One that was brought before has to be of the same
            life of its trainer.
        there_s: since when its agent is known to have it, or a newer one of its run; None: it is not known to.
        error: why it will not be served.
        returns: its run is over, and its fleet brings it back, see `RunsOver`; false again when any run takes over.
    """

    number: int
    version: Version
    endpoint: str
    began_s: float
    grace_s: float
    until_s: float
    is_told: bool
    checked: bool = True
    there_s: float | None = None
    error: WeightSyncError | None = None
    returns: bool = False

    @property
    def is_open(self) -> bool:
        """Whether its agent's word is waited for."""
        return self.error is None and (self.there_s is None or not self.checked)

    @property
    def deniable_s(self) -> float:
        """From then on a denial counts."""
        return self.began_s + self.grace_s

    @property
    def denied(self) -> NotPublishedError | None:
        """That its agent has said that it has it not."""
        return self.error if isinstance(self.error, NotPublishedError) else None


class AgentState:
    """One agent. Not thread-safe: its owner's lock.

    Args:
        poll_s: see `FollowedRun`.

    Attributes:
        newest: the last version that it has named, of any run; None: none yet.
        life: of its trainer, as it has said last; None: it does not say.
        since_s: since when it names that one.
        asked_s: when the last request began that it has answered.
        woken_s: it is to be asked once, at this time or later.
        not_before_s: it is asked no sooner.
        pause_s: the last pause after a request that brought nothing; 0: there was none.
        num_turns: how often in a row it has named another run, or a lower number.
        why: what it said last.
        error: why it could not be asked last; None: it could.
        ended: it has said last that its trainer has closed it: that it answers no more is no failure.
        gone_s: when nobody answered there last; None: somebody has since, or may.
        coming: what it is about to have, as it has said last.
        broken: a pull from it has failed, and none succeeded since.
        claims: what is waited for.
        was_claimed: somebody has said that it has a version.
        denied: the lowest version of a run that it has denied, and not passed.
        doubted: it did not have this one when its time was over; it is asked for it until `doubted_until_s`.
        lasting: it is of the configuration: whatever becomes of its run, another trainer may come there.
    """

    def __init__(self, poll_s: float | None) -> None:
        self._poll_s = poll_s
        self.newest: Version | None = None
        self.life: str | None = None
        self.since_s = -math.inf
        self.asked_s = -math.inf
        self.woken_s = -math.inf
        self.not_before_s = -math.inf
        self.pause_s = 0.0
        self.num_turns = 0
        self.why = "it was not asked yet"
        self.error: str | None = None
        self.ended = False
        self.gone_s: float | None = None
        self.coming: Version | None = None
        self.broken = False
        self.lasting = False
        self.claims: list[Claim] = []
        self.was_claimed = False
        self.denied: Version | None = None
        self.doubted: Version | None = None
        self.doubted_until_s = -math.inf

    @property
    def struggles(self) -> bool:
        """Whether others come first."""
        return self.broken or self.error is not None

    @property
    def has_ended(self) -> bool:
        """Whether its trainer has closed it in order, and nobody waits for what it has never had."""
        lacks = any(not is_in(claim.version, self.newest) for claim in self.claims)
        return self.ended and self.error is not None and not lacks

    def has_taken_along(self, version: Version, since_s: float) -> bool:
        """Whether it had that version when its trainer closed it, and was looked for since then: nobody answers there.
        One that is gone and has not said that it ends may be cut off, or started again."""
        return self.ended and is_in(version, self.newest) and self.gone_s is not None and self.gone_s >= since_s

    def has(self, run_id: str | None) -> bool:
        """Whether it has named that run last."""
        return self.newest is not None and self.newest.run_id == run_id

    def is_said_to_have(self, run_id: str) -> bool:
        """Whether somebody has said so, and it may be true."""
        doubted = self.doubted is not None and self.doubted.run_id == run_id
        return doubted or self.told_of(run_id) > 0

    def is_to_bring_back(self, run_id: str) -> bool:
        """Whether a fleet has said so of a run that is over."""
        return any(claim.returns and claim.version.run_id == run_id for claim in self.claims)

    def turn(self) -> None:
        """Another run takes over."""
        self.broken = False
        for claim in self.claims:
            claim.returns = False

    @property
    def lacking(self) -> tuple[Version, ...]:
        """What is claimed of it, and was not there when it was asked after the claim's grace; or it can't be asked."""
        return tuple(
            claim.version
            for claim in self.claims
            if claim.there_s is None and (self.error is not None or self.asked_s >= claim.deniable_s)
        )

    def told_of(self, run_id: str) -> int:
        """The number of the last claim that it has that run; 0: there is none."""
        return max((claim.number for claim in self.claims if claim.version.run_id == run_id), default=0)

    def is_past(self, runs_over: Container[str], other: AgentState | None) -> bool:
        """Whether it is gone, and nobody waits for its word: its run is one of those; or `other`, which is pulled from
        and answers, has gone on with its run in another life of their trainer (a store may come back), or it never said
        a word of what was claimed of it."""
        if self.error is None or self.lasting or self.claims or self.doubted:
            return False
        if self.newest is None:
            return other is not None and self.was_claimed
        if self.newest.run_id in runs_over:
            return True
        if other is None or self.gone_s is None or None in (self.life, other.life):
            return False
        return is_in(self.newest, other.newest) and self.life != other.life

    def next_ask(self, now_s: float, *, past: bool = False) -> Ask | None:
        """The next request; None: there is no reason for one. `past`: it is not asked for ever."""
        moments = [self.woken_s, *(claim.deniable_s for claim in self.claims)]
        waiting = [moment_s for moment_s in moments if self.asked_s < moment_s]
        ever = self._poll_s is not None and not past
        if not (waiting or self.claims or (self.newest is None and not past) or self.doubted or ever):
            return None
        wait_s = OVERDUE_S if self.claims else WAIT_S
        if waiting:
            wait_s = max(0.0, min(waiting) - now_s)
        return Ask(at_s=self.not_before_s, after=self.newest, wait_s=min(WAIT_S, wait_s))

    def wake(self, now_s: float) -> None:
        """It is asked once, now."""
        self.woken_s, self.pause_s = now_s, 0.0
        self.not_before_s = min(self.not_before_s, max(now_s, self.asked_s + SHORTEST_S))

    def answered(self, newest: Version | None, asked: Ask, *, asked_s: float, now_s: float, life: str | None) -> None:
        """It was asked at `asked_s`, and names that version, or none yet, in that life of its trainer."""
        before, self.newest, self.life = self.newest, newest or self.newest, life
        self.asked_s, self.error, self.why = max(asked_s, self.asked_s), None, f"it has {newest or 'nothing yet'}"
        self.gone_s = None
        self.not_before_s = asked_s + SHORTEST_S
        if newest is not None and newest != before:
            goes_on = before is None or (newest.run_id == before.run_id and newest.number > before.number)
            self.since_s, self.num_turns = now_s, 0 if goes_on else self.num_turns + 1
            if self.num_turns > TURNS:
                self.pause(now_s, longest=True)
        elif now_s - asked_s < asked.wait_s:  # it lets nobody wait
            self.pause(now_s)
        elif asked.wait_s:
            self.pause_s = 0.0

    def unheard(self, why: str, now_s: float, *, gone: bool) -> str:
        """It could not be asked, see `FollowedRun.not_heard`. Why, in words for an operator."""
        self.ended = self.ended and gone
        self.gone_s = now_s if gone else None
        if self.ended:
            return "its trainer has ended"
        return f"{_GONE}: {why}" if gone and self.newest is not None else why

    def is_news(self, why: str) -> bool:
        """Whether that differs from its error in more than details."""
        kinds = {text.removeprefix(f"{_GONE}: ").partition(":")[0] for text in (self.error, why) if text is not None}
        return self.error is None or len(kinds) > 1

    def pause(self, now_s: float, *, longest: bool = False) -> None:
        """It has said nothing new, or nothing: the pause before the next request grows, up to `poll_s`."""
        first_s, longest_s = SHORTEST_S, OVERDUE_S
        if not self.claims:
            longest_s = _LONGEST_PAUSE_S if self._poll_s is None else min(WAIT_S, self._poll_s)
            first_s = min(_FIRST_PAUSE_S, longest_s)
        self.pause_s = longest_s if longest else min(longest_s, max(first_s, 2 * self.pause_s))
        self.not_before_s = now_s + self.pause_s

    def add(self, claim: Claim) -> None:
        """A claim more; the oldest gives way."""
        self.claims.append(claim)
        self.was_claimed = True
        del self.claims[:-_MAX_CLAIMS]

    def give_way(self, run_id: str, number: int, runs_over: Container[str]) -> None:
        """That run is followed: what was claimed of another one before the claim of that number is waited for no more.
        A claim behind it may still come true; one of a run that was taken over is told so, see `FollowedRun.check`."""
        for claim in self.claims:
            of = claim.version.run_id
            if of != run_id and of not in runs_over and claim.number < number:
                claim.error = TransferAbortedError(
                    f"run {run_id} was told of later, and is followed", version=str(claim.version)
                )
        self.claims = [claim for claim in self.claims if claim.error is None]

    def doubt(self, version: Version, now_s: float) -> None:
        """It has not what nobody waits for: it is asked for it on, the newest of a run."""
        known = self.doubted
        if known is None or known.run_id != version.run_id or version.is_newer_than(known):
            self.doubted, self.doubted_until_s = version, now_s + _DOUBT_S

    def deny(self, version: Version) -> None:
        """From this number of its run on, what comes is denied at once."""
        if not self.knows_denied(version):
            self.denied = version

    def forget(self, now_s: float, brought: Version | None = None) -> None:
        """Claims and doubts that are settled, by what was brought or by what it has."""
        newest, doubted, denied = self.newest, self.doubted, self.denied
        if newest is not None and denied is not None and (denied.run_id != newest.run_id or is_in(denied, newest)):
            self.denied = None
        if doubted is not None and (now_s >= self.doubted_until_s or is_in(doubted, newest) or is_in(doubted, brought)):
            self.doubted = None
        for claim in self.claims:
            if claim.there_s is None and is_in(claim.version, brought):
                claim.there_s = now_s
        self.claims = [claim for claim in self.claims if claim.is_open]

    def knows_denied(self, version: Version) -> bool:
        """Whether that version was denied before, or a lower one."""
        denied = self.denied
        return denied is not None and denied.run_id == version.run_id and version.number >= denied.number


def is_in(version: Version, newest: Version | None) -> bool:
    """Whether who has `newest` needs that version no more."""
    return newest is not None and version.run_id == newest.run_id and version.number <= newest.number


def nobody_has(wanted: Target, agents: Mapping[str, AgentState], *, since_s: float) -> NotPublishedError | None:
    """That its trainer has ended with that version, see `AgentState.has_taken_along`, and no other agent has it, by
    what each was asked since then; None: some may."""
    version = wanted.version
    left = [each for each in agents.values() if not each.has_taken_along(version, since_s)]
    if agents[wanted.endpoint] in left or any(is_in(version, each.newest) or each.asked_s < since_s for each in left):
        return None
    return NotPublishedError(
        f"the trainer at {wanted.endpoint} has ended, and nobody has {version} any more: start a trainer"
    )


def lowest(served: Iterable[Version | None], run_id: str) -> int:
    """The lowest number of that run that one of them is; -1 where one is none of it, or there are none."""
    return min((each.number if each is not None and each.run_id == run_id else -1 for each in served), default=-1)
