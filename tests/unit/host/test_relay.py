"""Hosts that relay, with agents of this process and real sockets: what comes from whom, and when it is not served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import torch

from tests.standins.clock import StandingClock
from weightsync.agent.api import TransferAgent
from weightsync.clients.agent import AgentClient
from weightsync.errors import ConfigError, StateError, TransferAbortedError
from weightsync.host import relay as relay_module
from weightsync.host.agent_calls import Agents
from weightsync.host.puller import Puller
from weightsync.host.relay import Relay, RelayShelf, relay_of
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import MappedSegment, Segment
from weightsync.plan.safetensors import plan_layout
from weightsync.tensors import byte_array, spec_of
from weightsync.transfer import relay, relay_pick
from weightsync.transfer.peer_server import PeerServer
from weightsync.types import Box, Deadline, Manifest, TensorSpec, Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.publication import Publication, Source
from weightsync.types.relay_messages import Holding, RelayFace, RelayPeer, RelayReport, have_bytes
from weightsync.types.transfer_messages import RegisterRequest, Transport

TOKEN = "a-token-for-tests-only"
ROWS, COLUMNS = 512, 512
SIZE = 4 * ROWS * COLUMNS


class Trainer:
    """Publishes one tensor, by one agent or as left and right halves by two."""

    def __init__(self, num_agents: int = 1) -> None:
        config = AgentConfig(model_id="m", token=TOKEN)
        self.agents = [TransferAgent(config, lambda _: None) for _ in range(num_agents)]
        for agent in self.agents:
            agent.start()
        self.segments: list[Segment] = []

    @property
    def endpoints(self) -> list[str]:
        return [agent.endpoint for agent in self.agents]

    def tensor(self, number: int) -> torch.Tensor:
        return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * (number + 1)

    def publish(self, number: int) -> None:
        tensor, version = self.tensor(number), Version(run_id="run", number=number)
        spec, each = spec_of("w", tensor), COLUMNS // len(self.agents)
        sources, parts = [], []
        for index, agent in enumerate(self.agents):
            mine = tensor if len(self.agents) == 1 else tensor[:, index * each : (index + 1) * each].contiguous()
            box = None if len(self.agents) == 1 else Box(offset=(0, index * each), shape=(ROWS, each))
            part = TensorSpec(name="w", dtype=spec.dtype, shape=spec.shape, box=box)
            layout = plan_layout((part,), source=index)
            segment = Segment(layout.total_bytes)
            header = layout.header(version, "m")
            segment.memory[: len(header)] = header
            start = layout.parts[0].offset
            segment.memory[start : start + mine.nbytes] = byte_array(mine).data
            self.segments.append(segment)
            parts += layout.parts
            sources.append(
                Source(
                    endpoint=agent.endpoint, segment=segment.name, data_start=layout.data_start,
                    data_end=layout.total_bytes, block_bytes=64 << 10,
                )
            )  # fmt: skip
        manifest = Manifest(version=version, model_id="m", tensors=(spec,))
        publication = Publication(manifest=manifest, parts=tuple(parts), sources=tuple(sources))
        for index, agent in enumerate(self.agents):
            agent.publish(publication, index)

    def is_right(self, staged: StagedVersion) -> bool:
        wanted = byte_array(self.tensor(staged.version.number)).tobytes()
        with MappedSegment(staged.segment, need_bytes=1) as mapped:
            return bytes(mapped.memory[staged.offsets["w"] : staged.offsets["w"] + SIZE]) == wanted

    def close(self) -> None:
        for each in (*self.agents, *self.segments):
            each.close()


class Host:
    def __init__(self, trainer: Trainer, name: str, **options: Any) -> None:
        self.trainer = trainer
        self.relay = Relay(**options)
        self.relay.start()
        self.puller = Puller(
            trainer.endpoints[0], "m", receiver_id=name, token=TOKEN, transport=Transport.TCP, relay=self.relay,
            may_call=lambda endpoint: endpoint in trainer.endpoints,
        )  # fmt: skip

    def pull(self, number: int, *, seconds: float = 30.0) -> StagedVersion:
        version = Version(run_id="run", number=number)
        staged = self.puller.pull(deadline=Deadline(seconds), at_least=lambda: version)
        assert self.trainer.is_right(staged)
        return staged

    def close(self) -> None:
        self.puller.close()
        self.relay.close()


def until(condition: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def named(trainer: Trainer, num: int) -> None:
    """Agents know of so many relays, and that each has all there is: one that reads tells of a part, too."""

    def knows(agent: TransferAgent) -> bool:
        board, relaying = agent._relaying._board, agent._relaying
        with relaying._lock:
            hosts = [(host, content.all) for content in board._contents.values() for host in content.hosts.values()]
            serving = {name for each in board._contents.values() for name, _ in board._serving(each, board._clock())}
            return len(serving) == num and all(host.have in (0, whole) for host, whole in hosts)

    until(lambda: all(knows(agent) for agent in trainer.agents), f"{num} relays are known")


@pytest.fixture(params=[1, 2])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with contextlib.closing(Trainer(request.param)) as there:
        yield there


@pytest.fixture
def one() -> Iterator[Trainer]:
    with contextlib.closing(Trainer()) as there:
        yield there


@contextlib.contextmanager
def hosts(trainer: Trainer, *names: str, **options: Any) -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Host(trainer, name, **options))) for name in names]


def test_a_joiner_takes_all_of_it_from_a_peer(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a publication that lies with two agents, in halves of a tensor."""
    monkeypatch.setattr(relay_pick, "_PATIENCE_S", 60.0)  # a peer that a busy machine holds up is not cut as slow
    trainer.publish(0)
    with hosts(trainer, "first", "second") as (first, second):
        came = first.pull(0)
        assert came.received_from == {"agent": SIZE}
        came.release()
        named(trainer, 1)
        came = second.pull(0)
        assert came.received_from == {"peer": SIZE}
        assert "all of it from other hosts" in str(came.because)
        came.release()


