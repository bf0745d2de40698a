"""The run of a trainer that announces a version over HTTP and names none: its agent is asked, as the trainer could ask.

The controller lends nobody what it may do. It calls the address that the announcement came from, and sends the token
that came with it: never its own for services, nor to another host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

from weightsync.clients.agent import AgentClient
from weightsync.errors import AuthError, InvalidRequestError
from weightsync.net.auth import address_in
from weightsync.net.http_edge import checked_url

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_BEARER = "Bearer "


def run_of_caller(model_id: str, endpoint: str, *, peer: str, header: str) -> str:
    """The run of that model that the caller's agent has.

    Args:
        model_id: which.
        endpoint: the agent's URL, as the caller says it.
        peer: the address that the caller is at.
        header: the Authorization that it sent; may be empty.

    Raises:
        InvalidRequestError: the endpoint is not the caller's own, or not to be called so. Nobody was called.
        NotPublishedError: the agent has nothing yet, or another model.
        WeightSyncError: it does not answer.
    """
    parts = urlsplit(checked_url(endpoint, whose="a sender's"))
    if parts.scheme != "http":
        raise _refused("its certificate is not for the address that would be called")
    if parts.path or parts.query or parts.fragment:
        raise _refused("its URL is a host and a port, without a path")
    caller = _address(peer)
    if caller is None or not all(_is_callers(each, caller) for each in _addresses_of(parts.hostname or "")):
        raise _refused("its host is not, or not only, the address that this was sent from")
    host = f"[{caller}]" if caller.version == 6 else str(caller)
    token = header.removeprefix(_BEARER) if header.startswith(_BEARER) else None
    with contextlib.closing(AgentClient(f"http://{host}:{parts.port or 80}", token=token or None)) as agent:
        try:
            return agent.current_run(model_id)
        except AuthError as error:
            raise InvalidRequestError(
                f"the agent at {agent.url} does not take the token that this was sent with: name run_id ({error})"
            ) from error


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"a version without a run is asked for at its own agent, and {why}: name run_id", state_left="nobody was called"
    )


def _addresses_of(host: str) -> list[_Address | None]:
    """All of a host's; a None where there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    return [_address(str(address[0])) for *_, address in found] or [None]


def _address(text: str) -> _Address | None:
    found = address_in(text)
    return getattr(found, "ipv4_mapped", None) or found


_LOOPBACK = frozenset(map(ipaddress.ip_address, ("127.0.0.1", "::1")))


def _is_callers(address: _Address | None, caller: _Address) -> bool:
    """The two that "localhost" has are one host."""
    return address == caller or (address in _LOOPBACK and caller in _LOOPBACK)
