"""Versions through an object store: real trainers, their writers and hosts, over an S3 server and a folder."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.pull_kit import RefusedError, shm_of, wait_until
from tests.multiproc.store_kit import SEED, StoreTrainer, host_of, in_environment, record, serves
from tests.multiproc.test_cli_pull import invoke
from tests.standins.processes import children, run_ranks
from tests.standins.stores import BUCKET, FaultProxy, at_endpoint, s3_server
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.objects.opened import open_store
from weightsync.trainer import sink_process
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Deadline
from weightsync.types.sink import SinkConfig
from weightsync.verbs import storing
from weightsync.verbs.storing import sink_config

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

_LONG_S = 120.0


@pytest.fixture
def start() -> Iterator[Any]:
    with children() as starter:

        def start_here(function: Any, *args: Any, **options: Any) -> Any:
            here = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            return starter(in_environment, here, function, *args, **options)

        yield start_here


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/run"
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}"


BOTH = pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)


def objects(place: str) -> dict[str, int]:
    return {each.key: each.nbytes for each in open_store(place).list_under("", deadline=Deadline(20))}


def chain(start: Any, place: str, num_versions: int) -> None:
    """Two hosts follow live; one is stopped for a quarter of the versions; a joiner comes when the trainer is gone."""
    stopped, continued = num_versions * 2 // 5, num_versions * 2 // 5 + num_versions // 4
    trainer = StoreTrainer(start, place, publish={"anchor_every": 16, "keep_s": 2.0})
    trainer.step(1)
    live, other = host_of(start, place), host_of(start, place)
    sizes, counts, seen, lags = [], [], dict.fromkeys((1,), 0), []
    for number in range(2, num_versions + 1):
        if number == stopped:
            wait_until(lambda: serves(other, SEED, stopped - 1), "the other host follows", _LONG_S)
            os.kill(other.pid, signal.SIGSTOP)
        if number == continued:
            os.kill(other.pid, signal.SIGCONT)
        before = objects(place)
        said = trainer.step(number)
        assert said["published"]
        assert said["why"] is None
        begun_s = time.monotonic()
        now = objects(place)
        sizes.append(sum(nbytes for key, nbytes in now.items() if key not in before))
        counts.append(len(now))
        if number % 6 == 0:
            wait_until(lambda n=number: serves(live, SEED, n), f"the live host serves {number}", _LONG_S)
            lags.append(time.monotonic() - begun_s)
            seen[number] = live.status().num_deltas
    wait_until(lambda: serves(live, SEED, num_versions), "the live host serves the last", _LONG_S)
    wait_until(lambda: serves(other, SEED, num_versions), "the stopped host has caught up", _LONG_S)
    assert any(seen.values()), "deltas were taken"
    full = max(nbytes for key, nbytes in objects(place).items() if "/anchors/" in key)
    record(f"store-{place.partition(':')[0]}-{num_versions}.json", {"full": full, "sizes": sizes, "lags": lags})
    assert sorted(sizes)[len(sizes) // 2] < full / 4
    assert max(counts) < max(156, 3 * num_versions // 2), "what nobody needs is deleted as versions come"
    wait_until(lambda: len(objects(place)) < 2 * 3 * 16 + 20, "what nobody needs is deleted", _LONG_S)
    for host in (live, other):
        host.ask("close")
    trainer.ask("close")
    assert not shm_of(trainer.pid)
    trainer.child.kill()
    joiner = host_of(start, place)
    wait_until(lambda: serves(joiner, SEED, num_versions), "a joiner without a trainer", _LONG_S)
    joiner.ask("close")


@BOTH
def test_a_chain_followed_live_and_joined_without_a_trainer(start: Any, place: str) -> None:
    chain(start, place, 12)


@pytest.mark.soak
@BOTH
@pytest.mark.timeout(1500)
def test_a_chain_of_200_versions(start: Any, place: str) -> None:
    chain(start, place, 200)


def test_a_second_trainer_is_refused_and_a_dead_ones_place_is_taken(start: Any, tmp_path: Path) -> None:
    """The first lives: a typed error, before anything is published. It is killed: its place is taken over, its hosts go
    on with the new run."""
    place = f"file://{tmp_path}/run"
    first = StoreTrainer(start, place)
    first.step(1)
    host = host_of(start, place)
    wait_until(lambda: serves(host, SEED, 1), "the first run", _LONG_S)
    with pytest.raises(RefusedError, match="RunClaimedError"):
        StoreTrainer(start, place, seed=SEED + 1)
    sink = first.state()["pid"]
    first.step(2)
    first.child.kill()
    wait_until(lambda: not Path(f"/proc/{sink}").exists(), "the writer ends with its trainer", _LONG_S)
    second = StoreTrainer(start, place, seed=SEED + 2)
    second.step(1)
    wait_until(lambda: serves(host, SEED + 2, 1), "the run after it", _LONG_S)
    second.ask("close")
    host.ask("close")


def alive(pid: int) -> int | None:
    return pid if Path(f"/proc/{pid}/exe").exists() else None


def test_a_writer_that_is_killed_is_started_again(start: Any, tmp_path: Path) -> None:
    """Again and again, at any moment: the trainer's steps do not wait, and the host ends on the newest."""
    place = f"file://{tmp_path}/run"
    trainer = StoreTrainer(start, place)
    trainer.step(1)
    host = host_of(start, place)
    chance = random.Random(5)
    for number in range(2, 8):
        trainer.step(number, wait_s=0.0)
        if number in (3, 5):
            time.sleep(chance.random() * 0.05)
            sink = wait_until(lambda: alive(trainer.state()["pid"]), "the writer is there", _LONG_S)
            os.kill(sink, signal.SIGKILL)
    trainer.step(8, wait_s=_LONG_S)
    wait_until(lambda: serves(host, SEED, 8), "the last version", _LONG_S)
    assert trainer.state()["slowest_s"] < 6.0, "a guard of 1 s, and a machine that stands still; no writer's start"
    trainer.ask("close")
    host.ask("close")


