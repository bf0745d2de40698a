"""launch: a whole job on Ray, from two factories: training ranks, engines, and the controller's two calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.cluster.actors import Whereabouts, end
from weightsync.cluster.controller_actor import RayController
from weightsync.cluster.engine_actor import LOOPBACK, EngineActor, EngineContext, EngineFactory, RayEngine
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import Placement, reserved
from weightsync.cluster.ranks import RayRank, ask_all
from weightsync.cluster.ray_calls import here, kill, running_ray
from weightsync.cluster.trainer_actor import Meeting, TrainerActor, TrainerFactory
from weightsync.config import WeightSyncConfig, select_strategy
from weightsync.errors import ConfigError
from weightsync.types import Deadline


@contextlib.contextmanager
def launch(
    trainer: TrainerFactory,
    engine: EngineFactory,
    *,
    num_ranks: int,
    num_engines: int,
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    controller: RayController | None = None,
    placement: Placement | None = None,
    backend: str = "gloo",
    start_timeout_s: float = 120.0,
    collective_timeout_s: float = 600.0,
    rank_options: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> Iterator[RayWeightSync]:
    """Starts training ranks and engines as actors; ends them, and gives back what they held, at the end.

    Everything that listens stays on loopback where all actors and this process are on one node, and listens on the
    nodes' cluster addresses otherwise. The engines are "engine-0", "engine-1", ...

    Args:
        trainer: builds a rank's trainer; see `TrainerFactory`.
        engine: builds an engine; see `EngineFactory`.
        num_ranks: training ranks.
        num_engines: engines.
        config: how weights move; a path to YAML; or the name of a strategy, e.g. "broadcast". A `master_addr` in it
            wins over the one that would be chosen here.
        controller: orders the pushes, see `launch_controller`: the ranks take them in their own step, by
            `weightsync.push(weights, context.engines, config=context.config, token=context.token)`. Where it is not
            given, `push.controller` of `config` counts, with WEIGHTSYNC_TOKEN in the ranks' environment; without
            either the driver calls `sync_weights`.
        placement: what the actors take; by default a CPU each.
        backend: of the trainer's default group: "gloo" or "nccl".
        start_timeout_s: until everything is there: room in the cluster, processes, models.
        collective_timeout_s: of the default group's collectives, as in `torch.distributed.init_process_group`.
        rank_options: Ray's own options of the ranks' actors, e.g. runtime_env.
        engine_options: the same for the engines, e.g. max_restarts.

    Yields:
        The job's driver: call `initialize()`, then `sync_weights(version)`; with a controller `run(...)` alone.

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
    if controller is not None:
        push = settings.push.model_copy(update={"controller": controller.url})
        settings = settings.model_copy(update={"push": push})
    layout = placement.layout(num_ranks=num_ranks, num_engines=num_engines)
    deadline = Deadline(start_timeout_s)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(reserved(layout.bundles, spread=placement.spread, timeout_s=deadline.remaining_s))

        def engine_actor(engine_id: str) -> Any:
            index = int(engine_id.rpartition("-")[2])
            if engine_id in engines:
                kill(engines[engine_id].actor)
            return EngineActor.start(
                EngineContext(engine_id=engine_id, index=index),
                engine,
                bundle=(group, layout.of_engines[index]),
                **{"num_cpus": placement.engine_cpus, "num_gpus": placement.engine_gpus, **(engine_options or {})},
            )

        ranks: list[RayRank] = []
        engines: dict[str, RayEngine] = {}
        stack.callback(lambda: end(list(engines.values())))
        made: list[RayWeightSync] = []

        def ended(kind: type[BaseException] | None, *_: object) -> None:
            in_order = False
            try:
                in_order = kind is None and all(each.is_idle() for each in made)
            finally:
                end(ranks, in_order=in_order)

        stack.push(ended)  # first: a last version that was not due is pushed then, by all ranks, where all is in order
        for index in range(num_engines):
            name = f"engine-{index}"
            engines[name] = RayEngine(engine_actor(name), engine_id=name)
        for index in range(num_ranks):
            actor = TrainerActor.start(
                index,
                num_ranks,
                bundle=(group, layout.of_ranks[index]),
                **{"num_cpus": placement.rank_cpus, "num_gpus": placement.rank_gpus, **(rank_options or {})},
            )
            ranks.append(RayRank(actor, index))
        places = [rank.ready(timeout_s=deadline.check(f"place for {rank.name}")) for rank in ranks]
        of_engines = [each.ready(timeout_s=deadline.check(f"{name} built")) for name, each in engines.items()]
        for each in engines.values():
            each.loopback = {place.node_id for place in (*places, *of_engines)} == {here()[0]}
        if "master_addr" not in settings.transfer.model_fields_set and "cuda_ipc" not in select_strategy(settings):
            address = meeting_address(places[0], of_engines)
            transfer = settings.transfer.model_copy(update={"master_addr": address})
            settings = settings.model_copy(update={"transfer": transfer})
        meeting = _meeting(ranks[0], places, backend, collective_timeout_s, deadline)
        token = None if controller is None else controller.address.token
        of_join = (meeting, settings.model_dump(exclude_unset=True), token, tuple(engines.values()), trainer)
        ask_all(ranks, "join", *of_join, deadline=deadline, kind=type(None))
        made.append(RayWeightSync(ranks, list(engines.values()), config=settings, start_engine=engine_actor))
        yield made[0]


def config_of(config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> WeightSyncConfig:
    """A configuration from itself, a mapping, a path, or the name of a strategy.

    Raises:
        ConfigError: it is wrong, of another method, or names engines, which are actors here.
    """
    if isinstance(config, str) and not config.endswith((".yaml", ".yml")):
        return WeightSyncConfig.load({"transfer": {"strategy": config}})
    settings = WeightSyncConfig.load({} if config is None else config)
    if settings.sync_method != "push":
        raise ConfigError(
            f"these ranks push to these engines: sync_method is 'push', not {settings.sync_method!r}; launch_fleet "
            "starts services that pull, launch_controller a controller of any method",
            keys=["sync_method"],
        )
    settings = settings.for_method("push")
    if settings.push.engines:
        raise ConfigError(
            "push.engines names engines, and those of a job on Ray are its actors: leave it "
            "out, or call weightsync.push in your own actors",
            keys=["push.engines"],
        )
    return settings


def meeting_address(host: Whereabouts, guests: list[Whereabouts]) -> str:
    """Where `host` listens for `guests`: loopback where all are on its node, its cluster address otherwise."""
    return LOOPBACK if all(guest.node_id == host.node_id for guest in guests) else host.node_ip


def _meeting(rank_0: RayRank, places: list[Whereabouts], backend: str, timeout_s: float, deadline: Deadline) -> Meeting:
    address = meeting_address(places[0], places)
    left = deadline.check("store of the training ranks")
    port = rank_0.urgent("open_store", address, timeout_s, kind=int, timeout_s=left)
    return Meeting(address=address, port=port, backend=backend, timeout_s=timeout_s)
