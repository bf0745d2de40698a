"""Placement: which actors share a Ray bundle, and how long to wait for the cluster to have room."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from weightsync.cluster.ray_calls import running_ray
from weightsync.errors import ConfigError, DeadlineExceededError

Spread = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The bundles of a job, and who takes which.

    Attributes:
        bundles: resources of each bundle, as Ray names them.
        of_ranks: number of the bundle, by training rank.
        of_engines: number of the bundle, by engine.
    """

    bundles: tuple[dict[str, float], ...]
    of_ranks: tuple[int, ...]
    of_engines: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """What each actor takes of the cluster, and who sits with whom.

    Separate: each actor has a bundle of its own. Colocated: training rank i and engine i share bundle i, so they are
    on one node, and share one GPU where their shares of it add up to 1.

    Attributes:
        colocated: whether ranks and engines share bundles.
        rank_cpus: CPUs of a training rank; all amounts are Ray's bookkeeping and nothing enforces them.
        rank_gpus: GPUs, or the share of one, of a training rank.
        engine_cpus: CPUs of an engine.
        engine_gpus: GPUs, or the share of one, of an engine: of all its workers together.
        spread: how Ray lays bundles out over nodes.

    Raises:
        ConfigError: an amount is negative, an actor takes nothing at all (Ray refuses empty bundles), or Ray could not
            give a rank and its engine the same GPU.
    """

    colocated: bool = False
    rank_cpus: float = 1.0
    rank_gpus: float = 0.0
    engine_cpus: float = 1.0
    engine_gpus: float = 0.0
    spread: Spread = "PACK"

    def __post_init__(self) -> None:
        amounts = (self.rank_cpus, self.rank_gpus, self.engine_cpus, self.engine_gpus)
        if min(amounts) < 0:
            raise ConfigError(f"a placement has no negative amounts: {self}")
        if self.rank_cpus + self.rank_gpus == 0 or self.engine_cpus + self.engine_gpus == 0:
            raise ConfigError("every actor takes some CPUs or GPUs, however few: Ray has no empty bundles")
        if self.colocated and (self.rank_gpus or self.engine_gpus):
            total = self.rank_gpus + self.engine_gpus
            if self.rank_gpus == 0 or self.engine_gpus == 0 or total > 1:
                raise ConfigError(
                    f"colocated, a rank and its engine share one GPU: rank_gpus {self.rank_gpus:g} and engine_gpus "
                    f"{self.engine_gpus:g} are both above 0 and add up to at most 1 (Ray gives shares of one GPU alone)"
                )

    def layout(self, *, num_ranks: int, num_engines: int) -> Layout:
        """The bundles for so many ranks and engines.

        Raises:
            ConfigError: colocated, and not as many engines as ranks.
        """
        rank = _resources(self.rank_cpus, self.rank_gpus)
        engine = _resources(self.engine_cpus, self.engine_gpus)
        if not self.colocated:
            return Layout(
                bundles=(*[rank] * num_ranks, *[engine] * num_engines),
                of_ranks=tuple(range(num_ranks)),
                of_engines=tuple(range(num_ranks, num_ranks + num_engines)),
            )
        if num_ranks != num_engines:
            raise ConfigError(
                f"colocated, each training rank shares its bundle with an engine of one worker: {num_ranks} ranks go "
                f"with {num_ranks} engines, not {num_engines}; or place them separately"
            )
        both = {key: rank.get(key, 0) + engine.get(key, 0) for key in {**rank, **engine}}
        own = tuple(range(num_ranks))
        return Layout(bundles=(both,) * num_ranks, of_ranks=own, of_engines=own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetPlacement:
    """What a fleet's actors take, as Ray names it; all of it is Ray's bookkeeping.

    Attributes:
        controller: of the controller.
        service: of each service, e.g. all GPUs of a node.
        spread: how Ray lays the services out; "STRICT_SPREAD": each on a node of its own.

    Raises:
        ConfigError: an amount is negative, or nothing at all is taken (Ray refuses empty bundles).
    """

    controller: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    service: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    spread: Spread = "STRICT_SPREAD"

    def __post_init__(self) -> None:
        for whose in ("controller", "service"):
            amounts = getattr(self, whose).values()
            if not any(amounts) or min(amounts) < 0:
                raise ConfigError(f"{whose} takes some of the cluster, and nothing negative: {getattr(self, whose)}")


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    own = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU", "memory")}
    memory = {"memory": resources["memory"]} if "memory" in resources else {}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": own or None} | memory


@contextlib.contextmanager
def reserved(bundles: Sequence[Mapping[str, float]], *, spread: Spread, timeout_s: float) -> Iterator[Any]:
    """A placement group with these bundles; given back at the end.

    Raises:
        DeadlineExceededError: the cluster has no room for it in time; says what is asked, what there is and what of it
            is free. Nothing is left reserved.
    """
    ray = running_ray()
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=spread)
    try:
        if not group.wait(timeout_s):
            asked = ", ".join(_shown(bundle) for bundle in bundles)
            nodes = "; ".join(_shown(node["Resources"]) for node in ray.nodes() if node["Alive"])
            raise DeadlineExceededError(
                f"the cluster has no room for the {len(bundles)} bundles asked for ({asked}; {spread}) within "
                f"{timeout_s:g} s. Its nodes have: {nodes}. Free now: {_shown(ray.available_resources())}. Ask for "
                "less, add nodes, or end what holds them",
                state_left="nothing is reserved",
            )
        yield group
    finally:
        with contextlib.suppress(Exception):  # Ray is gone, and with it what was reserved; its own words are no reason
            ray.util.remove_placement_group(group)


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {key: amount for key, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def _shown(resources: Mapping[str, float]) -> str:
    """Resources without Ray's own bookkeeping entries."""
    own = {
        key: amount
        for key, amount in resources.items()
        if ":" not in key and key != "object_store_memory" and "_group" not in key
    }
    return " ".join(f"{key} {amount:g}" for key, amount in sorted(own.items())) or "nothing"
