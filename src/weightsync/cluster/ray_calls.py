"""What is asked of Ray: the one file that imports it. What actors answer is read by `actors.ActorHandle`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from weightsync.errors import StateError
from weightsync.optional import imported

_MAX_WORDS = 400
_NEEDS = "this needs Ray: pip install 'weightsync[ray]'"


def load_ray() -> Any:
    """The `ray` package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    for part in ("exceptions", "util", "util.placement_group", "util.scheduling_strategies"):
        imported(f"ray.{part}", _NEEDS)
    return imported("ray", _NEEDS)


def running_ray() -> Any:
    """The `ray` package of a process that is connected to a cluster.

    Raises:
        StateError: it is not. Ray would start a cluster of its own by itself, with settings that nobody chose.
    """
    ray = load_ray()
    if not ray.is_initialized():
        raise StateError("this process is connected to no Ray cluster: call ray.init() first")
    return ray


def wait_any(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Those of `refs` that are settled, as soon as one is; empty where none is in time."""
    ready, _ = load_ray().wait(list(refs), num_returns=1, timeout=timeout_s)
    return list(ready)


def kill(actor: Any) -> None:
    """Ends an actor's process at once, for good. An actor that is gone is no error."""
    load_ray().kill(actor, no_restart=True)


def here() -> tuple[str, str]:
    """Id and IP address of the node that this process runs on, as its Ray cluster knows them."""
    ray = running_ray()
    return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address())


def is_restarted() -> bool:
    """Whether this process is that of an actor which Ray has started again."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    try:
        context = ray.get_runtime_context()
        return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)
    except Exception:  # the cluster does not answer
        return False


def words_of(error: BaseException) -> str:
    """The text of one of Ray's exceptions on one line; its head and its end say most."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > _MAX_WORDS:
        text = f"{text[: _MAX_WORDS // 2]} ... {text[-_MAX_WORDS // 2 :]}"
    return f"{type(error).__name__}: {text}"
