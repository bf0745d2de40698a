"""`weightsync.publish`, `push` and `serve` as users call them: a trainer of some lines, a host of one call or command.

Everything is a process of its own, and what may die is killed: the host, the engine, the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.multiproc.pull_kit import shm_of, wait_until
from tests.multiproc.spine import TOKEN, build, cast_bytes, shard, step
from tests.standins.processes import Child, children, free_port, run_ranks
from tests.standins.threads import fail_starts
from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.clients.host import RolloutClient
from weightsync.config import WeightSyncConfig
from weightsync.control.build import build_controller
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import (
    AuthError,
    ConfigError,
    EngineUnreachableError,
    InvalidRequestError,
    StateError,
    SyncFailedError,
    WeightSyncError,
)
from weightsync.load.module import ModuleWeightLoader
from weightsync.tensors import byte_array
from weightsync.trainer import notifier, told
from weightsync.trainer.fleet_failures import failures_of
from weightsync.trainer.offload_steps import OffloadSteps
from weightsync.trainer.told_peers import ControllerPeer, version_of
from weightsync.types import Version
from weightsync.types.control import InstanceStatus
from weightsync.types.service import NotifyRequest
from weightsync.verbs import publishing
from weightsync.verbs.publishing import Publisher

_LONG_S = 60.0


def live_bytes(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: byte_array(t.detach().contiguous()).tobytes() for name, t in model.state_dict().items()}


def trained(steps: int) -> dict[str, bytes]:
    """What an engine serves after so many steps."""
    model = build(5)
    for _ in range(steps):
        step(model)
    return cast_bytes(model)


# --- the actors ---


def trainer_main(options: dict[str, Any], conn: Any) -> None:
    """Steps when it is told to; "end" leaves the block in order, "raise" by an exception."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests in the background has it ignored
    torch.set_num_threads(1)
    model = build(5)
    left_s = 0.0
    try:
        with weightsync.publish(model, "actor", token=TOKEN, **options) as publisher:
            conn.send(publisher.endpoint)
            try:
                while (order := heard(conn)) == "step":
                    step(model)
                    report = publisher.step()
                    conn.send((report.version.number, report.published, report.seconds))
                if order == "raise":
                    raise ZeroDivisionError
            finally:
                left_s = time.monotonic()
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    conn.send((time.monotonic() - left_s, dict(publisher.not_serving), shm_of(os.getpid())))
    os._exit(0)


def heard(conn: Any) -> Any:
    """The next order. A wait without an end hears no signal that comes the moment before it begins."""
    while not conn.poll(0.2):
        pass
    return conn.recv()


def host_main(sources: list[str], port: int, conn: Any) -> None:
    """A host with a torch module: one call."""
    torch.set_num_threads(1)
    model = build(99, dtype=torch.bfloat16)
    with weightsync.serve({"actor": model}, sources=sources, token=TOKEN, port=port) as service:
        conn.send(service.url)
        while conn.recv() is not None:
            with service.generation("actor") as version:
                conn.send((version and version.number, live_bytes(model)))
    os._exit(0)


def engine_main(port: int, conn: Any) -> None:
    """An engine behind HTTP, which a host drives from elsewhere."""
    torch.set_num_threads(1)
    model = build(99, dtype=torch.bfloat16)
    engine = EmbeddedEngine.of(ModuleWeightLoader(model), engine_id="actor")
    server = EngineServer(engine, port=port, token=TOKEN)
    conn.send(server.start())
    while conn.recv() is not None:
        with engine.generation() as version:
            conn.send((version and version.number, live_bytes(model)))
    os._exit(0)


def asked(child: Child) -> tuple[int | None, dict[str, bytes]]:
    child.conn.send("what do you serve?")
    number, weights = child.recv()
    return number, weights


def stepped(trainer: Child) -> int:
    trainer.conn.send("step")
    number, published, _ = trainer.recv()
    assert published
    return int(number)


def ended(trainer: Child) -> tuple[float, dict[str, str], list[str]]:
    trainer.conn.send("end")
    took_s, not_serving, shm = trainer.recv()
    return took_s, not_serving, shm


def serves(child: Child, number: int) -> bool:
    version, weights = asked(child)
    if version != number:
        return False
    assert weights == trained(number)
    return True


# --- publish and serve ---


