"""Method network: a told service is believed by its answer alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from tests.standins.sglang_server import Call, Failure, StandIn, read_weights
from tests.unit.handles.sglang_kit import weights, write_checkpoint
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.network import NetworkMethod, ToldService
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    UnsupportedError,
    VersionError,
)
from weightsync.types import Version


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


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
        assert method.sync_weights("actor", v(number)) == number
        assert service.weights == weights(number)
    assert service.calls[-1].body == {
        "model_name": "qwen", "weight_type": "full", "weight_path": str(folder.path("actor", v(2))),
    }  # fmt: skip
    with pytest.raises(VersionError, match="has no run/3"):
        method.sync_weights("actor", v(3))
    assert len(service.calls) == 2


def test_it_may_have_one_path_for_ever(service: Service, folder: VersionFolder) -> None:
    path = str(folder.path("actor", v(1)).parent / "latest")
    assert told(service, path, weight_type="lora").sync_weights("actor", v(7)) == 7
    assert service.calls[0].body == {"model_name": "qwen", "weight_type": "lora", "weight_path": path}


@pytest.mark.parametrize("version", [None, 2, "2", "run/2"])
def test_it_may_say_which_version_it_serves(service: Service, folder: VersionFolder, version: Any) -> None:
    service.answer = {"success": True, "version": version, "loaded_in_s": 3}
    assert told(service, folder).sync_weights("actor", v(2)) == 2


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
        told(service, folder).sync_weights("actor", v(2))


@pytest.mark.parametrize(("how", "kind"), [
    ("error", EngineError), ("refused", EngineError), ("garbage", EngineError), ("drop", EngineUnreachableError),
    ("hang", DeadlineExceededError),
])  # fmt: skip
def test_a_service_that_fails(service: Service, folder: VersionFolder, how: Failure, kind: type[Exception]) -> None:
    method = told(service, folder, timeout_s=4.0 if how == "hang" else 10.0)
    service.fail("/v9/update_weights", how)
    with pytest.raises(kind):
        method.sync_weights("actor", v(2))
    assert method.evict_failed("actor") == ()
    assert method.sync_weights("actor", v(2)) == 2


def test_a_service_that_can_not_be(service: Service, folder: VersionFolder) -> None:
    with pytest.raises(ConfigError, match="starts with http"):
        ToldService(base_url="service:80", model_name="m", weights=folder)
    with pytest.raises(ConfigError, match="has a model_name"):
        ToldService(base_url=service.url, model_name="", weights=folder)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        ToldService(base_url=service.url, model_name="m", weights=folder, timeout_s=0)
    elsewhere = NetworkMethod({"actor": ToldService(base_url=service.url, model_name="m", weights=folder)})
    with pytest.raises(UnsupportedError, match="no route /update_weights: a told service answers POST"):
        elsewhere.sync_weights("actor", v(2))


def test_models_are_known_and_have_a_service_each() -> None:
    with pytest.raises(NoEnginesError):
        NetworkMethod({})
    with pytest.raises(ConfigError, match="no ToldService"):
        NetworkMethod({"actor": "http://127.0.0.1:1"})  # type: ignore[dict-item]
    service = ToldService(base_url="http://127.0.0.1:1", model_name="m", weights="w")
    with pytest.raises(InvalidRequestError, match="no model 'critic' here: actor"):
        NetworkMethod({"actor": service}).sync_weights("critic", v(1))
