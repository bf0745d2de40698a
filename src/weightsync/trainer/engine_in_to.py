"""What is said where `to=` names an engine: it would never fetch anything."""

from __future__ import annotations

from weightsync.errors import ConfigError
from weightsync.handles.by_url import runs_at


def refuse_an_engine(url: str, model_id: str, *, token: str | None, verify: bool | str, timeout_s: float) -> None:
    """Asks who answers there.

    Raises:
        ConfigError: it is an engine.
    """
    named = runs_at(url, token=token, verify=verify, timeout_s=timeout_s)
    if named is not None:
        raise ConfigError(f"{url} in to= is an engine: {instead(named, model_id)}", peer=url)


def instead(engine: str, model_id: str) -> str:
    """What to do with an engine that is in `to`."""
    return (
        f"engines are not told of versions, and fetch none. weightsync.push(model, {engine!r}) brings it each version; "
        f"or start a host beside it, weightsync serve --engine {model_id}={engine}, and name in to= that host, or the "
        "controller of its fleet (serve --controller)"
    )