@contextlib.contextmanager
def followed() -> Iterator[tuple[str, Child, Child, RolloutClient]]:
    """A trainer's address, the trainer, a host that serves its first version unnotified, and the host's client."""
    source = f"http://127.0.0.1:{(port := free_port())}"
    with children() as start:
        host = start(host_main, [source], 0, talk=True, name="host")
        with contextlib.closing(RolloutClient(host.recv(), token=TOKEN)) as client:
            trainer = start(trainer_main, {"port": port}, talk=True, name="trainer")
            trainer.recv()
            stepped(trainer)
            wait_until(lambda: serves(host, 1), "the first version is served", _LONG_S)
            yield source, trainer, host, client


def test_a_host_that_nobody_notifies_follows_and_has_the_last_version_when_the_block_ends() -> None:
    with followed() as (source, trainer, host, client):
        for number in (2, 3):
            assert stepped(trainer) == number
        _, not_fetched, shm = ended(trainer)
        assert (not_fetched, shm) == ({}, [])
        wait_until(lambda: serves(host, 3), "the last version is served", _LONG_S)
        wait_until(lambda: client.status().models["actor"].ended, "that its trainer has ended is no failure", _LONG_S)
        seen = client.status().models["actor"]
        assert (seen.ended, seen.sender_errors) == ((source,), {})


def test_a_trainer_that_ends_by_an_exception_has_not_ended_in_order() -> None:
    """Seen red: "out of memory" was told to its hosts as a good end."""
    with followed() as (source, trainer, _, client):
        trainer.conn.send("raise")
        trainer.recv()
        wait_until(lambda: source in client.status().models["actor"].sender_errors, "it is missed", _LONG_S)
        assert client.status().models["actor"].ended == ()


def test_the_trainer_goes_on_when_its_host_is_killed_and_one_that_is_started_again_rejoins() -> None:
    port = free_port()
    with children() as start:
        host = start(host_main, [], port, talk=True, name="host")
        url = host.recv()
        trainer = start(trainer_main, {"port": 0, "to": [url]}, talk=True, name="trainer")
        trainer.recv()
        stepped(trainer)
        wait_until(lambda: serves(host, 1), "the first version is served", _LONG_S)
        host.kill()
        for number in (2, 3):  # nobody is there
            trainer.conn.send("step")
            found, published, seconds = trainer.recv()
            assert (found, published) == (number, True)
            assert seconds < 10.0
        again = start(host_main, [], port, talk=True, name="host, again")
        again.recv()
        wait_until(lambda: serves(again, 3), "it is brought up to date without a step", _LONG_S)
        stepped(trainer)
        assert ended(trainer)[1] == {}
        assert serves(again, 4)


def test_the_end_of_the_block_does_not_wait_for_who_is_dead() -> None:
    with children() as start:
        host = start(host_main, [], 0, talk=True, name="host")
        url = host.recv()
        trainer = start(trainer_main, {"port": 0, "to": [url], "last_wait_s": 300.0}, talk=True, name="trainer")
        trainer.recv()
        stepped(trainer)
        host.kill()
        stepped(trainer)
        took_s, not_serving, shm = ended(trainer)
        assert took_s < 30.0
        assert list(not_serving) == [url]
        assert "can't connect" in not_serving[url]
        assert shm == []


@pytest.mark.parametrize("how", ["raise", "Ctrl-C"])
def test_an_exception_leaves_the_block_at_once_and_gives_memory_back(how: str) -> None:
    with children() as start:
        host = start(host_main, [], 0, talk=True, name="host")
        url = host.recv()
        trainer = start(trainer_main, {"port": 0, "to": [url], "last_wait_s": 300.0}, talk=True, name="trainer")
        trainer.recv()
        stepped(trainer)
        host.stop()  # whoever waited for it would wait long
        if how == "raise":
            trainer.conn.send("raise")
        else:
            os.kill(trainer.pid, signal.SIGINT)
        took_s, _, shm = trainer.recv()
        host.cont()
        assert took_s < 20.0
        assert shm == []


def sharded_main(rank: int, world_size: int, url: str, port: int) -> None:
    model = shard(build(5), "shard0", world_size)
    with weightsync.publish(model, "actor", to=url, token=TOKEN, port=port) as publisher:
        for _ in range(3):
            step(model)
            publisher.step()
    assert publisher.not_serving == {}


