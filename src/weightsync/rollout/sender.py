"""Sender: what is known, and what is said, of one agent that may be pulled from."""

from __future__ import annotations

import dataclasses
import time

from weightsync.types import Deadline, Version

_MAX_NUMBERS = 16
_RETRY_S = 0.02
POLL_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """A version, and the agent that is said to have it."""

    version: Version
    endpoint: str


@dataclasses.dataclass(kw_only=True)
class Ticket:
    """What became of one wish.

    Attributes:
        number: of the wish; they rise.
        wish: as it came.
        until: how long its agent may be silent about it.
        checked: whether what is served may count as this version. A version that was announced before has to be of the
            same life of its trainer.
        refused: why it is not taken up.
        absent: it is not taken up since its agent says that it has it not.
        newest: what that agent has of the run instead, or is about to have; None: it names another run.
        there: its agent has said that it has it, or something newer of that run.
        began_s: when it came, by the monotonic clock.
    """

    number: int
    wish: Wish
    until: Deadline
    checked: bool = True
    refused: str | None = None
    absent: bool = False
    newest: int | None = None
    there: bool = False
    began_s: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(kw_only=True)
class OtherRun:
    """A run that this agent is said to have, beside what it is known for.

    Attributes:
        wish: the newest of it.
        until: by when the agent has to have it.
        tickets: who wait for it.
    """

    wish: Wish
    until: Deadline
    tickets: list[Ticket]


class Sender:
    """One agent. Not thread-safe: its owner's lock.

    Attributes:
        numbers: versions of the followed run that it was said to have, each with when patience with it ends; None: it
            has said so itself.
        doubted: a number that it did not have when patience ended; it is asked for it by and by.
        has: its newest of the followed run, as it said itself; None: it did not say.
        verified: it is known to have the followed run.
        broken: it did not keep its last promise: others come first.
        runs: other runs that it is said to have, and the followed one while it is not verified.
        unchecked: tickets of versions that are served already, as it seems.
        look: it is to be asked once, whatever is known.
        retry_s: pause before it is asked again.
        poll: when it is asked again for what is doubted.
        why: what it said last.
        error: why it could not be asked last; None: it could.
        known: it has said once which version it has.
        again: when it is asked anew, whatever is announced; None: it is not.
        pause_s: how long until then, where it has not answered.
    """

    def __init__(self) -> None:
        self.runs: dict[str, OtherRun] = {}
        self.unchecked: list[Ticket] = []
        self.look = False
        self.looked = 0
        self.retry_s = _RETRY_S
        self.why = ""
        self.error: str | None = None
        self.known = False
        self.again: Deadline | None = None
        self.pause_s = FIRST_PAUSE_S
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another run is followed."""
        self.numbers: dict[int, Deadline | None] = {}
        self.doubted: int | None = None
        self.has: int | None = None
        self.verified = False
        self.broken = False
        self.poll = Deadline(POLL_S)

    def announce(self, number: int, until: Deadline | None) -> None:
        """It is said to have that version; who promised it before is not given more time."""
        if number not in self.numbers or until is None:
            self.numbers[number] = until
        while len(self.numbers) > _MAX_NUMBERS:
            del self.numbers[max(self.numbers)]

    def ask_again(self, poll_s: float | None) -> None:
        """It was asked: until it has told a version, it is asked again and again; then every `poll_s`, if at all."""
        if self.known:
            self.again = None if poll_s is None else Deadline(poll_s)
            return
        self.again = Deadline(self.pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def hurry(self) -> None:
        """Somebody waits for its word."""
        self.retry_s = _RETRY_S

    def least(self, low: int, pulled: int) -> int | None:
        """The lowest version that a pull from it has to bring; None where it has nothing to bring.

        Args:
            low: what every engine serves, or more.
            pulled: what was brought last.
        """
        due = [number for number in self.numbers if number > low]
        if low < pulled:  # an engine was left behind
            due.append(pulled if self.has is None else min(self.has, pulled))
        return min((number for number in due if number > low), default=None)
