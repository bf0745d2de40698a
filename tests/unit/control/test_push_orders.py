"""Orders to push: given to one taker, reported once, and given up in time."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.multiproc.pull_kit import wait_until
from weightsync.clients.controller import ControllerClient
from weightsync.control.build import build_controller
from weightsync.control.methods.push import PushMethod
from weightsync.control.push_orders import PushOrders
from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.trainer.push import PushSync
from weightsync.types import SyncReport, Version
from weightsync.types.push_orders import NextPushRequest, PushDoneRequest, PushOrder
from weightsync.verbs import order_taker
from weightsync.verbs.order_taker import OrderTaker
from weightsync.verbs.pushing import Pusher

LONG_S = 20.0


def report(number: int, run_id: str = "r") -> SyncReport:
    return SyncReport(
        version=Version(run_id=run_id, number=number), engine_ids=("e",), lost={}, total_bytes=4, sent_bytes=4,
        num_deltas=0, full_because=None, num_chunks=1, seconds=0.1, paused_s=0.0, phases_s={}, digests_equal=True,
        unprovable={},
    )  # fmt: skip


def ordered(orders: PushOrders, version: int) -> Future[SyncReport]:
    return in_thread(lambda: orders.sync_weights(version), name="controller")


@pytest.fixture
def orders() -> Iterator[PushOrders]:
    found = PushOrders(take_s=LONG_S, push_s=LONG_S)
    yield found
    found.close()


def test_an_order_is_taken_once_and_its_report_ends_the_sync(orders: PushOrders) -> None:
    sync = ordered(orders, 3)
    order = orders.next(4, wait_s=LONG_S)
    assert order is not None
    assert order.version == 3
    assert orders.next(4) is None, "it was taken"
    assert orders.done(order.order_id, report(4))
    assert sync.result(LONG_S).version.number == 4
    assert not orders.done(order.order_id, report(4)), "whoever has not had the answer says it again"
    with pytest.raises(StateError, match="given up, or is over"):
        orders.done(order.order_id, report(5))


def test_whoever_had_no_answer_gets_the_order_again_and_nobody_else(orders: PushOrders) -> None:
    """Seen red: nobody got it, and rollout was locked until the order, and those behind it, were given up."""
    sync = ordered(orders, 3)
    order = orders.next(3, taker="a", wait_s=LONG_S)
    assert order is not None
    assert [orders.next(4, taker=who) for who in ("b", None, "a")] == [None, None, order]
    assert orders.next(2, taker="a") is None, "it has not what was ordered"
    orders.done(order.order_id, LoadError("no room"))
    orders.done(order.order_id, LoadError("no room"))
    assert orders.next(4, taker="a") is None, "it was reported"
    with pytest.raises(LoadError):
        sync.result(LONG_S)


def test_ranks_that_are_behind_take_none(orders: PushOrders) -> None:
    sync = ordered(orders, 3)
    assert orders.next(2, wait_s=0.05) is None
    assert orders.next(None) is None
    assert orders.next(3, wait_s=LONG_S) is not None
    orders.close()
    with pytest.raises(TransferAbortedError):
        sync.result(LONG_S)


def test_what_the_push_raised_is_what_the_sync_raises(orders: PushOrders) -> None:
    sync = ordered(orders, 1)
    order = orders.next(1, wait_s=LONG_S)
    assert order is not None
    orders.done(order.order_id, LoadError("no room"))
    with pytest.raises(LoadError, match="no room"):
        sync.result(LONG_S)


@pytest.mark.parametrize("taken", [False, True])
def test_an_order_that_nobody_ends_is_given_up_and_its_late_report_is_refused(taken: bool) -> None:
    orders = PushOrders(take_s=LONG_S if taken else 0.05, push_s=0.05)
    sync = ordered(orders, 1)
    late = orders.next(1, wait_s=LONG_S) if taken else PushOrder(order_id="0", version=1)
    with pytest.raises(DeadlineExceededError, match="did not report" if taken else "no training rank took"):
        sync.result(LONG_S)
    orders._take_s = orders._push_s = LONG_S  # the next one is not to be given up
    again = ordered(orders, 1)
    taken_again = orders.next(1, wait_s=LONG_S)
    assert late is not None
    assert taken_again is not None
    with pytest.raises(StateError):
        orders.done(late.order_id, report(1))
    assert not again.done()
    orders.done(taken_again.order_id, report(2))
    assert again.result(LONG_S).version.number == 2


@pytest.mark.parametrize("taken", [False, True])
def test_nobody_waits_for_the_ranks_of_a_run_that_another_has_taken_over_from(orders: PushOrders, taken: bool) -> None:
    """They are gone, with an order in hand or not; the new ones are at a lower number."""
    orders.trained("old")
    sync = in_thread(lambda: orders.sync_weights(5, "old"), name="controller")
    wait_until(lambda: orders._order is not None, "it is ordered")
    order = orders.next(5, "old", wait_s=LONG_S) if taken else None
    orders.trained("old")
    assert not sync.done()
    orders.trained("new")
    with pytest.raises(VersionError, match="run new has taken over from old"):
        sync.result(LONG_S)
    if order is not None:
        with pytest.raises(StateError):
            orders.done(order.order_id, report(5, "old"))
    with pytest.raises(VersionError, match="taken over"):
        orders.sync_weights(6, "old")
    again = in_thread(lambda: orders.sync_weights(1, "new"), name="controller")
    fresh = orders.next(1, "new", wait_s=LONG_S)
    assert fresh is not None
    orders.done(fresh.order_id, report(1, "new"))
    assert again.result(LONG_S).version.run_id == "new"


def test_a_rank_of_a_run_that_another_took_over_from_gets_no_order_of_that_one(orders: PushOrders) -> None:
    """Red where it was not asked for its run: it took the new run's order, and nobody reported on that."""
    orders.trained("old")
    waits = in_thread(lambda: orders.next(100, "old", wait_s=LONG_S), name="rank of old")
    orders.trained("new")
    sync = in_thread(lambda: orders.sync_weights(1, "new"), name="controller")
    fresh = orders.next(1, "new", wait_s=LONG_S)
    with pytest.raises(VersionError, match="run new has taken over from old"):
        waits.result(LONG_S)
    with pytest.raises(VersionError, match="run new has taken over from old"):
        orders.next(100, "old")
    assert fresh is not None
    orders.done(fresh.order_id, report(1, "new"))
    assert sync.result(LONG_S).version.run_id == "new"


