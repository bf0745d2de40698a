"""WeightManager: the trainer's side of the pull path. One call a step, which costs the trainer one copy.

    wm = WeightManager("actor")
    wm.offload(model, version=step)                         # every training rank, between two steps

What happens in `offload`, and who waits for whom, is in `offload_steps`. Everything after that (proof, announcement,
transfers) is the agents' work.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Self

import msgspec

from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, InvalidRequestError, StateError, WeightSyncError, as_weightsync_error
from weightsync.memory import host_nonce, reclaim_dead
from weightsync.observe import LONG_RUN_BYTES, Recorder, now_s
from weightsync.trainer.agent_process import AgentProcess
from weightsync.trainer.checks import check_call, check_deltas, check_names, check_reachable, check_settings
from weightsync.trainer.offload_steps import Acquired, OffloadReport, OffloadSteps
from weightsync.trainer.plan_cache import Weights
from weightsync.trainer.publish_tracker import PublishTracker
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import PhaseRecord, Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import DeltaReport, Event, Published, TransferDone
from weightsync.types.closing import Closing
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process

BLOCK_BYTES = 4 << 20

__all__ = ["BLOCK_BYTES", "DeltaReport", "OffloadReport", "WeightManager"]

_logger = logging.getLogger(__name__)


@of_one_process
class WeightManager(Closing):
    """Every training rank makes one and calls it in one order between steps; or one rank, `alone`, with whole tensors.

    Args:
        model_id: which model; each model has its own manager.
        dtype: the engines' dtype; None keeps the trainer's.
        run_id: name of this trainer's run; rank 0 makes one where not given.
        guard_s: how long `offload` may wait for a segment that is still read.
        timeout_s: how long ranks wait for each other.
        host: where the agent listens; beyond loopback only with a token.
        port: of the agent's HTTP; 0 lets the system choose.
        advertise: host name under which receivers reach the agent; `host` where not given.
        lease_s: a receiver over TCP whose transfers were cut for a newer version, twice, may hold one for so long at
            most; 0: not at all, and no receiver over TCP costs a third segment.
        agent_timeout_s: an agent that answers nothing for so long is killed and started again.
        token: bearer token.
        certificate, key: PEM files: agents speak TLS.
        host_group: name of this rank's host; ranks of one name share memory, a segment and an agent. By default what
            the shared memory itself says.
        delta_budget_bytes: shared memory that deltas may take on each host; None: a quarter of the model's bytes there;
            0: none are made.
        full_sync_interval: every version whose number is a multiple of it goes out in full; 0: none has to.
        delta_device: where agents search for what changed, as torch names it ("cuda"); None: on the CPU's cores. Where
            there is no such device, versions go out in full, and the agent's log says why.
        alone: this process publishes by itself, whatever group of `torch.distributed` it is in: it is given whole
            tensors that somebody has gathered.
        recorder: where phases go; an own one where not given.

    Attributes:
        recorder, model_id, timeout_s, alone: as above.
        run_id: name of this run; empty before `start`.

    Raises:
        ConfigError: a setting makes no sense.
    """

    def __init__(
        self,
        model_id: str,
        *,
        dtype: str | None = None,
        run_id: str | None = None,
        guard_s: float = 1.0,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        token: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        host_group: str | None = None,
        lease_s: float = 60.0,
        agent_timeout_s: float = 10.0,
        delta_budget_bytes: int | None = None,
        full_sync_interval: int = 0,
        delta_device: str | None = None,
        alone: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        check_settings(
            model_id, dtype, guard_s=guard_s, timeout_s=timeout_s, agent_timeout_s=agent_timeout_s, lease_s=lease_s
        )
        config = AgentConfig(
            model_id=model_id, host=host, port=port, advertise=advertise, token=token, certificate=certificate, key=key,
            lease_s=lease_s, delta_budget_bytes=delta_budget_bytes, full_sync_interval=full_sync_interval,
            delta_device=delta_device,
        )  # fmt: skip
        check_reachable(config)
        check_deltas(config)
        self.recorder = recorder or Recorder("trainer/offload", max_bytes=LONG_RUN_BYTES)
        self.model_id = model_id
        self._dtype = dtype
        self._given_run_id = run_id
        self.run_id = ""
        self._guard_s = guard_s
        self.timeout_s = timeout_s
        self._agent_timeout_s = agent_timeout_s
        self._config = config
        self._host_group = host_group
        self.alone = alone
        self._ranks: TrainingRanks | None = None
        self._agent: AgentProcess | None = None
        self._endpoints: list[str | None] = []
        self._hosts: list[str] = []
        self._steps: OffloadSteps | None = None
        self._newest = -1
        self._is_vacant = False  # no memory was free for the newest
        self._tracker = PublishTracker()
        self._closed = False
        self._unsubscribe: Callable[[], None] = lambda: None

    @classmethod
    def from_config(cls, config: WeightSyncConfig | Mapping[str, Any], **options: Any) -> Self:
        """A manager as `config` says: the configuration that `RolloutService.from_config` is given too.

        Args:
            config: `run_id`, `inference_service.model_tag`, `publish`, `extract.dtype`, and of `transfer` `delta` and
                `join_timeout_s` count. What else it says of `extract` is the extractor's, see `extractor_for`.
            options: arguments of the constructor; they win.

        Raises:
            ConfigError: a setting makes no sense or is not read here; or `publish.to` names whom `publish` alone tells.
        """
        settings = WeightSyncConfig.load(config).for_method("pull")
        chosen, transfer = settings.publish, settings.transfer
        if chosen.to:
            raise ConfigError(
                f"publish.to is {list(chosen.to)}, and a WeightManager tells nobody: use weightsync.publish, or "
                "leave it out and call notify_version",
                keys=["publish.to"],
            )
        values: dict[str, Any] = {
            "dtype": settings.extract.dtype, "run_id": settings.run_id, "guard_s": chosen.guard_s, "port": chosen.port,
            "host": chosen.host or "127.0.0.1", "advertise": chosen.advertise,
        }  # fmt: skip
        if "join_timeout_s" in transfer.model_fields_set:
            values["timeout_s"] = transfer.join_timeout_s
        if transfer.delta is False:
            values["delta_budget_bytes"] = 0
        return cls(**{"model_id": settings.inference_service.model_tag, **values, **options})

    # --- what callers use ---

    @property
    def endpoint(self) -> str:
        """URL of the agent of training rank 0's host, for `notify_version`; empty before `start`."""
        return next((endpoint for endpoint in self._endpoints if endpoint), "")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all hosts' agents: receivers have to know each of them. Empty before `start`."""
        return tuple(dict.fromkeys(endpoint for endpoint in self._endpoints if endpoint))

    @property
    def is_first_rank(self) -> bool:
        """Whether this is training rank 0; known from `start` on."""
        return self._ranks is not None and self._ranks.rank == 0

    @property
    def agent_pid(self) -> int | None:
        """Process id of this rank's agent; None where another rank of the host has it."""
        return None if self._agent is None else self._agent.pid

    def start(self, *, deltas: bool = False, error: WeightSyncError | None = None) -> None:
        """Starts the agents. Every rank; `offload` does it where it was not done. Idempotent.

        Args:
            deltas: returns when their delta codec is loaded too, which takes half a second, and some 12 s for the first
                time on a machine. Otherwise they load it when a receiver has asked for a delta: the versions until
                then go out in full.
            error: what this rank has found to be wrong before: every rank raises it, and no agent is started.

        Raises:
            ConfigError: an agent can't listen where it was told to, or `run_id` is no name. On every rank.
            EngineUnreachableError: an agent did not start. On every rank.
            StateError: there is no shared memory. On every rank. After any error this manager is closed.
            TrainerRankError: a rank is gone.
        """
        if self._closed:
            raise StateError("this WeightManager is closed")
        if self._endpoints:
            return
        try:
            self._start(deltas, error)
        except BaseException:  # an interruption too: nobody may make a second agent over the first
            self.close()
            raise

    def _start(self, deltas: bool, error: WeightSyncError | None) -> None:
        ranks = self._ranks = TrainingRanks(timeout_s=self.timeout_s, alone=self.alone)
        host = ""
        try:
            check_names(self._given_run_id, self.model_id)
            host = self._host_group or host_nonce()
        except Exception as caught:
            error = error or as_weightsync_error(caught, StateError, "this rank can't publish")
        names = {} if error else {"run_id": self._given_run_id, "model_id": self.model_id}  # refused ones can't be sent
        replies = ranks.settle(error, host=host, incarnation=uuid.uuid4().hex, **names)
        if len({what["model_id"] for what in replies}) > 1:
            raise ConfigError("training ranks made managers of different models: call them in one order")
        self.run_id = replies[0]["run_id"] or f"run-{uuid.uuid4().hex[:12]}" if ranks.rank == 0 else ""
        self._hosts = [what["host"] for what in replies]

        def serves(seconds: float) -> bool:
            if self._hosts.index(host) != ranks.rank:
                return True
            if self._agent is None:
                config = msgspec.structs.replace(
                    self._config, incarnation=replies[0]["incarnation"], load_delta_codec=deltas
                )
                self._agent = AgentProcess(config, self._heard, answer_within_s=self._agent_timeout_s)
                self._agent.start()
            return self._agent.wait_started(seconds)

        ranks.wait_together(serves, what="the agent did not start")
        if self._agent is not None:
            self._unsubscribe = self.recorder.subscribe(self._show)
        endpoint = None if self._agent is None else self._agent.endpoint
        answers = ranks.settle(None, endpoint=endpoint, run_id=self.run_id)
        self.run_id = answers[0]["run_id"]
        self._steps = OffloadSteps(
            ranks, self._hosts, model_id=self.model_id, dtype=self._dtype, guard_s=self._guard_s,
            leases=self._config.lease_s > 0, timeout_s=self.timeout_s, recorder=self.recorder,
        )  # fmt: skip
        self._endpoints = [what["endpoint"] for what in answers]

    def offload(
        self,
        weights: Weights,
        version: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        error: WeightSyncError | None = None,
    ) -> OffloadReport:
        """Publishes the weights as they are now. Every rank, between two steps; returns when they may change again.

        Args:
            weights: a module; or tensors by name, others of the same dtype and shape at each step or the same; or
                `model.named_parameters()`, which has no buffers; or an extractor, which also knows names, DeepSpeed or
                Megatron.
            version: rises within the run.
            rank, world_size: checked against `torch.distributed`, where given.
            error: what this rank has found to be wrong before: every rank raises it, and nothing is published.

        Returns:
            What was done. Nothing where every segment was still read: train on, or try the same version again.

        Raises:
            VersionError: a version that is neither above the last nor the last, unpublished. Nothing was changed.
            TrainerRankError: a rank is gone.
            WeightSyncError: extraction or a copy failed on some rank, told on every rank; nothing was published.
        """
        begun_s = now_s()
        self.start()
        ranks, steps = self._ranks, self._steps
        assert ranks is not None
        assert steps is not None
        named = Version(run_id=self.run_id, number=version) if type(version) is int and version >= 0 else None

        def check() -> None:
            if error is not None:
                raise error
            check_call(version, after=self._newest - self._is_vacant, given=(rank, world_size), ranks=ranks)

        agreed = steps.agree(weights, version, check=check)
        assert named is not None
        with self.recorder.phase("wait for a segment"):
            acquired = steps.acquire(agreed, self._reset)
        try:
            if acquired.why is not None:
                self._newest, self._is_vacant = version, True
                self._skipped(named, begun_s, acquired.why)
                return self._report(named, begun_s, acquired, copied_bytes=0)
            with self.recorder.phase("offload", detail=str(version)):
                copied_bytes = steps.copy(agreed, acquired)
            self._newest, self._is_vacant = version, False
            self._tracker.tried(version)
            try:
                mine = steps.publish(named, acquired, endpoints=self._endpoints, block_bytes=BLOCK_BYTES)
                if mine is not None:
                    assert self._agent is not None
                    self._agent.publish(*mine)
            except BaseException as error:  # nobody will hear of it from an agent
                self._tracker.skipped(version, f"offload failed: {error}")
                raise
            return self._report(named, begun_s, acquired, copied_bytes=copied_bytes)
        finally:
            steps.give_back(acquired)

    @property
    def newest(self) -> int:
        """Number of the last version that ranks agreed on, published or not; -1 before the first."""
        return self._newest

    @property
    def is_lost(self) -> bool:
        """Whether somebody took the newest version's memory on this host away: nobody can fetch it any more."""
        return self._steps is not None and self._steps.is_lost

    def wait_published(self, version: int, *, timeout_s: float) -> None:
        """Waits until this host's agent has proved a version and serves it, or a newer one. Only the host's first rank.

        Raises:
            InvalidRequestError: the version is no number, or `timeout_s` is no time one can wait.
            StateError: it was not published, in words why, or never offloaded: at once, and nothing is waited for; or
                another rank has the agent; or `start` has not come yet, or `close` has.
            DeadlineExceededError: it takes longer.
        """
        if type(version) is not int or version < 0:
            raise InvalidRequestError(f"version is a whole number from 0 on, not {version!r}")
        check_wait_s("timeout_s", timeout_s, may_be_0=True)
        if self._closed or not self._endpoints:
            raise StateError(
                "this WeightManager is closed" if self._closed else "no agent was started: call start or offload first"
            )
        if self._agent is None:
            raise StateError("the agent of this host belongs to another rank")
        if version > self._newest:
            newest = f"the newest that was is {self._newest}" if self._newest >= 0 else "nothing was so far"
            raise StateError(f"version {version} was never offloaded, so nobody proves it: {newest}; offload it first")
        self._tracker.wait(version, timeout_s=timeout_s)

    def wait_delta_ready(self, version: int | None = None, *, timeout_s: float = 60.0) -> DeltaReport | None:
        """Waits until this host's agent has made what receivers can take of a version. Only the host's first rank.

        A delta is there as soon as its version is. Deltas are made while receivers ask for them, where the trainer
        leaves the time; without one, receivers take the version in full.

        Args:
            version: the newest that was published where not given.
            timeout_s: how long to wait.

        Returns:
            The delta from the version before; None where there is none (`why_no_delta` of the agent's
            `/get_capabilities` says why), or where a newer version is there.

        Raises:
            StateError: see `wait_published`; or nothing was offloaded yet.
            DeadlineExceededError: it takes longer.
        """
        wanted = self._newest if version is None else version
        if wanted < 0:
            raise StateError("nothing was offloaded yet, so there is no delta to wait for: call offload first")
        self.wait_published(wanted, timeout_s=timeout_s)
        return self._tracker.delta_to(wanted)

    def receivers_behind(self, version: int, wait_s: float = 0, also: Collection[str] = ()) -> tuple[str, ...] | None:
        """Who pulls from this rank's agent, keeps up, and has not fetched a version; see `PublishTracker.behind`."""
        return self._tracker.behind(version, wait_s=wait_s, also=also)

    def wait_for_first_rank(self, done: Callable[[float], bool]) -> None:
        """Every rank calls it; returns on all of them when `done` has said so on rank 0.

        So no rank closes, and takes its host's agent with it, while rank 0 still waits for whoever pulls.

        Args:
            done: whether there is nothing to wait for; waits for that, at most the seconds that it is given.

        Raises:
            TrainerRankError: a rank is gone.
            StateError: `start` has not come yet, or `close` has; or rank 0 could not wait.
        """
        ranks = self._ranks
        if self._closed or ranks is None or not self._endpoints:
            raise StateError("this WeightManager is closed, or was not started")
        ranks.wait_together(lambda seconds: ranks.rank != 0 or done(seconds), what="rank 0 could not wait")

    def close(self) -> None:
        """Ends the agent and unlinks the segments. Receivers go on with what they serve. Idempotent.

        What was not pulled yet can't be had any more: a notification of the last version with `wait_s` comes before.
        """
        if not self._closed and self._agent is not None and self._tracker.is_under_way(self._newest):
            _logger.warning("version %d is withdrawn before it was proved: no receiver has it", self._newest)
        self._closed = True
        self._unsubscribe()
        self._tracker.close()
        if self._agent is not None:
            self._agent.close()
        if self._steps is not None:
            self._steps.close()
        if self._agent is not None:
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()  # deltas of agents that were killed
        if self._ranks is not None:
            self._ranks.close()

    # --- the steps ---

    def _skipped(self, version: Version, begun_s: float, why: str) -> None:
        _logger.warning("version %d was not published: %s", version.number, why)
        track = self.recorder.track
        self.recorder.add(
            PhaseRecord(name="not published", start_s=begun_s, end_s=now_s(), track=track, detail=str(version.number))
        )
        self._tracker.skipped(version.number, why)

    def _report(self, version: Version, begun_s: float, acquired: Acquired, *, copied_bytes: int) -> OffloadReport:
        assert self._steps is not None
        return OffloadReport(
            version=version, published=acquired.why is None, path="gather" if self._steps.gathers else "shards",
            seconds=now_s() - begun_s, waited_s=acquired.waited_s, copied_bytes=copied_bytes, why=acquired.why,
        )  # fmt: skip

    def _reset(self) -> None:
        if self._agent is not None:
            self._agent.reset()

    def _show(self, record: PhaseRecord) -> None:
        """The agent shows what the trainer does, and knows what itself did."""
        if self._agent is not None and record.track != f"agent/{self.model_id}":
            self._agent.show(record)

    def _heard(self, event: Event | Literal["hung", "restarted"]) -> None:
        """What the agent tells, in its thread."""
        if isinstance(event, str):
            at = now_s()
            self.recorder.add(PhaseRecord(name=f"agent {event}", start_s=at, end_s=at, track=self.recorder.track))
            if event == "restarted":
                self._tracker.agent_restarted()
            return
        self._tracker.hear(event)
        if isinstance(event, Published | TransferDone):
            for record in event.phases:
                self.recorder.add(record)
