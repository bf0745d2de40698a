"""What a `WeightManager` refuses before anything is started or written."""

from __future__ import annotations

import json

from weightsync.errors import ConfigError, InvalidRequestError, VersionError
from weightsync.net.auth import check_exposure
from weightsync.net.http_edge import checked_url
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types.agent_config import AgentConfig
from weightsync.types.control import UNNAMED
from weightsync.types.deadline import check_wait_s
from weightsync.types.dtypes import dtype_name
from weightsync.types.manifest import MAX_VERSION
from weightsync.types.spec import check_config_id

_MAX_STAMP_BYTES = 500


def check_settings(
    model_id: str, dtype: str | None, *, guard_s: float, timeout_s: float, agent_timeout_s: float, lease_s: float
) -> None:
    """Raises ConfigError where a name is empty or a dtype is none, or where waits make no sense together."""
    if dtype is not None:
        try:
            dtype_name(dtype)
        except InvalidRequestError as error:
            raise ConfigError(f"dtype: {error.message}") from None
    check_config_id("model_id", model_id)
    check_wait_s("timeout_s", timeout_s)
    check_wait_s("agent_timeout_s", agent_timeout_s)
    if lease_s != 0:
        check_wait_s("lease_s", lease_s)
    if not 0 <= guard_s < timeout_s:
        raise ConfigError(f"guard_s is 0 or more seconds, and less than timeout_s ({timeout_s:g}), not {guard_s}")


def check_reachable(config: AgentConfig) -> None:
    """Raises ConfigError where receivers could not reach an agent, or strangers could."""
    check_exposure(config.host, config.token)
    if type(config.port) is not int or not 0 <= config.port < 1 << 16:
        raise ConfigError(f"port is a whole number from 0 to 65535, not {config.port!r}")
    if config.host in ("0.0.0.0", "::") and config.advertise is None:
        raise ConfigError(
            f"host {config.host!r} is no address that receivers can call: give a host name as well (advertise=, or "
            "--advertise)"
        )
    if config.advertise is not None:
        _check_name(config.advertise)
    if (config.certificate is None) != (config.key is None):
        raise ConfigError("TLS needs a certificate and a key")


def _check_name(advertise: str) -> None:
    """Whoever fetches reads it as the host of a URL, where an address with colons stands in brackets."""
    try:
        if not advertise or set(advertise) & set("/ @[]?#"):
            raise ConfigError("there is more in it than a host")
        checked_url(f"http://{f'[{advertise}]' if ':' in advertise else advertise}", whose="its")
    except ConfigError as error:
        raise ConfigError(
            f"advertise is a host name or an address alone, without a port or a scheme: {advertise!r}"
        ) from error


def check_deltas(config: AgentConfig) -> None:
    """Raises ConfigError where a number for deltas is none."""
    for name, value in (
        ("delta_budget_bytes", config.delta_budget_bytes),
        ("full_sync_interval", config.full_sync_interval),
    ):
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"{name} is a whole number, 0 or more, not {value!r}")
    if config.delta_device is not None and (not isinstance(config.delta_device, str) or not config.delta_device):
        raise ConfigError(f"delta_device is a device as torch names it, 'cuda' say, not {config.delta_device!r}")


def check_run_id(run_id: str | None) -> None:
    """Raises ConfigError where it is none, or a controller's own."""
    if run_id is not None:
        check_config_id("run_id", run_id)
    if run_id == UNNAMED:
        raise ConfigError(f"run_id {run_id!r} is what a controller calls a run that nobody has named: take another one")


def check_names(run_id: str | None, model_id: str) -> None:
    """Raises ConfigError where they are none, or don't fit into a segment's stamp."""
    check_run_id(run_id)
    if len(json.dumps([run_id or "", 2**63, model_id])) > _MAX_STAMP_BYTES:
        raise ConfigError("run_id and model_id are too long together to be written into a segment")


def check_call(version: int, *, after: int, given: tuple[int | None, int | None], ranks: TrainingRanks) -> None:
    """Checks one `offload`.

    Args:
        version: that is to be published.
        after: the newest so far; -1 where there is none.
        given: rank and world size as the caller says; None is not checked.
        ranks: as `torch.distributed` says.

    Raises:
        InvalidRequestError: the version is no number.
        VersionError: it does not rise.
        ConfigError: ranks differ.
    """
    if type(version) is not int:
        raise InvalidRequestError(f"version is a whole number, not {version!r}")
    if version > MAX_VERSION:
        raise InvalidRequestError(f"version is at most 2**63 - 1, not {str(version)[:40]}")
    if version <= after or version < 0:
        raise VersionError(
            f"versions rise within a run: {version} comes after {after}; going back to older weights is publishing "
            "them under a new version",
            version=str(version),
        )
    for name, value, known in zip(("rank", "world_size"), given, (ranks.rank, ranks.world_size), strict=True):
        if value is not None and value != known:
            raise ConfigError(
                f"{name} {value} was given, torch.distributed's default group says {known}: call init_process_group "
                "first, or leave it out"
            )