def test_who_waits_at_a_take_over_is_told_before_any_order(orders: PushOrders) -> None:
    orders.trained("old")
    began = threading.Event()
    waits = in_thread(lambda: (began.set(), orders.next(1, "old", wait_s=LONG_S)), name="rank of old")
    assert began.wait(LONG_S)
    orders.trained("new")
    with pytest.raises(VersionError, match="taken over"):
        waits.result(LONG_S / 4)


def test_a_run_nobody_has_told_of_takes_no_order_of_another(orders: PushOrders) -> None:
    sync = in_thread(lambda: orders.sync_weights(1, "r"), name="controller")
    wait_until(lambda: orders._order is not None, "it is ordered")
    assert orders.next(9, "another") is None
    assert orders.next(9) is None
    order = orders.next(1, "r")
    assert order is not None
    orders.done(order.order_id, report(1))
    assert sync.result(LONG_S).version.number == 1


def test_of_many_who_ask_one_gets_the_order(orders: PushOrders) -> None:
    for number in range(50):
        over = threading.Event()
        asked = [in_thread(lambda: orders.next(100, wait_s=LONG_S, given_up=over), name="rank") for _ in range(20)]  # noqa: B023
        sync = ordered(orders, number)
        first = next(as_completed(asked, LONG_S)).result()
        assert first is not None
        with pytest.raises(SyncInProgressError):
            orders.sync_weights(number)
        over.set()
        orders.look_again()
        assert [found for each in asked if (found := each.result(LONG_S)) is not None] == [first]
        orders.done(first.order_id, report(number))
        assert sync.result(LONG_S).version.number == number


# --- over HTTP ---


