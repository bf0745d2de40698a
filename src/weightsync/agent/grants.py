"""Grants: what an agent answers to whoever asks for a version: a delta where there is one, or the source's bytes."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Any

from weightsync.agent.deltas import Deltas
from weightsync.agent.proved import Proved, check_stamp
from weightsync.errors import InvalidRequestError, SharedMemoryError, VersionError, WeightSyncError
from weightsync.memory import Reader, is_read
from weightsync.transfer.granted import Transfer
from weightsync.transfer.tcp_server import BlockServer
from weightsync.types import Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.publication import DeltaLink
from weightsync.types.transfer_messages import TransferRequest, Transport

_logger = logging.getLogger(__name__)


class Grants:
    """Begins transfers. Thread-safe.

    Args:
        nonce: of this host's shared memory.
        segments: names of the segments that were published lately.
        begun: told of each transfer that begins.
        ended: told of each that ends, whether it is the last of what was granted together, and whether its receiver
            has everything.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        nonce: str,
        blocks: BlockServer,
        deltas: Deltas,
        segments: Collection[str],
        begun: Callable[[Transport], None],
        ended: Callable[[Transport, bool, Transfer, bool], None],
    ) -> None:
        self._config = config
        self._nonce = nonce
        self._blocks = blocks
        self._deltas = deltas
        self._segments = segments
        self._begun = begun
        self._ended = ended

    def grant(self, asked: TransferRequest, served: Proved, *, take_up_s: float) -> dict[str, Any]:
        """A `TransferGrant` without its publication and proof, which the caller has as they travel.

        Args:
            asked: by whom, for what.
            served: the newest publication.
            take_up_s: it is over when the receiver neither reads nor renews it for so long.

        Raises:
            InvalidRequestError: it is for another model.
            VersionError: it is for another version than the newest, or that one is superseded just now.
            StateError: too many transfers are under way.
        """
        manifest = served.publication.manifest
        if asked.model_id != manifest.model_id:
            raise InvalidRequestError(f"this agent serves model {manifest.model_id!r}, not {asked.model_id!r}")
        if asked.run_id not in (None, manifest.version.run_id) or asked.version not in (None, manifest.version.number):
            raise VersionError(
                f"{manifest.version} is the newest publication, {asked.run_id}/{asked.version} was asked for",
                version=str(manifest.version),
            )
        transport = Transport.SHM if asked.host_nonce == self._nonce else Transport.TCP
        delta = self._delta(asked, served, transport, take_up_s)
        if delta is not None:
            transfer_id = delta[-1].transfer_id if delta else secrets.token_hex(16)
            return {**self._facts(served, transport, transfer_id, take_up_s), "base": asked.base, "delta": delta}
        transfer = self._blocks.grant(
            manifest.version,
            served.where,
            receiver_id=asked.receiver_id,
            take_up_s=take_up_s,
            on_end=functools.partial(self._ended, transport, True),
            lease_s=self._lease_s(transport, served.where.segment),
        )
        self._begun(transport)
        try:
            check_stamp(served.publication, served.source)
        except BaseException:
            transfer.end(ok=False)
            raise
        return self._facts(served, transport, transfer.id, take_up_s)

    def _facts(self, served: Proved, transport: Transport, transfer_id: str, take_up_s: float) -> dict[str, Any]:
        return {
            "transfer_id": transfer_id,
            "source": served.source,
            "transport": transport,
            "host": self._config.advertise or self._config.host,
            "port": self._blocks.port,
            "take_up_s": take_up_s,
            "incarnation": self._config.incarnation,
        }

    def _lease_s(self, transport: Transport, segment: str) -> float | None:
        """How long a starving receiver may hold a segment; None where another one is leased already: with both, and
        the newest, the trainer would have none left to write.
        """
        if transport is not Transport.TCP or not self._config.lease_s:
            return None
        for other in tuple(self._segments):
            with contextlib.suppress(SharedMemoryError, OSError):
                if other != segment and is_read(other, Reader.MAPPED):
                    return None
        return self._config.lease_s

    def _delta(
        self, asked: TransferRequest, served: Proved, transport: Transport, take_up_s: float
    ) -> tuple[DeltaLink, ...] | None:
        """Deltas for a receiver, each granted; None where it is to have the source's bytes."""
        if asked.mode == "full" or (asked.mode == "auto" and transport is Transport.SHM):
            return None
        self._deltas.want()
        found = None if asked.base is None else self._deltas.from_base(asked.base, served)
        if found is None or sum(stored.nbytes for stored in found) >= served.where.data_end - served.where.data_start:
            return None
        transfers: list[Transfer] = []
        try:
            for stored in found:
                transfers.append(
                    self._blocks.grant(
                        Version(run_id=served.run_id, number=stored.version),
                        stored.blob,
                        receiver_id=asked.receiver_id,
                        take_up_s=take_up_s,
                        on_end=functools.partial(self._ended, transport, stored is found[-1]),
                        beside=tuple(transfers),
                        lasting=True,
                    )
                )
                self._begun(transport)
        except BaseException as error:
            for transfer in transfers:
                transfer.end(ok=False)
            if not isinstance(error, WeightSyncError):
                raise
            _logger.info("a delta was asked for and is gone: %s", error)  # given up just now
            return None
        return tuple(
            DeltaLink(
                base=stored.base, version=stored.version, blob=stored.blob, block_checksums=stored.block_checksums,
                transfer_id=transfer.id,
            )
            for stored, transfer in zip(found, transfers, strict=True)
        )  # fmt: skip
