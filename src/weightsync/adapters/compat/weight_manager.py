"""Document 3's trainer, transfer engine and configurations, by their names, over ours. `dataflow` has its service.

    wm = WeightManager(WeightManagerConfig(SenderAgentConfig(rank, world_size, [TransferEngineConfig("127.0.0.1")])))
    wm.offload(model.named_parameters(), version, rank, world_size)   # every training rank, between two steps
    wm.wait_delta_ready()                                             # the host's first rank

Nothing is implemented here: a configuration says the same to our classes in the document's words, and what ours can't
do is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.agent.api import TransferAgent as TransferAgent
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.host.puller import Puller
from weightsync.host.settings import RolloutConfig
from weightsync.host.staging import Staging
from weightsync.trainer import publisher
from weightsync.trainer.offload_steps import OffloadReport
from weightsync.trainer.plan_cache import Weights
from weightsync.transfer.tcp_server import BlockServer
from weightsync.types.transfer_messages import ReceiverInfo as ReceiverInfo
from weightsync.types.transfer_messages import Transport

TransferBuffer = Staging
"""The CPU buffer that a receiver's bytes go into. It is the file that engines load from, and no copy of one."""

_STRATEGIES = frozenset({"full", "delta"})


class TransferStatus(enum.IntEnum):
    """How a transfer ended."""

    SUCCESS = 0
    FAILURE = 1


@dataclasses.dataclass(frozen=True)
class TransferEngineConfig:
    """Where one end of a transfer is.

    Attributes:
        local_hostname: the host name or address that it listens at; beyond loopback only with a token.
        handshake_port: its TCP port; 0: the system's choice.
    """

    local_hostname: str = "127.0.0.1"
    handshake_port: int = 0


@dataclasses.dataclass(frozen=True)
class SenderAgentConfig:
    """A trainer host's agent.

    Attributes:
        trainer_global_rank, trainer_world_size: of this rank; `offload` checks them against torch.distributed.
        engine_configs: one: a single engine serves every receiver.
        num_engines_per_group: likewise 1.
        http_bind_port: of the agent's HTTP; 0: the system's choice.

    Raises:
        ConfigError: more than one engine.
    """

    trainer_global_rank: int
    trainer_world_size: int
    engine_configs: Sequence[TransferEngineConfig]
    num_engines_per_group: int = 1
    http_bind_port: int = 18861

    def __post_init__(self) -> None:
        if len(self.engine_configs) != 1 or self.num_engines_per_group != 1:
            raise ConfigError(
                f"an agent has one transfer engine, which serves six streams to each receiver: give one engine_config "
                f"and num_engines_per_group=1, not {len(self.engine_configs)} and {self.num_engines_per_group}"
            )


@dataclasses.dataclass(frozen=True)
class ReceiverAgentConfig:
    """A rollout host: its SGLang server, and the agents that it pulls from.

    Attributes:
        sglang_http_host, sglang_http_port: of the SGLang server.
        sender_http_endpoints: host and HTTP port of each agent; nobody else is called.
        engine_config: where the rollout service listens.
        num_engines: 1: one staging for all engines of a model.

    Raises:
        ConfigError: more than one engine, or no sender.
    """

    sglang_http_host: str
    sglang_http_port: int
    sender_http_endpoints: Sequence[tuple[str, int]]
    engine_config: TransferEngineConfig = TransferEngineConfig()
    num_engines: int = 1

    def __post_init__(self) -> None:
        if self.num_engines != 1 or not self.sender_http_endpoints:
            raise ConfigError(
                "a receiver has num_engines=1 and the endpoint of at least one sender, not "
                f"{self.num_engines} and {list(self.sender_http_endpoints)}"
            )

    @property
    def engine_url(self) -> str:
        """The SGLang server, as `handles.by_url.engine_at` takes it."""
        return f"sglang+http://{self.sglang_http_host}:{self.sglang_http_port}"

    def rollout_config(self, **options: Any) -> RolloutConfig:
        """For `RolloutService`; `options` are further arguments of `RolloutConfig`."""
        return RolloutConfig(
            host=self.engine_config.local_hostname,
            port=self.engine_config.handshake_port,
            senders=tuple(f"http://{host}:{port}" for host, port in self.sender_http_endpoints),
            **options,
        )