def test_what_is_written_again_is_not_served(one: Trainer) -> None:
    """The first goes on to the next version: what it had of the old one is withdrawn, and nobody hangs on it."""
    one.publish(0)
    with hosts(one, "first", "second") as (first, second):
        first.pull(0).release()
        named(one, 1)
        one.publish(1)
        first.pull(1).release()
        assert [content.share.have for content in first.puller._agents.shelf._kept[one.endpoints[0]].values()]
        assert len(first.puller._agents.shelf._kept[one.endpoints[0]]) == 1
        named(one, 1)
        second.pull(1).release()


def test_a_peer_that_is_gone_costs_a_turn_at_the_agent(one: Trainer) -> None:
    one.publish(0)
    with hosts(one, "first", "second") as (first, second):
        first.pull(0).release()
        named(one, 1)
        first.relay.server.close()
        came = second.pull(0)
        assert came.received_from == {"agent": SIZE}
        assert "failed" in str(came.because)
        came.release()


@contextlib.contextmanager
def takes_nobody() -> Iterator[int]:
    """The port of a listener whose queue is full: who connects waits, as where a link is cut."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listener.getsockname()[1]
        for _ in range(3):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(("127.0.0.1", port))
        yield port


def claim(trainer: Trainer, first: Host, port: int, blocks: int) -> None:
    """A registered receiver says that it serves these blocks of what the first host has."""
    endpoint = trainer.endpoints[0]
    ((content, kept),) = first.puller._agents.shelf._kept[endpoint].items()  # type: ignore[union-attr]
    holding = Holding(content=content, have=have_bytes(blocks, kept.share.num_blocks))
    with contextlib.closing(AgentClient(endpoint, token=TOKEN)) as client:
        client.register(RegisterRequest(receiver_id="liar"))
        client.relay(RelayReport(receiver_id="liar", face=RelayFace(host=None, port=port), holdings=(holding,)))


def test_a_peer_that_can_not_be_connected_to_is_not_waited_for_at_the_end(
    one: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail where the read joined the thread that connects: 8 s."""
    monkeypatch.setattr(relay, "_CONNECT_S", 8.0)
    one.publish(0)
    with hosts(one, "first", "second") as (first, second), takes_nobody() as port:
        first.pull(0).release()
        named(one, 1)
        claim(one, first, port, 1)
        begun_s = time.monotonic()
        second.pull(0).release()
        assert time.monotonic() - begun_s < 6


