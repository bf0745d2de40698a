"""launch: a whole job on Ray, from two factories: training ranks, engines, and the controller's two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.cluster.client import RayEngine, Whereabouts
from weightsync.cluster.engine_actor import URGENT, EngineContext, EngineFactory, start_engine
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import Placement, reserved
from weightsync.cluster.ranks import RanksFailedError, RayRank, ask_all
from weightsync.cluster.ray_calls import get, kill, running_ray, submit
from weightsync.cluster.trainer_actor import POST, Meeting, TrainerFactory, start_trainer
from weightsync.cluster.wire import read_answer
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.types import Deadline

_CLOSE_S = 3.0
_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def launch(
    trainer: TrainerFactory,
    engine: EngineFactory,
    *,
    num_ranks: int,
    num_engines: int,
    config: WeightSyncConfig | Mapping[str, Any] | str | None = None,
    placement: Placement | None = None,
    backend: str = "gloo",
    start_timeout_s: float = 120.0,
    collective_timeout_s: float = 600.0,
    rank_options: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> Iterator[RayWeightSync]:
    """Starts training ranks and engines as actors; ends them, and gives back what they held, at the end.

    Everything that listens stays on loopback where all actors are on one node, and listens on the nodes' cluster
    addresses otherwise. The engines are "engine-0", "engine-1", ...

    Args:
        trainer: builds a rank's trainer; see `TrainerFactory`.
        engine: builds an engine; see `EngineFactory`.
        num_ranks: training ranks.
        num_engines: engines.
        config: how weights move; or the name of a strategy, e.g. "broadcast". A `master_addr` in it wins over the
            one that would be chosen here.
        placement: what the actors take; by default a CPU each.
        backend: of the trainer's default group: "gloo" or "nccl".
        start_timeout_s: until everything is there: room in the cluster, processes, models.
        collective_timeout_s: of the default group's collectives, as in `torch.distributed.init_process_group`.
        rank_options: Ray's own options of the ranks' actors, e.g. runtime_env.
        engine_options: the same for the engines, e.g. max_restarts.

    Yields:
        The controller: call `initialize()`, then `sync_weights(version)`.

    Raises:
        StateError: no ray.init() before this.
        DeadlineExceededError: something was not there in time; says what. Nothing is left running.
        EngineUnreachableError, TrainerRankError: an actor died while it started. As above.
        WeightSyncError: what a factory raised. As above.
    """
    running_ray()
    settings, placement = config_of(config), placement or Placement()
    if num_ranks < 1 or num_engines < 1:
        raise ConfigError(f"a job has at least one rank and one engine, not {num_ranks} and {num_engines}")
    layout = placement.layout(num_ranks=num_ranks, num_engines=num_engines)
    deadline = Deadline(start_timeout_s)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(reserved(layout, spread=placement.spread, timeout_s=deadline.remaining_s))

        def engine_actor(engine_id: str) -> Any:
            index = int(engine_id.rpartition("-")[2])
            if engine_id in engines:
                kill(engines[engine_id].actor)
            return start_engine(
                EngineContext(engine_id=engine_id, index=index),
                engine,
                bundle=(group, layout.of_engines[index]),
                **{"num_cpus": placement.engine_cpus, "num_gpus": placement.engine_gpus, **(engine_options or {})},
            )

        ranks: list[RayRank] = []
        engines: dict[str, RayEngine] = {}
        stack.callback(_end, ranks, engines)
        for index in range(num_engines):
            name = f"engine-{index}"
            engines[name] = RayEngine(engine_actor(name), engine_id=name)
        for index in range(num_ranks):
            actor = start_trainer(
                index,
                num_ranks,
                bundle=(group, layout.of_ranks[index]),
                **{"num_cpus": placement.rank_cpus, "num_gpus": placement.rank_gpus, **(rank_options or {})},
            )
            ranks.append(RayRank(actor, index))
        places = [rank.where(timeout_s=deadline.check(f"place for {rank.name}")) for rank in ranks]
        of_engines = [each.ready(timeout_s=deadline.check(f"{name} built")) for name, each in engines.items()]
        if "master_addr" not in settings.transfer.model_fields_set:
            address = meeting_address(places[0], of_engines)
            transfer = settings.transfer.model_copy(update={"master_addr": address})
            settings = settings.model_copy(update={"transfer": transfer})
        meeting = _meeting(ranks[0], places, backend, collective_timeout_s, deadline)
        _join(ranks, meeting, settings, engines, trainer, deadline)
        sync = RayWeightSync(ranks, list(engines.values()), config=settings, start_engine=engine_actor)
        stack.callback(sync.close)
        yield sync


def config_of(config: WeightSyncConfig | Mapping[str, Any] | str | None) -> WeightSyncConfig:
    """A configuration from itself, a mapping, or the name of a strategy.

    Raises:
        ConfigError: it is wrong.
    """
    if isinstance(config, str):
        return WeightSyncConfig.load({"transfer": {"strategy": config}})
    return WeightSyncConfig.load({} if config is None else config)


def meeting_address(host: Whereabouts, guests: list[Whereabouts]) -> str:
    """Where `host` listens for `guests`: loopback where all are on its node, its cluster address otherwise."""
    return _LOOPBACK if all(guest.node_id == host.node_id for guest in guests) else host.node_ip


def _meeting(rank_0: RayRank, places: list[Whereabouts], backend: str, timeout_s: float, deadline: Deadline) -> Meeting:
    address = meeting_address(places[0], places)
    left = deadline.check("store of the training ranks")
    body = rank_0.get(rank_0.submit("open_store", address, timeout_s), "open_store", timeout_s=left)
    port = read_answer(body, int, peer=rank_0.name, what="open_store")
    return Meeting(address=address, port=port, backend=backend, timeout_s=timeout_s)


def _join(
    ranks: list[RayRank],
    meeting: Meeting,
    config: WeightSyncConfig,
    engines: Mapping[str, RayEngine],
    trainer: TrainerFactory,
    deadline: Deadline,
) -> None:
    def read(rank: RayRank, body: Any) -> None:
        return read_answer(body, type(None), peer=rank.name, what="join")

    arguments = (meeting, config.model_dump(exclude_unset=True), tuple(engines.values()), trainer)
    try:
        ask_all(ranks, "join", *arguments, deadline=deadline, read=read)
    except RanksFailedError as failed:
        raise failed.error from None


def _end(ranks: list[RayRank], engines: Mapping[str, RayEngine]) -> None:
    """Lets ranks and engines give back what outlives a process (segments, workers of their own), then ends them."""
    actors = [(rank.name, rank.actor, POST) for rank in ranks]
    actors += [(name, engine.actor, URGENT) for name, engine in engines.items()]
    closing = []
    for name, actor, group in actors:
        with contextlib.suppress(WeightSyncError):
            closing.append((name, submit(actor, "close", group=group, peer=name)))
    deadline = Deadline(_CLOSE_S)
    for name, ref in closing:
        with contextlib.suppress(WeightSyncError):
            get(ref, timeout_s=deadline.remaining_s, peer=name, what="close", lost=WeightSyncError)
    for _, actor, _ in actors:
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            kill(actor)
