"""What answers at a URL, by its `/status`: a controller or a rollout service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsync.errors import ConfigError
from weightsync.plan.names import did_you_mean


def is_controller(url: str, status: Mapping[str, Any], model_ids: Iterable[str], *, controller: bool = False) -> bool:
    """Whether it is a controller.

    Args:
        url, status: what it has answered there.
        model_ids: that it has to have.
        controller: nothing else is wanted: of a service no model is looked for.

    Raises:
        ConfigError: it is neither, or has not one of these models.
    """
    models = status.get("models")
    if not isinstance(models, dict):
        raise ConfigError(f"{url} is neither a rollout service nor a controller: look at the port")
    found = "instances" in status
    for model_id in model_ids if found or not controller else ():
        if model_id not in models:
            raise ConfigError(
                f"{url} has no model {model_id!r}:{did_you_mean(model_id, models)} it has "
                f"{', '.join(map(repr, models)) or 'none'}"
            )
    return found