def test_a_controller_from_a_file_orders_and_retries_and_its_versions_are_what_was_reported() -> None:
    config = {"sync_method": "push", "fleet": {"port": 0, "models": ["actor"], "retries_s": [0.01]}}
    with build_controller(config) as built, contextlib.closing(ControllerClient(built.url)) as client:
        assert client.next_push("actor", None) is None
        assert client.train_worker_notify_weight_update("trainer", "actor", "r", 1).state == "syncing"
        failing = client.next_push("actor", 1, "r", wait_s=LONG_S)
        assert failing is not None
        client.push_done("actor", failing, LoadError("no room"))
        order = client.next_push("actor", 1, "r", wait_s=LONG_S)
        assert order is not None
        assert order != failing
        with pytest.raises(StateError, match="given up, or is over"):
            client.push_done("actor", failing, report(1))
        client.push_done("actor", order, report(1))
        assert client.sync_weight_to_rollout_service("actor", wait_s=LONG_S)
        assert client.rollout_service_state("actor").rollout_model_version == 1
        with pytest.raises(InvalidRequestError, match="no model"):
            client.next_push("critic", 1, "r")


def test_a_trainer_that_was_restarted_is_ordered_at_once_though_the_old_one_has_its_order() -> None:
    """The times in which an order is taken, and reported, are the defaults: minutes."""
    config = {"sync_method": "push", "sync_mode": "sync", "fleet": {"port": 0, "models": ["actor"]}}
    with build_controller(config) as built, contextlib.closing(ControllerClient(built.url)) as client:
        client.train_worker_notify_weight_update("trainer", "actor", "old", 7)
        assert client.next_push("actor", 7, "old", wait_s=LONG_S) is not None
        client.train_worker_notify_weight_update("trainer", "actor", "new", 1)
        order = client.next_push("actor", 1, "new", wait_s=LONG_S)
        assert order is not None
        client.push_done("actor", order, report(1, "new"))
        assert client.wait_version("new", "actor", 1, wait_s=LONG_S)


