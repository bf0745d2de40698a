"""Everything that is asked of Ray: the one file that imports it, and where its exceptions become ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.errors import (
    DeadlineExceededError,
    MissingDependencyError,
    StateError,
    UnsupportedError,
    WeightSyncError,
)

Lost = Callable[[str], WeightSyncError]
"""Makes the typed error of a peer that is gone from the words that Ray has for it."""
_MAX_WORDS = 400


def load_ray() -> Any:
    """The `ray` package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs Ray, which can't be imported ({error}): pip install 'weightsync[ray]'"
        ) from error
    return ray


def running_ray() -> Any:
    """The `ray` package of a process that is connected to a cluster.

    Raises:
        StateError: it is not. Ray would start a cluster of its own by itself, with settings that nobody chose.
    """
    ray = load_ray()
    if not ray.is_initialized():
        raise StateError("this process is connected to no Ray cluster: call ray.init() first")
    return ray


def get(ref: Any, *, timeout_s: float, peer: str, what: str, lost: Lost) -> Any:
    """The value of `ref`. Safe to call from several threads.

    Args:
        ref: an object reference.
        timeout_s: how long to wait; 0 looks and does not wait.
        peer: who makes the value.
        what: what was asked, for messages.
        lost: makes the error of a peer that is gone.

    Raises:
        DeadlineExceededError: no value in time; the call goes on over there.
        UnsupportedError: the actor has no such method, can't take this call, or returned what Ray can't carry.
        WeightSyncError: of `lost`: the actor, its worker process or its node is gone, or was never started.
    """
    ray = load_ray()
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(f"{peer} did not answer {what} within {timeout_s:g} s", peer=peer) from error
    except ray.exceptions.RayTaskError as error:  # our actors answer with typed errors and raise nothing
        raise UnsupportedError(f"{peer} can't answer {what}: {_words(error)}", peer=peer) from error
    except ray.exceptions.RaySystemError as error:  # of values: what was returned can't be unpickled here
        raise UnsupportedError(f"the answer of {peer} to {what} can't be read: {_words(error)}", peer=peer) from error
    except ray.exceptions.RayError as error:
        raise lost(f"during {what}: {_words(error)}") from error


def submit(actor: Any, method: str, *args: Any, group: str, peer: str) -> Any:
    """Calls a method of one of our actors and returns the reference of its answer at once.

    Args:
        actor: its handle.
        method: name of the method.
        args: its arguments.
        group: the concurrency group that runs it.
        peer: who the actor is.

    Raises:
        UnsupportedError: the actor has no such method: it is an actor of another kind.
    """
    try:
        return getattr(actor, method).options(concurrency_group=group).remote(*args)
    except (AttributeError, ValueError, TypeError) as error:
        raise UnsupportedError(f"{peer} can't be asked for {method}: {_words(error)}", peer=peer) from error


def wait_any(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Those of `refs` that are settled, as soon as one is; empty where none is in time."""
    ready, _ = load_ray().wait(list(refs), num_returns=1, timeout=timeout_s)
    return list(ready)


def start_actor(
    kind: type, *args: Any, groups: Mapping[str, int], bundle: tuple[Any, int] | None = None, **options: Any
) -> Any:
    """Starts an actor and returns its handle at once.

    Args:
        kind: a plain class.
        args: of its constructor.
        groups: concurrency groups: name and number of threads.
        bundle: placement group and number of the bundle it takes its resources from.
        options: Ray's own, e.g. num_cpus, num_gpus, runtime_env, max_restarts.
    """
    ray = running_ray()
    if bundle is not None:
        options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=bundle[0], placement_group_bundle_index=bundle[1]
        )
    return ray.remote(concurrency_groups=dict(groups))(kind).options(**options).remote(*args)


def kill(actor: Any) -> None:
    """Ends an actor's process at once, for good. An actor that is gone is no error."""
    load_ray().kill(actor, no_restart=True)


def here() -> tuple[str, str]:
    """Id and IP address of the node that this process runs on, as its Ray cluster knows them."""
    ray = running_ray()
    return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address())


def _words(error: BaseException) -> str:
    """The text of one of Ray's exceptions on one line; its head and its end say most."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > _MAX_WORDS:
        text = f"{text[: _MAX_WORDS // 2]} ... {text[-_MAX_WORDS // 2 :]}"
    return f"{type(error).__name__}: {text}"
