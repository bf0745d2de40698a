"""WeightManager: the trainer's side of the pull path. One call a step, which costs the trainer one copy.

    wm = WeightManager("actor")
    wm.offload(model, version=step)                         # every training rank, between two steps

What happens in `offload`, and who waits for whom: the first rank of each host takes a free segment (`buffer`); the
ranks agree on it; each copies its own shards to their places, converting on the way; they agree again; the first
ranks stamp their segments and tell their agents. Everything after that (proof, announcement, transfers) is the
agents' work.

Over 400 lines, since the class is what users read: arguments, errors and the order of the ranks' agreements stand in
one place. What each step does is in the files beside it.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Any

import msgspec
import torch
import xxhash

from weightsync.errors import ConfigError, InvalidRequestError, StateError, WeightSyncError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.memory import host_nonce, reclaim_dead
from weightsync.observe import LONG_RUN_BYTES, Recorder, now_s
from weightsync.plan.boxes import whole_box
from weightsync.publish.agent_config import AgentConfig
from weightsync.publish.agent_process import AgentProcess
from weightsync.publish.buffer import PublicationBuffer, WriteTurn
from weightsync.publish.checks import check_call, check_deltas, check_names, check_reachable, check_settings
from weightsync.publish.host_plan import HostPlan, plan_hosts
from weightsync.publish.host_segments import HostSegments, write_header
from weightsync.publish.offload_report import DeltaReport, OffloadReport
from weightsync.publish.proof_news import ProofNews
from weightsync.publish.ranks import TrainingRanks
from weightsync.publish.standing import Named, StandingWeights
from weightsync.publish.weights import Weights, extractor_of
from weightsync.types import Box, Deadline, PhaseRecord, TensorSpec, TensorTable, Version
from weightsync.types.process import of_one_process

BLOCK_BYTES = 4 << 20

__all__ = ["BLOCK_BYTES", "DeltaReport", "OffloadReport", "WeightManager"]

_logger = logging.getLogger(__name__)

Boxes = tuple[tuple[int, Box], ...]


@of_one_process
class WeightManager:
    """Every training rank makes one and calls its methods in the same order, between two steps.

    Args:
        model_id: which model; each model has its own manager.
        dtype: the engines' dtype; None keeps the trainer's.
        run_id: name of this trainer's run; rank 0 makes one where not given.
        guard_s: how long `offload` may wait for a segment that is still read.
        timeout_s: how long ranks wait for each other.
        host: where the agent listens; beyond loopback only with a token.
        port: of the agent's HTTP; 0 lets the system choose.
        advertise: host name under which receivers reach the agent; `host` where not given.
        lease_s: a receiver over TCP that is slower than two steps may hold a version for so long at most, which costs a
            third segment; 0: not at all.
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
        recorder: where phases go; an own one where not given.

    Attributes:
        recorder: as above.

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
        self._model_id = model_id
        self._dtype = dtype
        self._given_run_id = run_id
        self._run_id = ""
        self._guard_s = guard_s
        self._timeout_s = timeout_s
        self._agent_timeout_s = agent_timeout_s
        self._config = config
        self._host_group = host_group
        self._ranks: TrainingRanks | None = None
        self._agent: AgentProcess | None = None
        self._endpoints: list[str | None] = []
        self._hosts: list[str] = []
        self._plan: HostPlan | None = None
        self._plan_of: tuple[str, Boxes] = ("", ())
        self._specs: tuple[TensorSpec, ...] = ()
        self._gathers = False
        self._standing = StandingWeights()
        self._buffer: PublicationBuffer | None = None
        self._segments = HostSegments()
        self._newest = -1
        self._proofs = ProofNews()
        self._closed = False

    # --- what callers use ---

    @property
    def run_id(self) -> str:
        """Name of this run; empty before `start`."""
        return self._run_id

    @property
    def endpoint(self) -> str:
        """URL of the agent of training rank 0's host, for `notify_version`; empty before `start`."""
        return next((endpoint for endpoint in self._endpoints if endpoint), "")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all hosts' agents: receivers have to know each of them. Empty before `start`."""
        return tuple(dict.fromkeys(endpoint for endpoint in self._endpoints if endpoint))

    @property
    def agent_pid(self) -> int | None:
        """Process id of this rank's agent; None where another rank of the host has it."""
        return None if self._agent is None else self._agent.pid

    def start(self, *, deltas: bool = False) -> None:
        """Starts the agents. Every rank; `offload` does it where it was not done. Idempotent.

        Args:
            deltas: returns when their delta codec is loaded too, which takes half a second, and some 12 s for the first
                time on a machine. Otherwise they load it when a receiver has asked for a delta: the versions until
                then go out in full.

        Raises:
            ConfigError: an agent can't listen where it was told to.
            EngineUnreachableError: an agent did not start. On every rank.
            TrainerRankError: a rank is gone.
        """
        if self._closed:
            raise StateError("this WeightManager is closed")
        if self._endpoints:
            return
        ranks = self._ranks = TrainingRanks(timeout_s=self._timeout_s)
        check_names(self._given_run_id, self._model_id)
        host = self._host_group or host_nonce()
        said = ranks.exchange(
            {"host": host, "run_id": self._given_run_id, "model_id": self._model_id, "life": uuid.uuid4().hex}
        )
        self._run_id = said[0]["run_id"] or f"run-{uuid.uuid4().hex[:12]}" if ranks.rank == 0 else ""
        self._hosts = [what["host"] for what in said]
        error: WeightSyncError | None = None
        endpoint = None
        if self._leads:
            try:
                config = msgspec.structs.replace(self._config, life=said[0]["life"], load_delta_codec=deltas)
                self._agent = AgentProcess(config, self._heard, answer_within_s=self._agent_timeout_s)
                endpoint = self._agent.start()
            except Exception as caught:
                error = as_weightsync_error(caught, StateError, "the agent did not start")
        if len({what["model_id"] for what in said}) > 1:
            error = error or ConfigError("training ranks made managers of different models: call them in one order")
        try:
            told = ranks.settle(error, endpoint=endpoint, run_id=self._run_id)
        except BaseException:
            self.close()
            raise
        self._run_id = told[0]["run_id"]
        self._endpoints = [what["endpoint"] for what in told]

    def offload(
        self, weights: Weights, version: int, rank: int | None = None, world_size: int | None = None
    ) -> OffloadReport:
        """Publishes the weights as they are now. Every rank, between two steps; returns when they may change again.

        Args:
            weights: a module; or `model.named_parameters()`, which has no buffers; or an extractor, which also knows
                names, DeepSpeed or Megatron.
            version: rises within the run.
            rank, world_size: checked against `torch.distributed`, where given.

        Returns:
            What was done. Where every segment was still read, nothing was published, and the trainer goes on.

        Raises:
            VersionError: a version that is not above the last. Nothing was changed.
            TrainerRankError: a rank is gone.
            WeightSyncError: extraction or a copy failed on some rank, told on every rank; nothing was published.
        """
        begun_s = now_s()
        self.start()
        assert self._ranks is not None
        ranks = self._ranks
        turn: WriteTurn | None = None
        try:
            error: WeightSyncError | None = None
            segment: str | None = None
            key, waited_s = "", 0.0
            boxes: Boxes = ()
            extractor: WeightExtractor | None = None
            named, parts = None, None
            try:
                check_call(version, after=self._newest, given=(rank, world_size), ranks=ranks)
                named = self._standing.listed(weights)
                parts = None if named is None else self._standing.tensors(named)
                if parts is None:
                    extractor = self._extractor(weights, named)
                    key = self._key(extractor)
                    boxes = self._boxes(extractor)
                else:  # all that they depend on is as it was
                    key, boxes = self._plan_of
            except Exception as caught:
                error = as_weightsync_error(caught, InvalidRequestError, "the weights can't be published")
            changed = (key, boxes) != self._plan_of
            told = ranks.settle(error, key=f"{version} {key}", changed=changed)
            if len({what["key"] for what in told}) > 1:
                raise InvalidRequestError("training ranks differ in version, tensors or dtype", rank=ranks.rank)
            if any(what["changed"] for what in told):
                parts = None
                extractor = extractor or self._extractor(weights, named)
                self._replan(extractor, key, boxes)
            if parts is None and extractor is not None and named is not None and not self._gathers:
                try:
                    self._standing.remember(named, self._specs, boxes)
                    parts = self._standing.tensors(named)
                except Exception as caught:
                    error = as_weightsync_error(caught, StateError, "the weights can't be read")
            with self.recorder.phase("wait for a segment"):
                wait_begun_s = now_s()
                if self._buffer is not None:
                    try:
                        turn = self._buffer.acquire(self._reset)
                        segment = None if turn is None else turn.segment.name
                    except Exception as caught:
                        error = as_weightsync_error(caught, StateError, "no segment")
                writes = self._buffer is not None
                why = self._buffer.why_not if self._buffer is not None and segment is None else None
                said = ranks.settle(error, segment=segment, writes=writes, why=why)
                waited_s = now_s() - wait_begun_s
            segments = {self._hosts[number]: what["segment"] for number, what in enumerate(said) if what["writes"]}
            if None in segments.values():
                self._newest = version
                return self._skipped(version, begun_s, waited_s, next(what["why"] for what in said if what["why"]))
            with self.recorder.phase("offload", detail=str(version)):
                copied_bytes = self._copy(parts if parts is not None else extractor or [], segments, turn)
            self._newest = version
            self._publish(version, segments, turn)
            turn = None
            return OffloadReport(
                version=Version(run_id=self._run_id, number=version),
                published=True,
                path="gather" if self._gathers else "shards",
                seconds=now_s() - begun_s,
                waited_s=waited_s,
                copied_bytes=copied_bytes,
            )
        finally:
            if turn is not None and self._buffer is not None:
                self._buffer.given_up(turn)

    def wait_published(self, version: int, *, timeout_s: float) -> None:
        """Waits until this host's agent has proved a version and serves it, or a newer one. Only the host's first rank.

        Raises:
            InvalidRequestError: the version is no number.
            StateError: it was not published, in words why; or another rank has the agent; or `start` has not come yet,
                or `close` has.
            DeadlineExceededError: it takes longer.
        """
        if self._closed or not self._endpoints:
            raise StateError(
                "this WeightManager is closed" if self._closed else "no agent was started: call start or offload first"
            )
        if self._agent is None:
            raise StateError("the agent of this host belongs to another rank")
        if type(version) is not int:
            raise InvalidRequestError(f"version is a whole number, not {version!r}")
        self._proofs.wait(version, timeout_s=timeout_s)

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
        facts = self._proofs.delta_to(wanted)
        return None if facts is None else DeltaReport(**facts)

    def close(self) -> None:
        """Ends the agent and unlinks the segments. Receivers go on with what they serve. Idempotent.

        What was not pulled yet can't be had any more: a notification of the last version with `wait_s` comes before.
        """
        if not self._closed and self._agent is not None and self._proofs.is_under_way(self._newest):
            _logger.warning("version %d is withdrawn before it was proved: no receiver has it", self._newest)
        self._closed = True
        self._proofs.close()
        if self._agent is not None:
            self._agent.close()
        if self._buffer is not None:
            self._buffer.close()
        self._segments.close()
        if self._agent is not None:
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()  # deltas of agents that were killed
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> WeightManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the steps ---

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of its host group."""
        assert self._ranks is not None
        return self._hosts.index(self._hosts[self._ranks.rank]) == self._ranks.rank

    @staticmethod
    def _extractor(weights: Weights, named: Named | None) -> WeightExtractor:
        """The extractor of the weights, which were listed already where they can be."""
        return extractor_of(weights if named is None else named)

    def _key(self, extractor: WeightExtractor) -> str:
        """What the layout depends on, in short."""
        said = msgspec.json.encode((extractor.metadata(self._dtype), extractor.can_shard_locally()))
        return str(xxhash.xxh3_128_hexdigest(said))

    def _boxes(self, extractor: WeightExtractor) -> Boxes:
        """What this rank would write, by the tensor's place in the metadata."""
        assert self._ranks is not None
        if extractor.can_shard_locally():
            return extractor.local_boxes()
        if self._ranks.rank:
            return ()
        return tuple((index, whole_box(spec.shape)) for index, spec in enumerate(extractor.metadata(self._dtype)))

    def _replan(self, extractor: WeightExtractor, key: str, boxes: Boxes) -> None:
        """Lays segments out anew: at the first offload, and when the model or its sharding has changed."""
        assert self._ranks is not None
        specs = extractor.metadata(self._dtype)
        said = self._ranks.exchange(
            {
                "host": self._hosts[self._ranks.rank],
                "boxes": [[index, list(box.offset), list(box.shape)] for index, box in boxes],
            }
        )
        plan = plan_hosts(specs, said)  # the same on every rank, and so is what it raises
        self._plan, self._plan_of, self._specs = plan, (key, boxes), TensorTable.of(specs)
        self._gathers = not extractor.can_shard_locally()
        self._standing.forget()
        self._segments.close()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._ranks.rank in plan.leaders:
            layout = plan.layouts[plan.leaders.index(self._ranks.rank)]
            self._buffer = PublicationBuffer(
                max(1, layout.total_bytes), guard_s=self._guard_s, let_go=self._segments.let_go
            )

    def _copy(
        self, weights: WeightExtractor | list[torch.Tensor], segments: dict[str, str], turn: WriteTurn | None
    ) -> int:
        """This rank's parts into its host's segment; bytes. Ends when every rank has copied.

        Args:
            weights: what extracts them, or the parts of the standing weights.

        Raises:
            WeightSyncError: on every rank, where one failed.
        """
        assert self._ranks is not None
        assert self._plan is not None
        error: WeightSyncError | None = None
        copied_bytes = 0
        try:
            host = self._hosts[self._ranks.rank]
            if host in segments:
                layout = self._plan.layouts[self._plan.hosts.index(host)]
                self._segments.aim(segments[host], layout, turn, self._model_id)
            if isinstance(weights, list):
                copied_bytes = self._segments.write_places(self._standing.places, weights)
            elif self._gathers:
                deadline = Deadline(self._timeout_s)
                copied_bytes = self._segments.write_gathered(
                    weights, dtype=self._dtype, ranks=self._ranks, deadline=deadline, recorder=self.recorder
                )
            else:
                copied_bytes = self._segments.write_shards(weights, dtype=self._dtype)
        except Exception as caught:
            error = as_weightsync_error(caught, StateError, "copying into shared memory failed")
        self._ranks.settle(error)
        return copied_bytes

    def _publish(self, version: int, segments: dict[str, str], turn: WriteTurn | None) -> None:
        if turn is None or self._buffer is None:
            return
        assert self._plan is not None
        assert self._ranks is not None
        named = Version(run_id=self._run_id, number=version)
        source = self._plan.leaders.index(self._ranks.rank)
        write_header(turn.segment.memory, self._plan.layouts[source], named, self._model_id)
        self._buffer.written(turn)
        publication = self._plan.publication(
            named, self._model_id, self._specs, endpoints=self._endpoints, segments=segments, block_bytes=BLOCK_BYTES
        )
        assert self._agent is not None
        self._agent.publish(publication, source)

    def _skipped(self, version: int, begun_s: float, waited_s: float, why: str) -> OffloadReport:
        _logger.warning("version %s was not published: %s", version, why)
        track = self.recorder.track
        self.recorder.add(
            PhaseRecord(name="not published", start_s=begun_s, end_s=now_s(), track=track, detail=str(version))
        )
        self._proofs.skipped(version, why)
        return OffloadReport(
            version=Version(run_id=self._run_id, number=version), published=False,
            path="gather" if self._gathers else "shards", seconds=now_s() - begun_s, waited_s=waited_s,
            copied_bytes=0, why=why,
        )  # fmt: skip

    def _reset(self) -> None:
        if self._agent is not None:
            self._agent.reset()

    def _heard(self, event: dict[str, Any]) -> None:
        """What the agent tells, in its thread."""
        self._proofs.hear(event)
        kind = event.get("event")
        if kind in ("restarted", "hung"):
            at = now_s()
            self.recorder.add(PhaseRecord(name=f"agent {kind}", start_s=at, end_s=at, track=self.recorder.track))
        for record in event.get("phases", ()):
            with contextlib.suppress(Exception):
                self.recorder.add(PhaseRecord(**record))