def test_every_rank_of_a_sharded_trainer_writes_the_same_lines_and_its_host_needs_to_know_nobody() -> None:
    with children() as start:
        host = start(host_main, [], 0, talk=True, name="host")
        run_ranks(sharded_main, 2, host.recv(), free_port())
        assert serves(host, 3)


def _no_route_main(rank: int, world_size: int) -> str:
    def no_route(urls: object, *, instead: str) -> None:
        if rank == 1:
            raise ConfigError("no address of this machine leads to host-0")

    publishing.address_towards = no_route  # type: ignore[assignment]
    try:
        with weightsync.publish(build(5), "actor", token=TOKEN, port=0, last_wait_s=0):
            return "entered"
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_whose_host_has_no_route_to_the_others_tells_all_ranks() -> None:
    """Seen red: that rank raised alone, and the others waited for it."""
    for said in run_ranks(_no_route_main, 2):
        assert said.startswith("ConfigError: no address of this machine leads to host-0")


def test_what_can_be_checked_is_refused_on_entry() -> None:
    model = build(5)
    served = build(99, dtype=torch.bfloat16)
    port = free_port()
    with weightsync.serve({"actor": served}, token=TOKEN, port=0) as service:
        with pytest.raises(AuthError):
            weightsync.publish(model, "actor", to=service.url, token="another-token-for-tests", port=port)
        with pytest.raises(ConfigError, match="did you mean 'actor'"):
            weightsync.publish(model, "actr", to=service.url, token=TOKEN, port=port)
        with pytest.raises(ConfigError, match="weights are a module"):
            weightsync.publish(3, "actor", to=service.url, token=TOKEN, port=port)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="choose another port"):
            weightsync.publish(model, "actor", token=TOKEN, port=int(service.url.rsplit(":", 1)[1]))
        for wait_s in (-1, "5", True, float("nan"), 1e308):
            with pytest.raises(ConfigError, match="last_wait_s"):
                weightsync.publish(model, "actor", token=TOKEN, port=port, last_wait_s=wait_s)  # type: ignore[arg-type]
        for model_id in ("", 3):
            with pytest.raises(ConfigError, match="model_id has 1 to"):
                weightsync.publish(model, model_id, token=TOKEN, port=port)  # type: ignore[arg-type]
        for timeout_s in (float("nan"), -1, float("inf"), "1"):
            with (
                pytest.raises(InvalidRequestError, match="timeout_s is a number of seconds"),
                service.generation("actor", timeout_s=timeout_s),  # type: ignore[arg-type]
            ):
                pass
        engine = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(served), engine_id="e"), token=TOKEN)
        with pytest.raises(ConfigError, match="is an engine: engines are not told of versions"):
            weightsync.publish(model, "actor", to=engine.start(), token=TOKEN, port=port)
        engine.close()
        with pytest.raises(ConfigError, match="did you mean 'actor'"), service.generation("acto"):
            pass
    with pytest.raises(ConfigError, match="sync_method"):
        weightsync.publish(model, "actor", config={"sync_method": "push"})
    with pytest.raises(ConfigError, match="serve needs the engines"):
        weightsync.serve({})
    with pytest.raises(ConfigError, match="reachable from other machines"):
        weightsync.serve({"actor": served}, host="0.0.0.0", port=0)
    with weightsync.publish(model, "actor", token=TOKEN, port=port) as publisher:
        assert isinstance(publisher, Publisher)
        with pytest.raises(AuthError):
            weightsync.serve({"actor": served}, sources=[publisher.endpoint], token="another-token-for-tests", port=0)
        with pytest.raises(ConfigError, match="did you mean 'actr'"):
            weightsync.serve({"actr": served}, sources=[publisher.endpoint], token=TOKEN, port=0)
    settings = WeightSyncConfig.load({"sync_method": "pull", "fleet": {"models": ["actor"], "port": 0}})
    with (
        build_controller(settings, token=TOKEN) as controller,
        pytest.raises(ConfigError, match=r"is no trainer's agent: .* \(a controller is given as controller="),
    ):
        weightsync.serve({"actor": served}, sources=[controller.url], token=TOKEN, port=0)