@dataclasses.dataclass(frozen=True)
class WeightManagerConfig:
    """A trainer's weight manager.

    Attributes:
        sender_config: its agent.
        strategies: what receivers may take: "full", or "full" and "delta".
        model_id: which model; each has its own manager.

    Raises:
        ConfigError: another strategy, or none in full.
    """

    sender_config: SenderAgentConfig
    strategies: Sequence[str] = ("full",)
    model_id: str = "default"

    def __post_init__(self) -> None:
        if "full" not in self.strategies or set(self.strategies) - _STRATEGIES:
            raise ConfigError(
                f"strategies are ['full'] or ['full', 'delta'], not {list(self.strategies)}: who lacks a delta's base "
                "takes a version in full"
            )


class WeightManager(publisher.WeightManager):
    """Our `WeightManager`, made from the document's configuration.

    Args:
        options: further arguments of ours: token, guard_s, run_id, dtype, ...

    Raises:
        ConfigError: a setting makes no sense.
    """

    def __init__(self, config: WeightManagerConfig, **options: Any) -> None:
        (engine,) = config.sender_config.engine_configs
        if "delta" not in config.strategies:
            options = {"delta_budget_bytes": 0, **options}
        super().__init__(
            config.model_id, host=engine.local_hostname, port=config.sender_config.http_bind_port, **options
        )
        self._config = msgspec.structs.replace(self._config, blocks_port=engine.handshake_port)
        self.config = config

    def offload(
        self,
        weights: Weights,
        version: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        error: WeightSyncError | None = None,
    ) -> OffloadReport:
        """See ours; a rank and a world size that are not given are the configuration's."""
        sender = self.config.sender_config
        return super().offload(
            weights,
            version,
            sender.trainer_global_rank if rank is None else rank,
            sender.trainer_world_size if world_size is None else world_size,
            error=error,
        )


class TCPTransferEngine:
    """Makes the two ends of a TCP transfer: `sender`, which an agent has by itself, and `receiver`.

    Args:
        config: where the sender's end listens; its host name is the receiver's name, for the agent's operator.
        num_threads: parallel streams of a pull.
    """

    def __init__(self, config: TransferEngineConfig, num_threads: int = 6) -> None:
        self.config = config
        self.num_parallel_streams = num_threads

    def sender(self) -> BlockServer:
        """The sender's end, not started: it sends blocks of shared memory by `sendfile`."""
        return BlockServer(self.config.local_hostname, self.config.handshake_port)

    def receiver(
        self,
        sender_endpoint: str,
        model_id: str,
        buffer: TransferBuffer,
        *,
        mode: str = "full",
        token: str | None = None,
    ) -> Puller:
        """The receiver's end: each `pull` brings the newest version into the buffer, over TCP, proved.

            with receiver.pull(deadline=Deadline(30)) as pulled:  # `weightsync.types.Deadline`: seconds for the whole
                load(pulled.segment, pulled.offsets)

        A pull needs a deadline, and its result is closed before the next one, as `with` does: until then the buffer is
        in use, and another pull tries again until its deadline is over.

        Args:
            sender_endpoint: URL of the agent.
            model_id: which model.
            buffer: where it goes, from pull to pull.
            mode: "full", or "delta" where the agent has one from what the buffer holds.
            token: the agent's bearer token.

        Returns:
            The receiver. The agent's `/receivers` names it by `local_hostname`, with an ending of its own.
        """
        receiver_id = f"{self.config.local_hostname}-{uuid.uuid4().hex[:8]}"  # two of one would end each other's pulls
        return Puller(
            sender_endpoint, model_id, receiver_id=receiver_id, token=token, transport=Transport.TCP, mode=mode,
            num_streams=self.num_parallel_streams, staging=buffer,
        )  # fmt: skip