def test_what_a_peer_has_that_can_not_be_connected_to_comes_from_the_agent(
    one: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail where connecting may take as long as `stall_s`: 10 s."""
    monkeypatch.setattr(relay, "_CONNECT_S", 0.3)
    one.publish(0)
    with hosts(one, "first", "second") as (first, second), takes_nobody() as port:
        first.pull(0).release()
        named(one, 1)
        first.relay.server.close()
        claim(one, first, port, (1 << 16) - 1)
        begun_s = time.monotonic()
        assert second.pull(0).received_from == {"agent": SIZE}
        assert time.monotonic() - begun_s < 8


def test_what_a_peer_has_that_may_not_be_asked_comes_from_the_agent(
    one: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks in clear, and the agent TLS. Seen to fail where it counted as usable: the pull ran out of time."""

    def refuses(*_: object) -> None:
        raise ConfigError("in clear")

    monkeypatch.setattr(Agents, "_tls_of_peer", refuses)
    one.publish(0)
    with hosts(one, "first", "second") as (first, second):
        first.pull(0).release()
        named(one, 1)
        assert second.pull(0, seconds=10).received_from == {"agent": SIZE}


@pytest.mark.parametrize("kept", [False, True])
def test_a_shelf_with_nothing_left_waits(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it woke a hundred times a second."""
    connect: Any = None
    clock = StandingClock(monkeypatch, relay_module)
    shelf, told, waited_s = RelayShelf(connect, "r", connect), "http://one:1", []

    class Changed(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waited_s.append(timeout)
            shelf._closed = True
            return True

    shelf._changed = Changed()
    share: Any = None
    shelf._kept[told] = {"content": share} if kept else {}
    told_s = clock.now_s - (8.0 if kept else 60.0)
    assert shelf._next({told: told_s}) is None
    (left_s,) = waited_s
    assert left_s == pytest.approx(2.0 if kept else 10.0)


def test_what_can_not_be_withdrawn_is_not_written_at_the_second_try(one: Trainer) -> None:
    """Seen to fail where it was forgotten at the first."""
    one.publish(0)
    with hosts(one, "first") as (first,):
        first.pull(0).release()
        shelf = first.puller._agents.shelf
        assert shelf is not None
        ((_, kept),) = shelf._kept[one.endpoints[0]].items()
        until(lambda: kept.shown is not None, "it is served")
        ends = iter([False, False])
        kept.offer.end = lambda: next(ends, True)  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(StateError):
                shelf.withdraw(staged=True)
        shelf.withdraw(staged=True)


@pytest.mark.parametrize("host", ["127.1", "169.254.169.254"])
def test_no_host_of_this_machine_is_asked_for_an_agent_of_another(host: str) -> None:
    facts = RelayPeer(receiver_id="liar", host=host, port=1, zone=None, tls=False, have=b"")
    agents = Agents(
        receiver_id="r", model_id="m", token=None, verify=True, transport=None, num_streams=1, stall_s=1.0
    )  # fmt: skip
    with contextlib.closing(agents):
        assert agents._tls_of_peer("http://127.0.0.1:1", facts) is None
        with pytest.raises(ConfigError):
            agents._tls_of_peer("http://10.0.0.1:1", facts)


@pytest.mark.parametrize("how", ["wrong", "short"])
def test_no_wrong_byte_comes_of_a_bad_peer(one: Trainer, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Seen to fail with the checksum not compared in `TcpSource._receive`."""
    one.publish(0)

    def badly(self: PeerServer, connection: Any, offer: Any, head: bytes, block: int) -> None:
        data = bytearray(offer.shared.read(block))
        data[7] ^= 1
        connection.sendall(head + data if how == "wrong" else head + data[:100])
        if how == "short":
            raise ConnectionAbortedError

    with hosts(one, "first", "second") as (first, second):
        first.pull(0).release()
        named(one, 1)
        monkeypatch.setattr(PeerServer, "_send", badly)
        came = second.pull(0)
        assert came.received_from == {"agent": SIZE}
        came.release()


def test_an_agent_that_does_not_relay_serves_as_ever(one: Trainer) -> None:
    one.publish(0)
    one.agents[0].app.router.routes[:] = [each for each in one.agents[0].app.router.routes if each.path != "/relay"]  # type: ignore[attr-defined]
    with hosts(one, "first") as (first,):
        came = first.pull(0)
        assert came.received_from == {"agent": SIZE}
        assert "did not say who has what" in str(came.because)
        came.release()


def test_who_is_not_registered_hears_nothing(one: Trainer) -> None:
    report = RelayReport(receiver_id="stranger", face=RelayFace(host=None, port=1))
    headers = {"authorization": f"Bearer {TOKEN}"}
    url = f"{one.endpoints[0]}/relay"
    said = httpx.post(url, content=msgspec.json.encode(report), headers={**headers, "content-type": "application/json"})
    assert said.json()["error"] == "NotRegisteredError"
    assert httpx.post(url, json={}).status_code == 401


def test_a_service_relays_where_it_is_open_already() -> None:
    assert relay_of(RolloutConfig()) is None
    assert not RolloutConfig(host="127.0.0.1", token=TOKEN).relays
    assert RolloutConfig(host="0.0.0.0", token=TOKEN).relays
    assert not RolloutConfig(host="0.0.0.0", token=TOKEN, relay=False).relays
    made = relay_of(RolloutConfig(relay=True, zone="rack-1"))
    assert made is not None
    with contextlib.closing(made):
        assert (made.face.zone, made.face.host, made.face.tls) == ("rack-1", None, False)
    for wrong in ({"zone": "a b\n"}, {"upload_bytes_s": 0.0}, {"max_peers": 0}, {"relay_host": "0.0.0.0"}):
        with pytest.raises(ConfigError):
            RolloutConfig(**wrong)  # type: ignore[arg-type]


def test_a_pull_that_is_cancelled_ends(one: Trainer) -> None:
    """Nothing is published: it waits, relaying or not."""
    with hosts(one, "first") as (first,):
        first.puller.cancel()
        with pytest.raises(TransferAbortedError, match="cancelled"):
            first.pull(0, seconds=5)