def test_an_engine_in_to_is_refused_on_entry_in_words_that_say_what_to_write(tmp_path: Path) -> None:
    """Seen red: a warning, and a run that ended well, of which nobody had a version."""
    server = VllmStandIn(write_checkpoint(tmp_path, 0))
    with contextlib.closing(server):
        url = server.start()
        for to in (url, f"vllm+{url}", [url]):
            with pytest.raises(ConfigError) as caught:
                weightsync.publish(build(5), "actor", to=to, token=TOKEN, port=0)
            assert f"weightsync.push(model, 'vllm+{url}')" in str(caught.value)
            assert f"weightsync serve --engine actor=vllm+{url}" in str(caught.value)
    with pytest.raises(ConfigError, match="has an '@'"):
        weightsync.publish(build(5), "actor", to="vllm+http://user:secret@127.0.0.1:1", token=TOKEN, port=0)


def test_an_engine_in_to_that_comes_later_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with weightsync.publish(
        build(5), "actor", to=f"http://127.0.0.1:{port}", token=TOKEN, port=0, last_wait_s=0
    ) as publisher:
        publisher.step()
        wait_until(lambda: "can't connect" in caplog.text, "nobody is there", _LONG_S)
        engine = EngineServer(
            EmbeddedEngine.of(ModuleWeightLoader(build(99, dtype=torch.bfloat16))), token=TOKEN, port=port
        )
        engine.start()
        wait_until(lambda: "in to= is an engine: engines are not told" in caplog.text, "it is found out", _LONG_S)
        engine.close()


def test_a_wrong_port_in_to_and_a_wrong_token_of_a_controller_are_told_by_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: "does a weightsync rollout service run there", and "it was sent --token" of a token in a variable."""
    to = f"http://127.0.0.1:{free_port()}"
    with weightsync.publish(build(5), "actor", to=to, token=TOKEN, port=0):
        assert "does a weightsync rollout service or controller run there" in caplog.text
    port, said = free_port(), "it was sent --controller-token or --token"
    settings = WeightSyncConfig.load({"sync_method": "pull", "fleet": {"models": ["actor"], "port": port}})
    served = {"actor": build(99, dtype=torch.bfloat16)}
    begin = functools.partial(
        weightsync.serve, served, token=f"not-{TOKEN}", port=0, controller=f"http://127.0.0.1:{port}",
        lease=str(tmp_path / "lease"),
    )  # fmt: skip
    with begin(), build_controller(settings, token=TOKEN):
        wait_until(lambda: said in caplog.text, "it is said", _LONG_S)
    with build_controller(settings, token=TOKEN), pytest.raises(AuthError, match=said):
        begin()


def test_a_controller_in_place_of_hosts_is_told_and_its_fleet_has_the_last_version(tmp_path: Path) -> None:
    settings = WeightSyncConfig.load({"sync_method": "pull", "fleet": {"models": ["actor"], "port": 0}})
    served = build(99, dtype=torch.bfloat16)
    with contextlib.ExitStack() as stack:
        controller = stack.enter_context(build_controller(settings, token=TOKEN))
        host = stack.enter_context(
            weightsync.serve(
                {"actor": served}, token=TOKEN, port=0, controller=controller.url, lease=str(tmp_path / "lease"),
                service_id="host-0",
            )
        )  # fmt: skip
        elsewhere = NotifyRequest(model_id="actor", version=1, run_id="r", sender_endpoint="http://127.0.0.1:9")
        told = stack.enter_context(contextlib.closing(RolloutClient(host.url, token=TOKEN)))
        with pytest.raises(ConfigError, match=f"the controller at {controller.url} says"):
            told.notify_version(elsewhere)
        with pytest.raises(ConfigError, match=f"is one service of the fleet of {controller.url}"):
            weightsync.publish(build(1), "actor", to=host.url, token=TOKEN, port=0)
        start = stack.enter_context(children())
        trainer = start(trainer_main, {"port": 0, "to": controller.url}, talk=True, name="trainer")
        trainer.recv()
        for _ in range(2):
            stepped(trainer)
        assert ended(trainer)[1] == {}
        with host.generation("actor") as version:
            assert version is not None
            assert (version.number, live_bytes(served)) == (2, trained(2))


def test_a_trainer_is_told_why_its_fleet_serves_nothing_once_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: "does not serve it within 5.99994 s", and not a word before."""
    settings = WeightSyncConfig.load({"sync_method": "pull", "fleet": {"models": ["actor"], "port": 0}})
    with contextlib.ExitStack() as stack:
        controller = stack.enter_context(build_controller(settings, token=TOKEN))
        stack.enter_context(
            weightsync.serve(
                {"actor": build(99, dtype=torch.bfloat16)}, token=TOKEN, port=0, controller=controller.url,
                lease=str(tmp_path / "lease"), service_id="host-0",
            )
        )  # fmt: skip
        publisher = weightsync.publish(
            build(5), "actor", to=controller.url, token=TOKEN, port=0, name_map=lambda name: f"module.{name}",
            last_wait_s=2,
        )  # fmt: skip
        with publisher:
            publisher.step()
            wait_until(
                lambda: re.search("not served there: host-0: .*ManifestMism", caplog.text), "it is said", _LONG_S
            )
            assert "ManifestMismatchError" in publisher.not_serving[controller.url], "without a wait, too"
            for _ in range(3):
                publisher.step()
        assert "ManifestMismatchError" in publisher.not_serving[controller.url]
        said = publisher.not_serving[controller.url]
        assert re.match(r"it does not serve it within [12](\.\d+)? s: ", said), said  # what the proof has left of 2 s
        said = [each.getMessage() for each in caplog.records if "is not served there" in each.getMessage()]
        assert len(said) == len({re.sub(r"\d+", "", each) for each in said})
        assert any("ManifestMismatchError" in each for each in said)