def test_a_rank_that_has_reported_finds_its_version_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks behind `push.step`. The method takes its time with the report."""
    checked = PushMethod._checked

    def slow(method: PushMethod, model_tag: str, version: Version, ended: SyncReport) -> int:
        threading.Event().wait(0.3)
        return checked(method, model_tag, version, ended)

    monkeypatch.setattr(PushMethod, "_checked", slow)
    config = {"sync_method": "push", "fleet": {"port": 0, "models": ["actor"]}}
    with build_controller(config) as built, contextlib.closing(ControllerClient(built.url)) as client:
        client.train_worker_notify_weight_update("trainer", "actor", "r", 1)
        order = client.next_push("actor", 1, "r", wait_s=LONG_S)
        assert order is not None
        client.push_done("actor", order, report(1))
        assert client.rollout_service_state("actor").rollout_model_version == 1


def test_a_report_of_another_run_is_no_success() -> None:
    config = {"sync_method": "push", "fleet": {"port": 0, "models": ["actor"], "retries_s": []}}
    with build_controller(config) as built, contextlib.closing(ControllerClient(built.url)) as client:
        client.train_worker_notify_weight_update("trainer", "actor", "r", 1)
        order = client.next_push("actor", 1, "r", wait_s=LONG_S)
        assert order is not None
        client.push_done("actor", order, report(1, "another"))
        assert not client.sync_weight_to_rollout_service("actor", wait_s=0.2)
        assert "under its push's run_id" in (client.rollout_service_state("actor").last_error or "")


@pytest.mark.parametrize("taken", [False, True])
def test_a_controller_that_is_closed_waits_for_no_rank(taken: bool) -> None:
    """Seen red: its thread waited on, for minutes, though nobody could take or report the order any more."""
    config = {"sync_method": "push", "sync_mode": "sync", "fleet": {"port": 0, "models": ["closing"]}}
    with build_controller(config) as built, contextlib.closing(ControllerClient(built.url)) as client:
        client.train_worker_notify_weight_update("trainer", "closing", "r", 1)
        wait_until(lambda: built.orders[0]._order is not None, "it is ordered")
        if taken:
            assert client.next_push("closing", 1, "r", wait_s=LONG_S) is not None

    def ended() -> bool:
        return "weightsync-sync-closing" not in {each.name for each in threading.enumerate()}

    wait_until(ended, "nobody waits", LONG_S)


class Engines:
    """What a `Pusher` pushes with: some pushes fail, or leave an engine out."""

    run_id = "r"

    def __init__(self, *outcomes: str) -> None:
        self._outcomes = list(outcomes)
        self.num_pushes = 0

    def sync_weights(self, version: int, *, error: WeightSyncError | None = None) -> SyncReport:
        self.num_pushes += 1
        match self._outcomes.pop(0):
            case "fails":
                raise SyncFailedError("a hiccup", causes={"e": LoadError("no room")})
            case "leaves one out":
                return dataclasses.replace(report(version), lost={"f": "it was away"})
        return report(version)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def pusher_of(url: str, engines: Engines) -> Iterator[Pusher]:
    taker = OrderTaker(url, "actor", token=None, verify=True, timeout_s=LONG_S, alone=True)
    opened = contextlib.ExitStack()
    opened.callback(taker.close)
    with Pusher(cast(PushSync, engines), opened, taker) as pusher:
        yield pusher


@pytest.mark.parametrize("trouble", ["fails", "leaves one out"])
def test_a_step_whose_push_failed_takes_the_retry_that_rollout_waits_for(trouble: str) -> None:
    """Its next batch comes from that rollout. Seen red: each retry waited for a next step, 120 s in vain."""
    config = {"sync_method": "push", "sync_mode": "sync", "fleet": {"port": 0, "models": ["actor"], "retries_s": [0.1]}}
    engines = Engines(trouble, "well")
    with build_controller(config) as built, pusher_of(built.url, engines) as push:
        pushed = push.step()
        assert pushed is not None
        assert not pushed.lost
        assert engines.num_pushes == 2
        assert built.controller.await_rollout_service("actor", timeout_s=LONG_S) == "continue"
        assert built.controller.rollout_service_state("actor").rollout_model_version == 1


def test_a_step_raises_when_all_retries_have_failed_and_rollout_goes_on() -> None:
    """Seen red: it raised after the first, and rollout was locked for the time of all orders to come."""
    fleet = {"port": 0, "models": ["actor"], "retries_s": [0.01, 0.02]}
    engines = Engines(*["fails"] * 3)
    with (
        build_controller({"sync_method": "push", "sync_mode": "sync", "fleet": fleet}) as built,
        pusher_of(built.url, engines) as push,
    ):
        with pytest.raises(SyncFailedError, match="a hiccup"):
            push.step()
        assert engines.num_pushes == 3
        assert built.controller.await_rollout_service("actor", timeout_s=LONG_S) == "continue"
        assert built.controller.rollout_service_state("actor").overdue


def test_a_step_whose_push_failed_waits_for_no_retry_that_nobody_waits_for() -> None:
    fleet = {"port": 0, "models": ["actor"], "retries_s": [600.0]}
    engines = Engines("fails")
    with (
        build_controller({"sync_method": "push", "sync_mode": "fully-async", "fleet": fleet}) as built,
        pusher_of(built.url, engines) as push,
    ):
        with pytest.raises(SyncFailedError, match="a hiccup"):
            push.step()
        assert engines.num_pushes == 1


class Lossy:
    """A call of `ControllerClient` whose first answers, or requests, are lost."""

    def __init__(
        self, patched: pytest.MonkeyPatch, name: str, *, heard: bool = True, num_lost: int = 1, proxy: bool = False
    ) -> None:
        self._call, self._heard, self.num_lost, self._proxy = getattr(ControllerClient, name), heard, num_lost, proxy
        patched.setattr(ControllerClient, name, lambda *args, **options: self._asked(*args, **options))

    def _asked(self, *args: Any, **options: Any) -> Any:
        if self.num_lost == 0:
            return self._call(*args, **options)
        self.num_lost -= 1
        if self._heard:
            self._call(*args, **options)
        raise EngineError("Bad Gateway", status=502) if self._proxy else EngineUnreachableError("the connection broke")


@pytest.mark.parametrize("loses", ["request", "answer", "request at a proxy"])
@pytest.mark.parametrize("call", ["train_worker_notify_weight_update", "next_push", "push_done"])
def test_an_exchange_that_is_lost_locks_rollout_for_no_time(
    call: str, loses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer waits for a batch behind the step, and asks no more. Seen red: rollout was locked for minutes."""
    lost = Lossy(monkeypatch, call, heard=loses == "answer", proxy="proxy" in loses)
    config = {"sync_method": "push", "sync_mode": "sync", "fleet": {"port": 0, "models": ["actor"]}}
    engines = Engines("well", "well")
    with build_controller(config) as built, pusher_of(built.url, engines) as push:
        assert push.step() is not None
        assert built.controller.await_rollout_service("actor", timeout_s=0.2) == "continue"
        assert built.controller.rollout_service_state("actor").rollout_model_version == 1
        assert push.step() is not None
        assert (engines.num_pushes, lost.num_lost) == (2, 0)


