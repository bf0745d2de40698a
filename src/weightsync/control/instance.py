"""What a pool knows of one instance, and an instance as a sync sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from weightsync.types import Version
from weightsync.types.control import InstanceStatus
from weightsync.types.fleet import NOT_STARTED, HeartbeatRequest, ModelVersion

State = Literal["joining", "live", "suspect", "evicted"]


@dataclasses.dataclass(kw_only=True)
class Instance:
    """What is known of one. Not thread-safe: its pool's lock.

    Attributes:
        beat: what it said last.
        heard_s, lease_end_s: by the pool's clock.
        why: why it was evicted; None: it was not, or is silent.
        fresh: it came in, and was not told so yet.
        torn: part of a set may be served there, as it says.
        doubted: it has said once that it serves something else than the fleet.
        let_in: with what; None: it has taken its lease.
        missed: it was awaited and failed instead of coming, and a sync was tried for that: once is enough.
    """

    beat: HeartbeatRequest
    heard_s: float
    state: State = "joining"
    lease_end_s: float = 0.0
    why: str | None = None
    fresh: bool = False
    torn: bool = False
    doubted: bool = False
    let_in: dict[str, Version | None] | None = None
    missed: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether syncs bring it versions, and it may answer."""
        return self.state in ("live", "suspect")

    @property
    def goes_on(self) -> bool:
        """Whether it may answer for what is left of a lease that another controller has lent it."""
        return self.beat.left_s > 0 and self.beat.whole and not self.beat.lacks

    @property
    def starting(self) -> tuple[str, ...]:
        """Its engines that have not started yet."""
        return tuple(who for who, why in self.beat.gone.items() if why.startswith(NOT_STARTED))

    @property
    def awaits(self) -> tuple[str, ...]:
        """For what it waits before it serves its first version; nothing: it serves one, or something has failed."""
        name, starting = self.beat.instance_id, self.starting
        if self.why or self.beat.error or any(self.serves().values()) or self.beat.gone.keys() - starting:
            return ()
        return tuple(f"engine {who} of {name} to start" for who in starting) or (f"{name} to load what is current",)

    def serves(self) -> dict[str, Version | None]:
        """By model; None: nothing of ours."""
        served: dict[str, Version | None] = dict.fromkeys(self.beat.lacks)
        return served | {each.model_id: each.of for each in self.beat.serves}

    def has(self, versions: Sequence[ModelVersion]) -> bool:
        """Whether it serves or has staged all of these whose models it has; there is one."""
        mine = {(each.model_id, each.of) for each in versions if each.model_id in self.serves()}
        return bool(mine) and mine <= {(each.model_id, each.of) for each in (*self.beat.serves, *self.beat.staged)}

    def has_said_more_than(self, beat: HeartbeatRequest) -> bool:
        """Whether this heartbeat was sent before the last one that was heard of the same process."""
        return self.beat.incarnation == beat.incarnation and 0 < beat.number < self.beat.number

    def as_member(self) -> Member:
        beat = self.beat
        return Member(
            instance_id=beat.instance_id, incarnation=beat.incarnation, url=beat.url, models=frozenset(self.serves())
        )

    def status(self, now_s: float, newest: Mapping[str, Version], why: str | None) -> InstanceStatus:
        """As users see it; lags are behind `newest`, by model, and `why` is what its pool says of it."""
        served = self.serves()
        gone = [
            f"engine {who} {why}" if who in self.starting else f"engine {who} is gone: {why}"
            for who, why in self.beat.gone.items()
        ]
        return InstanceStatus(
            instance_id=self.beat.instance_id,
            url=self.beat.url,
            state="joining" if self.fresh and self.state == "live" else self.state,
            models={tag: None if version is None else str(version) for tag, version in served.items()},
            lag={tag: _lag(newest.get(tag), version) for tag, version in served.items()},
            heartbeat_age_s=now_s - self.heard_s,
            lease_left_s=max(0.0, self.lease_end_s - now_s),
            why="; ".join(filter(None, (why, *gone, self.beat.error))) or None,
            progress=self.beat.progress,
            adapters=self.beat.adapters,
            gone=tuple(self.beat.gone),
            failed=bool(gone or self.why or self.beat.error),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """An instance that takes part in a sync.

    Attributes:
        instance_id, incarnation, url: as it names them.
        models: that it serves.
    """

    instance_id: str
    incarnation: str
    url: str
    models: frozenset[str]


def _lag(newest: Version | None, served: Version | None) -> int | None:
    if newest is None or served is None or served.run_id != newest.run_id:
        return None
    return newest.number - served.number