def test_a_controller_that_has_not_heard_of_a_version_does_not_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: "all that it knows is served", and the version was withdrawn, which nobody had."""

    def down(*_: Any) -> None:
        raise EngineUnreachableError("down")

    monkeypatch.setattr(ControllerPeer, "tell", down)
    settings = WeightSyncConfig.load({"sync_method": "mock", "fleet": {"models": ["actor"], "port": 0}})
    with (
        build_controller(settings, token=TOKEN) as controller,
        weightsync.publish(build(5), "actor", to=controller.url, token=TOKEN, port=0, last_wait_s=0) as publisher,
    ):
        publisher.step()
        assert list(publisher.wait_served(_LONG_S)) == [controller.url]


def test_what_a_wait_has_found_is_never_nothing() -> None:
    """Seen red: an error without words was taken for "it is served"; a run that serves nothing yet has number -1."""
    waits: list[Future[str | None]] = [Future() for _ in range(3)]
    waits[0].set_exception(MemoryError())
    waits[1].set_result("it is behind")
    waits[2].set_result(None)
    assert [notifier._outcome(wait) for wait in waits] == ["MemoryError", "it is behind", None]
    assert version_of("b", -1) is None


def test_who_could_not_be_waited_for_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was named until the next version, though it serves the newest."""

    def gone(self: Any, version: Version, wait_s: float) -> bool:
        raise EngineUnreachableError("gone")

    monkeypatch.setattr(told, "_LOOK_S", 0.5)
    with (
        weightsync.serve({"actor": build(99, dtype=torch.bfloat16)}, token=TOKEN, port=0) as service,
        weightsync.publish(build(5), "actor", to=service.url, token=TOKEN, port=0, last_wait_s=0) as publisher,
    ):
        publisher.step()
        assert publisher.wait_served(_LONG_S) == {}
        (host,) = publisher._notifier._hosts
        wait_until(lambda: not host._behind, "it was seen to serve it", _LONG_S)
        monkeypatch.setattr(told.Told, "_serves", gone)
        assert publisher.wait_served(_LONG_S) == {service.url: "gone"}
        wait_until(lambda: publisher.not_serving == {}, "it was looked at again", _LONG_S)


