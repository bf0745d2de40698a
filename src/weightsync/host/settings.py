"""RolloutConfig: how a rollout service works."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Self

from weightsync.config import ServeConfig, WeightSyncConfig
from weightsync.errors import ConfigError
from weightsync.handles.stepped import check_choice
from weightsync.memory import ServingLease
from weightsync.net.auth import check_exposure, checked_token, is_loopback
from weightsync.net.http_edge import checked_url
from weightsync.net.routes import address_towards, url_towards
from weightsync.net.server import TlsFiles
from weightsync.objects.urls import is_store_url
from weightsync.transfer.stream_door import MAX_STREAMS_A_TRANSFER
from weightsync.types.deadline import check_wait_s
from weightsync.types.spec import check_config_id
from weightsync.types.transfer_messages import MODES, Transport

_MAX_PEERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a service works.

    Attributes:
        service_id: name of this host's service, for operators of trainers.
        host: where its HTTP listens; beyond loopback only with a token.
        port: of its HTTP; 0: the system's choice.
        token: bearer token that its callers show.
        tls: certificate and key; it speaks https then.
        senders: endpoints of agents, or places in object stores (s3://bucket/run), that may be called for every model;
            `/register_sender` adds other agents for one.
        sender_token: the agents' bearer token. A service that has one and no `token` of its own refuses
            `/register_sender` of endpoints that are not in `senders`: it would give it to anybody.
        sender_verify: see `AgentClient`.
        trust_key: file with the public key (`weightsync keygen`) whose manifests are taken from object stores among the
            senders; None: anybody's.
        pull_timeout_s: deadline of one pull.
        load_timeout_s: deadline of one engine's load, pause included.
        pause_timeout_s: how long an engine may take to finish running generations.
        patience_s: after so long a version that was announced, and that its agent has not, is given up; and another
            agent that has more of the run is pulled from.
        poll_s: None: senders are asked until each has named a version, and from then on where the service is told to.
            A number: what they publish is followed though nobody notifies, as with `weightsync agent`. A request waits
            at each until there is something newer; where it lets none wait, it is asked every so many seconds.
        transport: "tcp" or "shm" alone; chosen by itself where not given.
        mode: "full"; "delta" for deltas wherever the agent has them, on the same host too; "auto" for deltas over TCP,
            and for the publisher's own memory on the same host.
        patch_limit: engines that take patches are given the changed elements alone where these, with their positions,
            have at most this share of the model's bytes; 0: never.
        num_streams: TCP connections of a pull.
        path_root: for engines that load from a path: a folder in which the version that is being loaded is
            `<model_id>/<run_id>-<version>/model.safetensors`, for as long as it is. See `host.version_path`.
        controller: URL of the controller whose fleet it is part of: it loads what that lets it commit, and answers
            while that lends it the right to.
        controller_token: the controller's bearer token.
        controller_verify: see `AgentClient`.
        advertise: URL by which the controller reaches it; its own where not given, with the address that leads there
            where it listens at all.
        lease: what its engines look at before they answer, see `ServingLease`. In a fleet it is lent by the controller.
            Without a controller this service lends it: an engine that has started since its service saw to it
            refuses, and so does each before its first version.
        lease_s: without a controller: for how long engines answer after their service was last alive.
        relay: whether this host takes blocks from others of its kind and serves them its own, see `host.relay`. None:
            where it listens beyond loopback, as `host` says, so that nothing is opened that was not.
        relay_host: where it serves them; None: `host`, or, where that is loopback and the agents are not, the address
            towards them, if there is a `sender_token`.
        relay_port: its port there; 0 lets the system choose.
        zone: rack, room or data centre: hosts of one zone ask each other first.
        upload_bytes_s: no more is sent to other hosts in a second; None: no limit.
        max_peers: hosts that are asked at one time.

    Raises:
        ConfigError: a time makes no sense, a token can't be one, or `advertise` is no URL.
    """

    service_id: str = "rollout"
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)
    tls: TlsFiles | None = None
    senders: tuple[str, ...] = ()
    sender_token: str | None = dataclasses.field(default=None, repr=False)
    sender_verify: bool | str = True
    trust_key: str | None = None
    pull_timeout_s: float = 120.0
    load_timeout_s: float = 120.0
    pause_timeout_s: float = 10.0
    patience_s: float = 10.0
    poll_s: float | None = None
    transport: Transport | None = None
    mode: str = "auto"
    patch_limit: float = 0.5
    num_streams: int = 6
    path_root: str | None = None
    controller: str | None = None
    controller_token: str | None = dataclasses.field(default=None, repr=False)
    controller_verify: bool | str = True
    advertise: str | None = None
    lease: ServingLease | None = None
    lease_s: float = 60.0
    relay: bool | None = None
    relay_host: str | None = None
    relay_port: int = 0
    zone: str | None = None
    upload_bytes_s: float | None = None
    max_peers: int = 6

    def __post_init__(self) -> None:
        check_config_id("service_id", self.service_id)
        for name in ("token", "sender_token", "controller_token"):
            object.__setattr__(self, name, checked_token(getattr(self, name)))
        if self.advertise is not None:
            object.__setattr__(self, "advertise", checked_url(self.advertise, whose="advertise's"))
        if isinstance(self.senders, str):
            raise ConfigError(f"senders is a tuple of URLs; write senders=({self.senders!r},)")
        if self.controller is not None and self.lease is None:
            raise ConfigError(
                "a service of a fleet has a controller and a lease, a file by which its engines see that it is alive: "
                "add --lease FILE (serve.lease in YAML, lease=FILE of serve). By classes: RolloutConfig(controller=URL"
                ", lease=ServingLease(FILE)), and its engines EmbeddedEngine.of(loader, lease=LeaseReader(FILE))"
            )
        if self.transport not in (None, Transport.TCP, Transport.SHM):
            raise ConfigError(f"transport is tcp or shm, not {self.transport!r}")
        if self.poll_s is not None:
            check_wait_s("poll_s", self.poll_s)
        for name in ("pull_timeout_s", "load_timeout_s", "pause_timeout_s", "patience_s", "lease_s"):
            check_wait_s(name, getattr(self, name))
        check_num_streams(self.num_streams)
        self._check_relay()
        check_choice("mode", self.mode, MODES)
        if not 0 <= self.patch_limit <= 1:
            raise ConfigError(f"patch_limit is a share of the model, from 0 to 1, not {self.patch_limit}")

    def _check_relay(self) -> None:
        if self.zone is not None:
            check_config_id("zone", self.zone)
        if self.upload_bytes_s is not None and not 0 < self.upload_bytes_s < math.inf:
            raise ConfigError(f"upload_bytes_s is above 0, not {self.upload_bytes_s!r}")
        if type(self.max_peers) is not int or not 1 <= self.max_peers <= _MAX_PEERS:
            raise ConfigError(f"max_peers is a whole number from 1 to {_MAX_PEERS}, not {self.max_peers!r}")
        if not 0 <= self.relay_port < 1 << 16:
            raise ConfigError(f"{self.relay_port} is no port")
        if self.relay_host is not None:
            check_exposure(self.relay_host, self.sender_token)

    @property
    def relays(self) -> bool:
        return self.relay if self.relay is not None else not is_loopback(self.host)

    def relay_address(self) -> str:
        """Where it serves other hosts.

        Raises:
            ConfigError: no address leads to the agents.
        """
        if self.relay_host is not None or not is_loopback(self.host):
            return self.relay_host or self.host
        if self.sender_token is None:
            return self.host
        agents = [sender for sender in self.senders if not is_store_url(sender)]
        return address_towards(agents, instead="set relay_host") or self.host

    def url_told(self, url: str) -> str:
        """What the controller is told of a service that listens at `url`.

        Raises:
            ConfigError: the controller is another machine, and can't reach it.
        """
        if self.advertise is not None or self.controller is None:
            return self.advertise or url
        return url_towards(url, self.controller, instead="say --host 0.0.0.0 (host=), or --advertise URL (advertise=)")

    @classmethod
    def from_config(cls, config: WeightSyncConfig | Mapping[str, Any], **options: Any) -> Self:
        """As `config` says: the configuration that `WeightManager.from_config` is given too.

        Args:
            config: `serve` counts, but for its engines; and, where they are said, `delta`, `pause_timeout_s` and
                `transfer_timeout_s` of `transfer` (the last as `pull_timeout_s`) and `lease_s` of `fleet`.
            options: fields; they win. Where there is no `lease`, the caller releases the one that is made here.

        Raises:
            ConfigError: a setting makes no sense, or nobody reads it on the pull path.
        """
        settings = WeightSyncConfig.load(config).for_method("pull")
        serve = settings.serve
        values: dict[str, Any] = {
            "service_id": serve.service_id or _name_of_host(options.get("port", serve.port)), "host": serve.host,
            "port": serve.port, "senders": serve.sources, "controller": serve.controller, "advertise": serve.advertise,
            "relay": serve.relay, "zone": serve.zone, "upload_bytes_s": serve.upload_bytes_s,
            "trust_key": serve.trust_key,
        }  # fmt: skip
        values |= pull_settings(settings)
        if "lease_s" in settings.fleet.model_fields_set:
            values["lease_s"] = settings.fleet.lease_s
        with contextlib.ExitStack() as made:
            if serve.lease is not None and "lease" not in options:
                values["lease"] = lease = ServingLease(serve.lease)
                made.callback(lease.release)
            config_of_service = cls(**{**values, **options})
            made.pop_all()
        return config_of_service


