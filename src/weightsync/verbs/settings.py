"""What the three verbs share of their arguments: the configuration and the token."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError
from weightsync.net.auth import checked_token
from weightsync.plan.names import closest

if TYPE_CHECKING:
    import torch

TOKEN_VARIABLE = "WEIGHTSYNC_TOKEN"
KEEP_DTYPE = "keep"
"""As a `dtype`: the trainer's own."""

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | WeightSyncConfig | None


_KIND = re.compile(r"^\w+\+(?=https?:)")
_THIS_MACHINE = re.compile(r"//(127\.0\.0\.1|\[::1\]|localhost)(?=[:/]|$)", re.IGNORECASE)


def check_options(verb: Callable[..., Any], options: Mapping[str, Any], further: Callable[..., Any]) -> None:
    """Raises TypeError for what neither a verb nor what it makes has as an argument: it names the closest one."""
    known = inspect.signature(further).parameters
    for name in options.keys() - known.keys():
        near = closest(name, [*inspect.signature(verb).parameters, *known])
        hint = f": did you mean {near!r}?" if near else f"; besides its own: {', '.join(known)}"
        raise TypeError(f"{verb.__name__}() takes no argument {name!r}{hint}")


def loaded(source: ConfigSource) -> WeightSyncConfig:
    """The configuration; the defaults where there is none.

    Raises:
        ConfigError: see `WeightSyncConfig.load`.
    """
    return WeightSyncConfig() if source is None else WeightSyncConfig.load(source)


def with_extract(config: WeightSyncConfig, *, dtype: str | torch.dtype | None) -> WeightSyncConfig:
    """The configuration with what an argument says of the dtype: its name, or torch's own.

    Raises:
        ConfigError: it is no dtype that weights convert to.
    """
    if dtype is None:
        return config
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    settings = config.extract.model_dump(exclude_unset=True) | {"dtype": None if name == KEEP_DTYPE else name}
    return config.model_copy(update={"extract": type(config.extract)(**settings)})


def with_transfer(config: WeightSyncConfig, **given: Any) -> WeightSyncConfig:
    """The configuration with what arguments say of the transfer; None says nothing.

    Raises:
        ConfigError: a value is wrong, or contradicts another one.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    known = config.transfer.model_dump(exclude_unset=True)  # what nobody has said stays unsaid
    return config.model_copy(update={"transfer": type(config.transfer)(**(known | changes))})


def token_of(given: str | None) -> str | None:
    """The token that was given, else that of the environment, else none.

    Raises:
        ConfigError: a header can't carry it.
    """
    return checked_token(given if given is not None else os.environ.get(TOKEN_VARIABLE) or None)


def as_list(given: str | Sequence[str] | None, configured: Sequence[str], *, name: str) -> list[str]:
    """URLs as a list; a single one may stand for itself.

    Raises:
        ConfigError: one is no text, or comes twice.
    """
    urls = [given] if isinstance(given, str) else list(configured if given is None else given)
    for url in urls:
        if not isinstance(url, str):
            raise ConfigError(f"{name} has URLs, and not {url!r:.80}")
    stripped = [url.rstrip("/") for url in urls]
    check_once(stripped, name=name)
    return stripped


def check_once(urls: Iterable[str], *, name: str) -> None:
    """Refuses one server under two names: two engines that are one wait for each other until a timeout.

    Raises:
        ConfigError: one comes twice, or as localhost and as 127.0.0.1.
    """
    seen: dict[str, str] = {}
    for url in urls:
        place = _THIS_MACHINE.sub("//localhost", _KIND.sub("", url)).rstrip("/")
        if (before := seen.get(place)) is not None:
            if "@" in url + before:  # there may be a password in it
                raise ConfigError(f"{name} has a URL twice, which has an '@' and is not shown here")
            raise ConfigError(f"{name} has {url} twice" + ("" if before == url else f", the first time as {before}"))
        seen[place] = url