def test_a_host_that_is_started_again_between_two_steps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it knew of no version until the next step, and behind the last one never."""
    monkeypatch.setattr(told, "_STILL_S", 0.2)
    monkeypatch.setattr(told, "_LOOK_S", 0.2)
    port = free_port()
    host = weightsync.serve({"actor": build(99, dtype=torch.bfloat16)}, token=TOKEN, port=port)
    with weightsync.publish(build(5), "actor", to=host.url, token=TOKEN, port=0, last_wait_s=0) as publisher:
        publisher.step()
        assert publisher.wait_served(_LONG_S) == {}
        host.close()
        with weightsync.serve({"actor": build(98, dtype=torch.bfloat16)}, token=TOKEN, port=port) as again:
            wait_until(lambda: again.model_status("actor").version is not None, "it is told without a step", _LONG_S)


def test_the_end_of_the_block_waits_for_number_0_too() -> None:
    """Seen red: it was withdrawn at once, and the host had nothing."""
    with weightsync.serve({"actor": build(99, dtype=torch.bfloat16)}, token=TOKEN, port=0) as service:
        with weightsync.publish(build(5), "actor", to=service.url, token=TOKEN, port=0) as publisher:
            publisher.step(version=0)
        assert publisher.not_serving == {}
        assert service.model_status("actor").version == 0


def test_a_wait_that_can_not_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: RuntimeError on rank 0, and the others waited for it."""
    with weightsync.publish(build(5), "actor", to="http://127.0.0.1:9", token=TOKEN, port=0) as publisher:
        publisher.step()
        fail_starts(monkeypatch, "weightsync-wait")
        assert publisher.wait_served(_LONG_S) == {"http://127.0.0.1:9": "can't start new thread"}


def test_a_number_that_failed_half_way_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: every later step raised VersionError."""
    publish, fails = OffloadSteps.publish, [True]

    def once(*args: Any, **options: Any) -> Any:
        if fails:
            fails.pop()
            raise MemoryError
        return publish(*args, **options)

    monkeypatch.setattr(OffloadSteps, "publish", once)
    with weightsync.publish(build(5), "actor", token=TOKEN, port=0, last_wait_s=0) as publisher:
        with pytest.raises(MemoryError):
            publisher.step()
        assert publisher.step().version.number == 2
        publisher.manager.wait_published(2, timeout_s=_LONG_S)


def test_who_has_caught_up_since_the_last_wait_is_not_named_any_more() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with weightsync.publish(build(5), "actor", to=url, token=TOKEN, port=0, last_wait_s=0) as publisher:
        publisher.step()
        assert list(publisher.wait_served(_LONG_S)) == [url]
        assert "can't connect" in publisher.not_serving[url]
        with weightsync.serve({"actor": build(99, dtype=torch.bfloat16)}, token=TOKEN, port=port):
            wait_until(lambda: publisher.not_serving == {}, "it serves, and nobody waited for it", _LONG_S)
            publisher.step()
            assert publisher.not_serving == {}
            assert publisher._away() == {}, "it is given all of the time"
            assert publisher.wait_served(_LONG_S) == {}


def test_an_instance_that_only_joins_has_not_failed() -> None:
    joins = InstanceStatus(instance_id="a", url="http://h", state="joining", why="it waits until a sync has ended")
    fails = InstanceStatus(instance_id="b", url="http://h", state="live", why="m: e: it has no room", failed=True)
    assert failures_of((joins, fails), None, all_of_them=False) == {"b": "m: e: it has no room"}
    assert list(failures_of((joins, fails), None, all_of_them=True)) == ["a", "b"]
    sync = "SyncFailedError: 1 of 2 instances failed: b: LoadError: m: e: it has no room"
    assert list(failures_of((joins, fails), sync, all_of_them=False)) == ["b"], "seen red: it was said twice"
    assert list(failures_of((joins, fails), "NoEnginesError: cut", all_of_them=False)) == ["", "b"]
    more = "SyncFailedError: 2 of 3 instances failed: b: LoadError: m: e: it has no room; c: LoadError: m: e: cut"
    assert list(failures_of((joins, fails), more, all_of_them=False)) == ["", "b"], "c is told nowhere else"
    wordless = InstanceStatus(instance_id="b", url="http://h", state="live", why="m: AssertionError: ", failed=True)
    assert list(failures_of((wordless,), sync, all_of_them=False)) == ["", "b"]


# --- the command ---


class ServeCommand:
    """A running `weightsync serve`."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightsync.cli", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            env={**os.environ, "WEIGHTSYNC_TOKEN": TOKEN, "TERM": "dumb", "NO_COLOR": "1"},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> int:
        """Its exit code, when all that it has said is heard."""
        code = self.process.wait(_LONG_S)
        self._reader.join(_LONG_S)
        return code

    def line(self, pattern: str) -> str:
        """The next line that fits."""
        end = time.monotonic() + _LONG_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r}:\n{self.said}") from None
            if re.search(pattern, line):
                return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            self._lines.put(line)


@contextlib.contextmanager
def command(*words: str) -> Iterator[ServeCommand]:
    running = ServeCommand(*words)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)


