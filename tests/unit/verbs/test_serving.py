"""serve: what it says at the call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import AuthError, ConfigError, MissingDependencyError, WeightSyncError
from weightsync.verbs import serving

TOKEN = "a-token-of-32-characters-at-least"


@pytest.fixture
def controller() -> Iterator[str]:
    pool = RolloutPool(lease_s=2.0)
    made = WeightSyncController({}, FleetMethod(pool), model_tags=("actor",))
    server = ControllerServer(made, pool, token=TOKEN)
    yield server.start()
    server.close()
    made.close()


@pytest.mark.parametrize(
    ("model_id", "token", "kind", "text"),
    [
        ("actor", "another-token-of-32-characters-at-least", AuthError, "token"),
        ("actr", TOKEN, ConfigError, r"has no model 'actr': did you mean 'actor'\? it has 'actor'"),
    ],
)
def test_a_controller_that_refuses_for_good_is_told_at_the_call(
    model_id: str, token: str, kind: type[WeightSyncError], text: str, controller: str, tmp_path: Path
) -> None:
    """Seen red: the command warned once and waited for ever, and whoever watched its process saw a healthy one."""
    engine = torch.nn.Linear(2, 2)
    with pytest.raises(kind, match=text):
        serving.serve({model_id: engine}, controller=controller, lease=str(tmp_path / "lease"), token=token, port=0)


def test_a_controller_may_have_a_token_of_its_own(controller: str, tmp_path: Path) -> None:
    """Seen red: a TypeError, the argument was given twice."""
    engine, lease = torch.nn.Linear(2, 2), str(tmp_path / "lease")
    own = "another-token-of-32-characters-at-least"
    served = serving.serve(
        {"actor": engine}, controller=controller, lease=lease, token=own, controller_token=TOKEN, port=0
    )
    served.close()
    with pytest.raises(AuthError):
        serving.serve({"actor": engine}, controller=controller, lease=lease, token=TOKEN, controller_token=own, port=0)


def test_a_service_is_no_controller_and_one_that_is_not_there_is_waited_for(controller: str) -> None:
    serving._ask_controller(controller, ["actor"], token=TOKEN, verify=True)
    with contextlib.closing(serving.serve({"actor": torch.nn.Linear(2, 2)}, token=TOKEN, port=0)) as other:
        with pytest.raises(ConfigError, match="is a rollout service, and no controller"):
            serving._ask_controller(other.url, ["actor"], token=TOKEN, verify=True)
        with pytest.raises(ConfigError, match="is a rollout service, and no controller"):
            serving._ask_controller(other.url, ["critic"], token=TOKEN, verify=True)
        gone = other.url
    serving._ask_controller(gone, ["actor"], token=TOKEN, verify=True)


def test_a_store_that_nothing_installed_reads_is_told_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the service ran, and never had a version."""

    def fails(*_: object, **__: object) -> None:
        raise MissingDependencyError("it needs obstore")

    monkeypatch.setattr(serving, "client_at", fails)
    with pytest.raises(MissingDependencyError, match="obstore"):
        serving._ask(["s3://bucket/run"], ["m"], token=None, verify=True, trust_key=None)


@contextlib.contextmanager
def server_that_answers(status: int, body: bytes) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "body",
    [
        b'{"detail": "Not Found"}',
        b'{"error": {"message": "Not Found", "type": "NotFoundError", "param": null, "code": 404}}',  # vLLM's
        b'{"status": 404, "error": "Not Found", "path": "/status"}',
        b'{"statusCode": 404, "error": "Not Found", "message": "Cannot GET /status"}',
        b"404 page not found",
    ],
)
def test_a_server_that_has_none_of_a_controller_s_routes_is_told_at_the_call(body: bytes) -> None:
    """A vLLM's URL, say. Seen red: the command waited for ever. What stands before a controller may say 503 until it
    is there."""
    refused = pytest.raises(ConfigError, match="answers, and is no weightsync controller")
    with server_that_answers(404, body) as url, refused:
        serving._ask_controller(url, ["actor"], token=TOKEN, verify=True)
    with server_that_answers(503, body) as url:
        serving._ask_controller(url, ["actor"], token=TOKEN, verify=True)