def test_a_report_that_nobody_heard_is_said_before_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the next step was told nothing, as its controller waited for that report."""
    monkeypatch.setattr(order_taker, "_AGAIN_S", 0.0)
    lost = Lossy(monkeypatch, "push_done", heard=False, num_lost=2)
    config = {"sync_method": "push", "sync_mode": "fully-async", "fleet": {"port": 0, "models": ["actor"]}}
    engines = Engines("well", "well")
    with build_controller(config) as built, pusher_of(built.url, engines) as push:
        assert push.step() is not None
        assert (lost.num_lost, built.controller.rollout_service_state("actor").rollout_model_version) == (0, 0)
        assert push.step() is not None
        assert built.controller.rollout_service_state("actor").rollout_model_version == 2
        assert engines.num_pushes == 2


def test_a_report_that_nobody_heard_is_said_at_the_end_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: nobody said it, and the sync whose version all engines serve counted as failed minutes later."""
    monkeypatch.setattr(order_taker, "_AGAIN_S", 0.0)
    Lossy(monkeypatch, "push_done", heard=False, num_lost=2)
    config = {"sync_method": "push", "sync_mode": "fully-async", "fleet": {"port": 0, "models": ["actor"]}}
    with build_controller(config) as built:
        with pusher_of(built.url, Engines("well")) as push:
            assert push.step() is not None
        assert built.controller.rollout_service_state("actor").rollout_model_version == 1


def test_no_order_is_made_twice_where_its_report_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red with an order that is given again, and a taker that does not look which it is."""

    def refuses(*args: object, **options: object) -> None:
        raise EngineError("413: too large")

    monkeypatch.setattr(ControllerClient, "push_done", refuses)
    monkeypatch.setattr(order_taker, "_ORDER_S", 2.0)
    config = {"sync_method": "push", "sync_mode": "fully-async", "fleet": {"port": 0, "models": ["actor"]}}
    engines = Engines("well")
    with build_controller(config) as built, pusher_of(built.url, engines) as push:
        assert push.step() is not None
        assert push.step() is None
        assert engines.num_pushes == 1


@pytest.mark.parametrize("ends", [False, True], ids=["long", "short"])
def test_the_last_version_is_pushed_behind_a_validation_that_ends_in_time(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a longer one nobody is left to push. Seen red: rollout was locked for the time of all orders to come; and,
    behind a short one, the last version was lost.
    """
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if ends:
            built.controller.end_validate("actor")

    monkeypatch.setattr(order_taker, "time", SimpleNamespace(sleep=look))
    monkeypatch.setattr(order_taker, "_ORDER_S", 10.0 if ends else 3.0)
    fleet = {"port": 0, "models": ["actor"]}
    config = {"sync_method": "push", "sync_mode": "batch-async", "staleness_threshold": 2, "validate_freq": 2}
    with build_controller({**config, "fleet": fleet}) as built:
        with pusher_of(built.url, Engines("well", "well")) as push:
            for _ in range(3):
                push.step()
            state = built.controller.rollout_service_state("actor")
            assert (state.rollout_model_version, state.waiting_for_validation is None) == (2, False)
        if not ends:
            built.controller.end_validate("actor")
        state = built.controller.rollout_service_state("actor")
        assert (state.blocked, state.state, state.rollout_model_version) == (False, "running", 3 if ends else 2)
        assert looks


def test_another_method_orders_nothing() -> None:
    config = {"sync_method": "mock", "fleet": {"port": 0}}
    with (
        build_controller(config) as built,
        contextlib.closing(ControllerClient(built.url)) as client,
        pytest.raises(StateError, match="set sync_method to 'push'"),
    ):
        client.next_push("default", None)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a report, or with an error"):
        PushDoneRequest(model_tag="m", order_id="0")
    with pytest.raises(InvalidRequestError):
        PushDoneRequest(model_tag="m", order_id="0", report=report(1), error={})
    with pytest.raises(InvalidRequestError, match="whole number"):
        NextPushRequest(model_tag="m", version=-1, run_id="r")
    with pytest.raises(InvalidRequestError, match="name run_id"):
        NextPushRequest(model_tag="m", version=1)
