"""Grants that are renewed by a receiver at work before its first byte, and never beyond a trainer's patience."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.multiproc.pull_kit import wait_until
from tests.standins.clock import StandingClock
from tests.unit.agent.test_api import TOKEN, Beside
from weightsync.agent import api as agent_module
from weightsync.clients.agent import AgentClient
from weightsync.errors import TransferAbortedError, WeightSyncError
from weightsync.host import renewal
from weightsync.host.puller import Puller
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import Reader, is_read
from weightsync.transfer import granted, tcp_server
from weightsync.types import Deadline, Version
from weightsync.types.transfer_messages import FinishRequest, RegisterRequest, RenewRequest, TransferRequest, Transport

TAKE_UP_S = 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """By which grants end; it stands where a busy machine would let seconds pass between two lines."""
    return StandingClock(monkeypatch, granted, tcp_server)


@pytest.fixture
def beside(clock: StandingClock) -> Iterator[Beside]:
    with contextlib.closing(Beside(take_up_s=TAKE_UP_S)) as there:
        there.publish(1)
        assert there.told() == ("published", 1)
        yield there


@pytest.fixture
def client(beside: Beside) -> Iterator[AgentClient]:
    with contextlib.closing(AgentClient(beside.agent.endpoint, token=TOKEN)) as made:
        made.register(RegisterRequest(receiver_id="r"))
        yield made


def granted_id(client: AgentClient) -> str:
    return client.request_transfer(TransferRequest(receiver_id="r", model_id="m")).transfer_id


def pulled(
    beside: Beside, at_work: Callable[[Version], None], errors: list[WeightSyncError], seconds: float
) -> StagedVersion:
    puller = Puller(beside.agent.endpoint, "m", receiver_id="r", token=TOKEN, transport=Transport.TCP)
    try:
        return puller.pull(deadline=Deadline(seconds), granted=at_work, retrying=errors.append)
    finally:
        puller.close()


def test_a_receiver_that_is_long_at_work_keeps_its_grant(
    beside: Beside, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: it lost every grant, until its deadline, where it had more to do than `take_up_s` allowed."""
    errors: list[WeightSyncError] = []
    renewed: list[float] = []
    renew = granted.IdleClock.renew

    def noted(idle: granted.IdleClock) -> bool:
        at_s = clock.now_s
        done = renew(idle)
        renewed.append(at_s)
        return done

    def at_work(_: Version) -> None:
        for _ in range(3):
            clock.now_s += 0.9 * TAKE_UP_S
            wait_until(lambda: clock.now_s in renewed, "it is renewed")
            wait_until(clock.acted("weightsync-sweeper"), "it would be over otherwise")

    monkeypatch.setattr(granted.IdleClock, "renew", noted)
    monkeypatch.setattr(renewal, "_EVERY_S", 0.02)
    with pulled(beside, at_work, errors, 30) as got:
        assert got.num_attempts == 1
    assert errors == []


def test_one_that_says_nothing_loses_it_and_is_told_why(
    beside: Beside, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: "superseded, most likely"."""
    errors: list[WeightSyncError] = []
    segment = beside.segments[0].name

    def at_work(_: Version) -> None:
        if not errors:
            clock.now_s += TAKE_UP_S + 0.1
            wait_until(lambda: not is_read(segment, Reader.SENT), "the grant is over")

    with monkeypatch.context() as patched:
        patched.setattr(renewal, "_EVERY_S", 3600.0)
        patched.setattr(renewal, "_SHARE", 3600.0)
        with pulled(beside, at_work, errors, 30) as got:
            assert got.num_attempts == 2
    (error,) = errors
    assert isinstance(error, TransferAbortedError)
    assert f"neither read nor renewed it for {TAKE_UP_S:g}" in str(error)


def test_a_longer_publication_leaves_more_time_to_read_what_is_said_of_it(
    beside: Beside, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_READ_BYTES_S", 100)
    grant = client.request_transfer(TransferRequest(receiver_id="r", model_id="m"))
    assert TAKE_UP_S + 2.6 < grant.take_up_s < 60.0


def test_a_renewal_of_what_is_over_says_why(beside: Beside, client: AgentClient) -> None:
    first = granted_id(client)
    second = granted_id(client)
    client.renew_transfer(RenewRequest(transfer_id=second))
    client.finish_transfer(FinishRequest(transfer_id=second, ok=True))
    for transfer_id, why in (
        (first, "was granted another one since"),
        (second, "has finished it"),
        ("0" * 32, "does not know it"),
    ):
        with pytest.raises(TransferAbortedError, match=why):
            client.renew_transfer(RenewRequest(transfer_id=transfer_id))


def test_a_renewal_keeps_no_segment_from_the_trainer(beside: Beside, client: AgentClient) -> None:
    """What a trainer asks back is given back at once, however often it was renewed."""
    transfer_id = granted_id(client)
    beside.publish(2)
    assert [beside.told(), beside.told()] == [("begun", 1), ("published", 2)]
    client.renew_transfer(RenewRequest(transfer_id=transfer_id))
    assert is_read(beside.segments[0].name, Reader.SENT)
    assert beside.agent.reset() == 1
    assert not is_read(beside.segments[0].name, Reader.SENT)
    with pytest.raises(TransferAbortedError, match="superseded"):
        client.renew_transfer(RenewRequest(transfer_id=transfer_id))


def test_renewals_end(
    beside: Beside, client: AgentClient, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granted, "RENEWABLE_S", 0.3)
    transfer_id = granted_id(client)
    segment = beside.segments[0].name
    said: list[str] = []

    def renewed() -> bool:
        clock.now_s += 0.1
        try:
            client.renew_transfer(RenewRequest(transfer_id=transfer_id))
        except TransferAbortedError as error:
            said.append(str(error))
        return not is_read(segment, Reader.SENT)

    wait_until(renewed, "it is over, though it is renewed all the time")
    assert "ask for another" in said[0]


def test_a_reader_of_a_store_says_that_it_reads_while_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent sees them itself. Seen red: a note was renewed by nobody during a long copy; what it named was swept."""
    monkeypatch.setattr(renewal, "_EVERY_S", 0.01)
    grants = {
        index: SimpleNamespace(grant=SimpleNamespace(transport=transport, take_up_s=60.0))
        for index, transport in enumerate((Transport.TCP, Transport.STORE))
    }
    renewed: list[object] = []
    agents: Any = SimpleNamespace(renew=renewed.append)
    at_work = renewal.Renewal(agents, cast(Any, grants))
    monkeypatch.setattr(at_work, "_moved_s", math.inf)  # bytes come all the time
    at_work.start()
    wait_until(lambda: len(renewed) > 2, "it is renewed")
    at_work.close()
    assert grants[0] not in renewed