def test_faults_of_the_store_at_random(start: Any, s3: str, tmp_path: Path) -> None:
    """Throttled, cut, dropped and damaged answers in both directions: whatever is served is right, and the last version
    comes."""
    proxy, chance = FaultProxy(s3), random.Random(7)
    faults = [429, 503, "drop", "cut", "flip"]
    proxy.rule = lambda method, path: chance.choice(faults) if chance.random() < 0.15 else None
    place = f"s3://{BUCKET}/{tmp_path.name}"
    try:
        with at_endpoint(proxy.url):
            trainer = StoreTrainer(start, place, publish={"anchor_every": 4})
            host = host_of(start, place)
            for number in range(1, 13):
                assert trainer.step(number, wait_s=_LONG_S)["published"]
                version, right = host.serving("e")
                assert right, version
            proxy.rule = lambda method, path: None
            trainer.step(13, wait_s=_LONG_S)
            wait_until(lambda: serves(host, SEED, 13), "the last version", _LONG_S)
            proxy.rule = lambda method, path: 403  # the credential has expired
            asked = proxy.num_asked
            trainer.step(14, wait_s=3.0)
            wait_until(
                lambda: any(words in trainer.state()["error"] for words in ("StoreAuthError", "refuses")), "it says why"
            )
            assert proxy.num_asked - asked < 60, "nobody storms"
            proxy.rule = lambda method, path: None
            trainer.step(15, wait_s=_LONG_S)
            wait_until(lambda: serves(host, SEED, 15), "with a new credential", _LONG_S)
            host.ask("close")
            trainer.ask("close")
    finally:
        proxy.close()


def test_a_slow_store_costs_the_trainer_nothing_and_passes_versions_by(start: Any, s3: str, tmp_path: Path) -> None:
    """What is uploaded is a copy of the writer's own."""
    proxy = FaultProxy(s3)

    def slow(method: str, path: str) -> None:
        if method == "PUT" and "/e0" in path:
            time.sleep(0.7)

    proxy.rule = slow
    place = f"s3://{BUCKET}/{tmp_path.name}"
    try:
        with at_endpoint(proxy.url):
            trainer = StoreTrainer(start, place, guard_s=5.0)
            for number in range(1, 31):
                assert trainer.step(number, wait_s=0.0)["published"]
                time.sleep(0.05)
            trainer.step(31, wait_s=_LONG_S)
            written = [key for key in objects(place) if "/versions/" in key]
            assert 1 <= len(written) < 25, "versions are passed by"
            trainer.ask("close")
    finally:
        proxy.close()


