"""What a rollout service is told, and what it says of itself."""

from __future__ import annotations

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.canary import CanaryReading
from weightsync.types.deadline import check_wait_s
from weightsync.types.manifest import ArtifactKind
from weightsync.types.message import Message, learn
from weightsync.types.progress import TransferProgress, log_line
from weightsync.types.spec import check_id
from weightsync.types.transfer_messages import Transport


class NotifyRequest(Message, frozen=True, kw_only=True):
    """Tells a rollout service, or a controller, of a new version. Document 3's body, and what it leaves open.

    Attributes:
        model_id, version: of which publication.
        sender_endpoint: URL of the agent that has it; for a rollout service one that was registered there.
        run_id: of the trainer's run; None: the run that this agent has, it is asked.
        wait_s: answer when the version (or a newer one of the run) is served, at most after so many seconds; None
            answers at once.
        evaluate: for a controller: sync and validate it now; `wait_s` is until that has ended.
    """

    model_id: str
    version: int
    sender_endpoint: str
    run_id: str | None = None
    wait_s: float | None = None
    evaluate: bool = False

    def __post_init__(self) -> None:
        if self.run_id is not None:
            check_id("run_id", self.run_id)
        check_id("model_id", self.model_id)
        if self.version < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.version}")
        if self.wait_s is not None:
            check_wait_s("wait_s", self.wait_s)


class RegisterSenderRequest(Message, frozen=True, kw_only=True):
    """Makes an agent's endpoint known to a rollout service, which calls nobody else."""

    model_id: str
    sender_endpoint: str

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        if not self.sender_endpoint.startswith(("http://", "https://")) or len(self.sender_endpoint) > 2048:
            raise InvalidRequestError(f"an endpoint is an http URL, not {self.sender_endpoint[:100]!r}")


class ModelStatus(Message, frozen=True, kw_only=True):
    """What a rollout service knows of one model.

    Attributes:
        run_id, version: what its engines serve; None before the first version.
        served_s: since when, in seconds since the epoch.
        state: "idle", "pulling", "loading"; "waiting", after a failure, for the next try.
        since_s: since when it is in that state, in seconds since the epoch.
        sender: whom it pulls from.
        wanted_run_id, wanted: the newest version that it was told of.
        engines: version that each engine serves, as "run/number"; None where none is known.
        staged: in a fleet: what every engine has staged and waits with, as "run/number".
        sender_errors: why agents could not be asked what they have, by endpoint; without those that could.
        ended: agents that answer no more because their trainer has closed them.
        errors: what failed last, per engine, or "pull"; empty after a version was served everywhere.
        retrying: why the pull under way was begun anew, and is still tried.
        fetched: what was fetched last, as "run/number", which may not be what is served: what `pull_s`, `transport`,
            `num_deltas`, `received_bytes`, `total_bytes`, `received_from` and `because` are of.
        num_pulled, num_committed: since the service started.
        pull_s: seconds of fetching it.
        load_s, paused_s: of the last version that is served: seconds of loading it, and in which no generation could
            start.
        transport: how the last version came.
        num_deltas: how many deltas brought it; 0: it came in full.
        received_bytes, total_bytes: that were sent for it, and those of the whole model.
        received_from: the former by where they came from: "agent", "peer".
        because: why it came so, in words.
        num_patched: engines that were given its changed elements alone.
        full_because: why engines were given all of it, though deltas brought it, by engine.
        unprovable: why engines could not prove their live bytes, by engine.
        checksums: as in `SyncReport`, of the last version.
        canaries: what engines answered to the trainer's canary with the last version, by engine.
        progress: of the transfer under way; None where none is, or nothing has come yet.
        artifact: kind of what is served, "model" or "lora".
        adapter: of "lora", its rank and its base, in words.
    """

    run_id: str | None = None
    version: int | None = None
    served_s: float | None = None
    state: str = "idle"
    since_s: float | None = None
    sender: str | None = None
    wanted_run_id: str | None = None
    wanted: int | None = None
    engines: dict[str, str | None] = msgspec.field(default_factory=dict)
    staged: str | None = None
    sender_errors: dict[str, str] = msgspec.field(default_factory=dict)
    ended: tuple[str, ...] = ()
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    retrying: str | None = None
    fetched: str | None = None
    num_pulled: int = 0
    num_committed: int = 0
    pull_s: float | None = None
    load_s: float | None = None
    paused_s: float | None = None
    transport: Transport | None = None
    num_deltas: int = 0
    received_bytes: int = 0
    total_bytes: int = 0
    received_from: dict[str, int] = msgspec.field(default_factory=dict)
    because: str | None = None
    num_patched: int = 0
    full_because: dict[str, str] = msgspec.field(default_factory=dict)
    unprovable: dict[str, str] = msgspec.field(default_factory=dict)
    checksums: dict[str, str] = msgspec.field(default_factory=dict)
    canaries: dict[str, CanaryReading] = msgspec.field(default_factory=dict)
    progress: TransferProgress | None = None
    artifact: ArtifactKind = "model"
    adapter: str | None = None

    @property
    def is_troubled(self) -> bool:
        """Whether something has failed, and is to be tried again."""
        return bool(self.errors) or self.state == "waiting"

    def __str__(self) -> str:
        """What is served, as one line for a log: `v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved`."""
        if self.version is None:
            return "no version yet"
        if self.pull_s is None:
            return f"v{self.version}: from before this service started, by its record"
        served = f"{self.run_id}/{self.version}"
        line = f"v{self.version}: served, and {self.fetched} was fetched since"
        if self.fetched in (None, served):
            line = log_line(
                version=self.version, moved_bytes=self.received_bytes, total_bytes=self.total_bytes,
                by_deltas=self.num_deltas > 0, seconds=self.pull_s + (self.load_s or 0.0),
                paused_s=self.paused_s or 0.0, unproved_by=self.unprovable or None,
            )  # fmt: skip
        others = [who for who, version in self.engines.items() if version != served]
        line += f"; not served by {', '.join(others)} now" if others else ""
        line += f"; adapter of {self.adapter}" if self.adapter is not None else ""
        line += "".join(
            f"; {who}'s canary is off by {each.worst:.2g} of {each.tolerance:g}" for who, each in self.canaries.items()
        )
        return line + "".join(f"; {who} loaded all of it: {why}" for who, why in self.full_because.items())


class LeaseStatus(Message, frozen=True, kw_only=True):
    """What a service's engines answer under.

    Attributes:
        left_s: seconds that it has; 0: they answer nobody.
        why_none: why they answer nobody now, in words; None: they may.
        failed: something is wrong; it is no newcomer that waits for its first version.
    """

    left_s: float
    why_none: str | None = None
    failed: bool = False


class ServiceStatus(Message, frozen=True, kw_only=True):
    """What `/status` of a rollout service answers.

    Attributes:
        models: by model_id.
        controller: URL of the controller whose fleet it is part of; None: of none.
        lease: what its engines answer under; None: they need none.
    """

    models: dict[str, ModelStatus]
    controller: str | None = None
    lease: LeaseStatus | None = None


learn(NotifyRequest, RegisterSenderRequest, ServiceStatus)
