"""Method network: a push is believed by its report alone, a told service by its answer alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from tests.unit.clients.sglang_kit import weights, write_checkpoint
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.network import NetworkMethod, ToldService
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    UnsupportedError,
    VersionError,
)
from weightsync.testing.sglang_server import Call, Failure, StandIn, read_weights
from weightsync.types import SyncReport, Version


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


def report(number: int, **changes: Any) -> SyncReport:
    fields: dict[str, Any] = {
        "version": v(number), "engine_ids": ("e0", "e1"), "lost": {}, "total_bytes": 10, "sent_bytes": 10,
        "num_deltas": 0, "full_because": None, "num_chunks": 1, "seconds": 0.1, "paused_s": 0.1, "phases_s": {},
        "digests_equal": True, "unprovable": {},
    }  # fmt: skip
    return SyncReport(**{**fields, **changes})


class Said:
    """A push that says what it was told to say; a real one is in tests/engines."""

    def __init__(self, *says: SyncReport | Exception) -> None:
        self.says = list(says)
        self.asked: list[int] = []

    def sync_weights(self, version: int) -> SyncReport:
        self.asked.append(version)
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


def test_a_push_is_asked_for_the_number_and_its_report_counts() -> None:
    push = Said(report(3), report(5))
    method = NetworkMethod({"actor": push})
    method.trained("actor", v(3))
    assert method.sync("actor", v(3)) == 3
    assert method.sync("actor", v(4)) == 5, "a newer one of its run is as good"
    assert push.asked == [3, 4]
    assert method.evict_failed("actor") == []


@pytest.mark.parametrize("said", [report(2), report(3, version=v(3, "other"))])
def test_a_report_of_another_version_is_a_failure(said: SyncReport) -> None:
    with pytest.raises(VersionError, match=r"reports .*, and run/3 was asked for"):
        NetworkMethod({"actor": Said(said)}).sync("actor", v(3))


def test_a_run_that_nobody_named_is_any() -> None:
    assert NetworkMethod({"actor": Said(report(3))}).sync("actor", v(3, "unnamed")) == 3


def test_a_success_on_no_engine_is_a_failure() -> None:
    with pytest.raises(NoEnginesError, match="a success on no engine"):
        NetworkMethod({"actor": Said(report(3, engine_ids=()))}).sync("actor", v(3))


def test_engines_that_were_left_out_are_a_failure_until_they_are_evicted() -> None:
    lost = report(3, engine_ids=("e0",), lost={"e1": "it is dead"})
    method = NetworkMethod({"actor": Said(lost, lost, report(3, engine_ids=("e1",), lost={"e0": "dead too"}), lost)})
    with pytest.raises(SyncFailedError, match="e1: it is dead") as caught:
        method.sync("actor", v(3))
    assert set(caught.value.causes) == {"e1"}
    assert caught.value.state_left == "e0 serve it; the others serve an older version, or nothing"
    assert method.evict_failed("actor") == ["e1"]
    assert method.sync("actor", v(3)) == 3
    with pytest.raises(SyncFailedError, match="e0: dead too"):
        method.sync("actor", v(3))
    method.readmit("actor", "e1")
    with pytest.raises(SyncFailedError, match="e1: it is dead"):
        method.sync("actor", v(3))
    assert NetworkMethod({"actor": Said(lost)}, allow_lost=True).sync("actor", v(3)) == 3


def test_what_a_push_raises_is_raised_and_its_causes_can_be_evicted() -> None:
    failed = SyncFailedError("commit failed", causes={"e1": EngineError("no", peer="e1")})
    method = NetworkMethod({"actor": Said(failed, report(3, lost={"e1": "shunned"}))})
    with pytest.raises(SyncFailedError, match="commit failed"):
        method.sync("actor", v(3))
    assert method.evict_failed("actor") == ["e1"]
    assert method.sync("actor", v(3)) == 3


def test_models_are_known_and_are_what_they_have_to_be() -> None:
    with pytest.raises(NoEnginesError):
        NetworkMethod({})
    with pytest.raises(ConfigError, match="no push and no ToldService"):
        NetworkMethod({"actor": "http://127.0.0.1:1"})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError, match="no model 'critic' here: actor"):
        NetworkMethod({"actor": Said()}).sync("critic", v(1))


# A told service.


class Service(StandIn):
    """Loads what it is told to load, and says so in its own way."""

    def __init__(self) -> None:
        super().__init__("told")
        self.weights: dict[str, bytes] = {}
        self.answer: dict[str, Any] = {"success": True}
        self.app.add_api_route("/v9/update_weights", self._update, methods=["POST"])

    async def _update(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        assert set(body) == {"model_name", "weight_type", "weight_path"}
        self.calls.append(Call(path="/v9/update_weights", body=body))
        self.weights = {name: each.tobytes() for name, each in read_weights(Path(body["weight_path"])).items()}
        return self.answer


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    service.start()
    with contextlib.closing(service):
        yield service


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    folder = VersionFolder(tmp_path)
    for number in (1, 2):
        folder.publish("actor", v(number), lambda into, number=number: write_checkpoint(into, number))  # type: ignore[misc]
    return folder


def told(service: Service, where: VersionFolder | str, **options: Any) -> NetworkMethod:
    return NetworkMethod(
        {"actor": ToldService(base_url=f"{service.url}/v9", model_name="qwen", weights=where, **options)}
    )


def test_a_service_is_told_where_the_version_lies(service: Service, folder: VersionFolder) -> None:
    method = told(service, folder)
    for number in (1, 2):
        assert method.sync("actor", v(number)) == number
        assert service.weights == weights(number)
    assert service.calls[-1].body == {
        "model_name": "qwen", "weight_type": "full", "weight_path": str(folder.path("actor", v(2))),
    }  # fmt: skip
    with pytest.raises(VersionError, match="has no run/3"):
        method.sync("actor", v(3))
    assert len(service.calls) == 2


def test_it_may_have_one_path_for_ever(service: Service, folder: VersionFolder) -> None:
    path = str(folder.path("actor", v(1)).parent / "latest")
    assert told(service, path, weight_type="lora").sync("actor", v(7)) == 7
    assert service.calls[0].body == {"model_name": "qwen", "weight_type": "lora", "weight_path": path}


@pytest.mark.parametrize("version", [None, 2, "2", "run/2"])
def test_it_may_say_which_version_it_serves(service: Service, folder: VersionFolder, version: Any) -> None:
    service.answer = {"success": True, "version": version, "loaded_in_s": 3}
    assert told(service, folder).sync("actor", v(2)) == 2


@pytest.mark.parametrize(("answer", "kind", "words"), [
    ({"success": False, "message": "out of memory"}, EngineError, "says that it failed: out of memory"),
    ({"success": False}, EngineError, "says that it failed: no reason"),
    ({"success": "yes"}, EngineError, "what is no answer"),
    ({"status": "ok"}, EngineError, "what is no answer"),
    ({"success": True, "version": 1}, VersionError, "was told of run/2, and serves 1"),
    ({"success": True, "version": "other/2"}, VersionError, "and serves other/2"),
])  # fmt: skip
def test_a_200_that_says_something_else_is_a_failure(
    service: Service, folder: VersionFolder, answer: Any, kind: type[Exception], words: str
) -> None:
    service.answer = answer
    with pytest.raises(kind, match=words):
        told(service, folder).sync("actor", v(2))


@pytest.mark.parametrize(("how", "kind"), [
    ("error", EngineError), ("refused", EngineError), ("garbage", EngineError), ("drop", EngineUnreachableError),
    ("hang", DeadlineExceededError),
])  # fmt: skip
def test_a_service_that_fails(service: Service, folder: VersionFolder, how: Failure, kind: type[Exception]) -> None:
    method = told(service, folder, timeout_s=2.0 if how == "hang" else 10.0)
    service.fail("/v9/update_weights", how)
    with pytest.raises(kind):
        method.sync("actor", v(2))
    assert method.evict_failed("actor") == []
    assert method.sync("actor", v(2)) == 2


def test_a_service_that_can_not_be(service: Service, folder: VersionFolder) -> None:
    with pytest.raises(ConfigError, match="starts with http"):
        ToldService(base_url="service:80", model_name="m", weights=folder)
    with pytest.raises(ConfigError, match="has a model_name"):
        ToldService(base_url=service.url, model_name="", weights=folder)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        ToldService(base_url=service.url, model_name="m", weights=folder, timeout_s=0)
    elsewhere = NetworkMethod({"actor": ToldService(base_url=service.url, model_name="m", weights=folder)})
    with pytest.raises(UnsupportedError, match="no route /update_weights: a told service answers POST"):
        elsewhere.sync("actor", v(2))