def _name_of_host(port: int) -> str:
    """The host's, and the same after each start; a second service of one host listens at another port. Where any free
    one is taken each has an end of its own: two of one name would put each other out of a fleet, and containers that
    share a host's name often share process ids too."""
    name = socket.gethostname()[:100] or "rollout"
    return name if port == ServeConfig().port else f"{name}-{port or secrets.token_hex(4)}"


def pull_settings(config: WeightSyncConfig) -> dict[str, Any]:
    """Fields of a `RolloutConfig` that the `transfer` section has something to say of."""
    transfer = config.transfer
    values: dict[str, Any] = {}
    if transfer.delta is not None:
        values["mode"] = "delta" if transfer.delta else "full"
    for key, field in (("pause_timeout_s", "pause_timeout_s"), ("transfer_timeout_s", "pull_timeout_s")):
        if key in transfer.model_fields_set:
            values[field] = getattr(transfer, key)
    return values


def check_num_streams(num_streams: int) -> None:
    """Raises ConfigError where that is no number of connections."""
    if type(num_streams) is not int or not 1 <= num_streams <= MAX_STREAMS_A_TRANSFER:
        raise ConfigError(f"num_streams is a whole number from 1 to {MAX_STREAMS_A_TRANSFER}, not {num_streams!r}")