def test_the_commands(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keygen, a signed place, serve's trust, pull and export, without a trainer."""
    place = f"file://{tmp_path}/run"

    monkeypatch.chdir(tmp_path)
    made = subprocess.run([sys.executable, "-m", "weightsync.cli", "keygen", "key"], capture_output=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert invoke("keygen", "other")[0] == 0
    trainer = StoreTrainer(start, place, sign_key=f"{tmp_path}/key.secret")
    for number in (1, 2, 3):
        trainer.step(number)
    trainer.ask("close")
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    (like / "model.safetensors").write_bytes(b"not this one")
    code, said, error = invoke("pull", place, "--out", "out", "--trust-key", "key.public")
    assert code == 0, error
    assert "seed-1000/3" in said
    code, _, error = invoke("pull", place, "--out", "out2", "--trust-key", "other.public")
    assert code == 1
    assert "SignatureError" in error
    for version, folder in ((2, "two"), (None, "three")):
        extra = () if version is None else ("--version", str(version))
        code, _, error = invoke("export", place, folder, "--like", "like", "--shard-gb", "0.00003", *extra)
        assert code == 0, error
        check_checkpoint(tmp_path / folder, version or 3)
    assert invoke("export", place, "two")[0] == 2
    assert invoke("export", "http://127.0.0.1:1", "four", "--version", "3")[0] == 2
    assert invoke("export", place, "five", "--version", "9", "--timeout-s", "2")[0] == 1
    assert not (tmp_path / "five").exists()


def check_checkpoint(folder: Path, number: int) -> None:
    import json

    from safetensors import safe_open

    from tests.multiproc.pull_kit import content

    assert (folder / "config.json").read_text() == "{}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    right = content(SEED, number, 64)
    assert set(index["weight_map"]) == set(right)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in right.values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.get_tensor(name).equal(right[name]), name
    assert len(set(index["weight_map"].values())) > 1


def test_a_trainer_stores_nothing_in_a_memory_that_nobody_else_sees() -> None:
    """Its writer is a process of its own."""
    with pytest.raises(ConfigError, match="one process's memory"):
        sink_config(
            WeightSyncConfig(), store="memory://a/run", sign_key=None, model_id="m", token=None, certificate=None
        )


def test_what_is_said_of_a_store_that_there_is_not_is_refused() -> None:
    """Seen red: a key was given, nothing was signed or stored, and nothing said so."""
    said: list[tuple[Any, str | None, str | None]] = [
        ({"sign_key": "k"}, None, "publish.sign_key: read where there is a store alone"),
        ({"anchor_every": 4, "keep_s": 5.0}, None, "publish.anchor_every, publish.keep_s: read"),
        ({}, "k", "sign_key=: read where"),
        ({"anchor_every": 32}, None, None),  # the default asks for nothing
        ({}, None, None),
    ]
    for publish, sign_key, words in said:
        config = WeightSyncConfig.load({"publish": publish})
        with contextlib.nullcontext() if words is None else pytest.raises(ConfigError, match=words):
            made = sink_config(config, store=None, sign_key=sign_key, model_id="m", token=None, certificate=None)
            assert made is None
        there = sink_config(config, store="file:///run", sign_key=sign_key, model_id="m", token=None, certificate=None)
        assert there is not None


def _slow_claim(rank: int, world_size: int, place: str) -> str:
    storing._CLAIM_S = 0.0
    sink_process._START_S = 8.0
    SinkProcess._supervise = lambda sink: None  # type: ignore[method-assign]  # a writer that says nothing
    config = SinkConfig(store=place, model_id="m", run_id="", agents=(), takeover_s=0.0)
    with WeightManager("m", timeout_s=4.0) as manager:
        manager.start()
        with contextlib.closing(storing.Storing(manager, config)) as writer:
            try:
                writer.begin()
            except WeightSyncError as error:
                return f"{type(error).__name__}: {error}"
    return "goes on"


def test_a_claim_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """Seen red: the other rank took rank 0, which waited for the store, for one that is gone."""
    assert run_ranks(_slow_claim, 2, f"file://{tmp_path}/run") == ["goes on", "goes on"]