def test_a_host_is_one_command_and_an_engine_that_is_killed_and_started_again_is_loaded() -> None:
    port, engine_port = free_port(), free_port()
    with children() as start:
        engine = start(engine_main, engine_port, talk=True, name="engine")
        url = engine.recv()
        source = f"http://127.0.0.1:{port}"
        with command("--engine", f"actor={url}", "--from", source, "--port", "0") as host:
            assert f"following {source}" in host.line("^actor at http")
            trainer = start(trainer_main, {"port": port}, talk=True, name="trainer")
            trainer.recv()
            stepped(trainer)
            host.line("actor serves run-[0-9a-f]+/1: .* MB mapped")
            assert serves(engine, 1)
            engine.kill()
            stepped(trainer)
            again = start(engine_main, engine_port, talk=True, name="engine, again")
            again.recv()
            wait_until(lambda: serves(again, 2), "the engine is loaded again", _LONG_S)
            stepped(trainer)
            assert ended(trainer)[1] == {}
            wait_until(lambda: serves(again, 3), "the last version is served", _LONG_S)
            os.killpg(host.process.pid, signal.SIGINT)
            assert host.end() == 0
        assert "stopped by a signal" in host.said
        assert "Traceback" not in host.said
        assert serves(again, 3)


# --- push ---


def pushing_main(rank: int, world_size: int, urls: list[str]) -> list[str]:
    model = shard(build(5), "shard0", world_size)
    said = []
    with weightsync.push(model, urls, token=TOKEN) as push:
        for _ in range(2):
            step(model)
            said.append(str(push.step()))
    return said


def test_ranks_push_to_urls_and_the_report_is_one_line() -> None:
    with children() as start:
        engines = [start(engine_main, 0, talk=True, name=f"engine-{number}") for number in range(2)]
        for lines in run_ranks(pushing_main, 2, [engine.recv() for engine in engines]):
            assert len(lines) == 2
            for number, line in enumerate(lines, start=1):
                assert re.fullmatch(rf"v{number}: \d+\.\d [kM]B in \d+\.\d\d s, paused \d+ ms, proved", line)
        assert all(serves(engine, 2) for engine in engines)


def wrong_push_main(rank: int, world_size: int, url: str) -> str:
    model = shard(build(5), "shard0", world_size)
    try:
        weightsync.push(model, url, token=TOKEN, name_map=lambda name: name.replace("wide", "wider"))
    except WeightSyncError as error:
        return str(error)
    return "nothing"


def test_a_model_of_other_names_fails_on_entry_on_every_rank_and_says_the_closest_one() -> None:
    with children() as start:
        engine = start(engine_main, 0, talk=True, name="engine")
        for said in run_ranks(wrong_push_main, 2, engine.recv()):
            assert "blocks.0.wider.weight" in said
            assert "closest that it has is 'blocks.0.wide.weight'" in said
            assert "name_map" in said
        assert asked(engine)[0] is None


def test_a_push_that_is_closed_pushes_nothing() -> None:
    """Seen red: it pushed, and built a transfer group that nobody closed."""
    model, served = build(5), build(99, dtype=torch.bfloat16)
    with weightsync.push(model, [served]) as push:
        push.step()
    before = live_bytes(served)
    step(model)
    with pytest.raises(StateError, match=r"this push is closed: step\(\) belongs into its with block"):
        push.step()
    for call in (push.sync.initialize, push.sync.check, lambda: push.sync.sync_weights(2)):
        with pytest.raises(StateError, match="this PushSync is closed"):
            call()
    push.close()
    push.sync.close()
    assert live_bytes(served) == before


def test_a_module_of_this_process_is_pushed_to_and_a_wrong_address_fails_on_entry() -> None:
    model, served = build(5), build(99, dtype=torch.bfloat16)
    with weightsync.push(model, [served]) as push:
        step(model)
        report = push.step()
    assert (report.version.number, report.digests_equal) == (1, True)
    assert live_bytes(served) == cast_bytes(model)
    with pytest.raises(WeightSyncError, match="can't connect"):
        weightsync.push(model, f"weightsync+http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="push needs engines"):
        weightsync.push(model)
    with pytest.raises(SyncFailedError, match="dtype of publish, push"):
        weightsync.push(model, [build(99)])
