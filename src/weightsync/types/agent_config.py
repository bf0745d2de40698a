"""AgentConfig: how a `TransferAgent` runs."""

from __future__ import annotations

import msgspec


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an agent runs. Travels to its process as JSON on a pipe, so a token never stands in a command line.

    Attributes:
        model_id: the one model that it serves.
        host: where it listens; beyond loopback only with a token.
        port, blocks_port: of HTTP, of the block server; 0: any.
        advertise: host name that receivers reach it by; `host` where not given.
        token: bearer token.
        certificate, key: PEM files; HTTP and block server speak TLS then.
        take_up_s: a transfer that its receiver neither reads nor renews for so long is over; it has longer where much
            is said of the publication, which it has to read first.
        stall_s: a connection that takes nothing for so long is cut.
        lease_s: a receiver that is slower than the trainer may hold a version for so long at most; 0: not at all.
        delta_budget_bytes: what deltas may take of shared memory; None: a quarter of the model's bytes on this host; 0:
            none are made.
        delta_device: where changes are searched for, as torch names it ("cuda"); None: on the CPU's cores.
        delta_rest: of so many versions no delta is made at first: agents before this one died while they made one.
        load_delta_codec: before it says that it is ready; otherwise when somebody has asked for a delta.
        incarnation: of the publisher; see `AgentVersion`.
        full_sync_interval: each version whose number is a multiple of it goes out in full; 0: none has to.
    """

    model_id: str
    host: str = "127.0.0.1"
    port: int = 0
    blocks_port: int = 0
    advertise: str | None = None
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    take_up_s: float = 10.0
    stall_s: float = 10.0
    lease_s: float = 60.0
    delta_budget_bytes: int | None = None
    full_sync_interval: int = 0
    delta_device: str | None = None
    delta_rest: int = 0
    load_delta_codec: bool = False
    incarnation: str | None = None

    def __repr__(self) -> str:
        """Without the token: a configuration finds its way into logs."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "token")
        return f"AgentConfig({', '.join(shown)})"
