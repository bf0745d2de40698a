"""TinkerServer: a small local stand-in for the Tinker service, for the calls of a sync and for sampling.

The SDK itself talks to it (`base_url=`). It trains nothing: what the trainer has is the number of its optimizer steps.
A save keeps that number, and a sampler's one token is the number of the save that it was made of. So a test sees which
weights were sampled.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from weightsync.net.messages import decode
from weightsync.net.server import Api, ServerSettings, ServerThread

Fault = Literal["fail", "hang", "refuse", "elsewhere", "silent"]
_POLL_S = 0.2
_FAULTS: dict[str, frozenset[str]] = {
    "save": frozenset({"fail", "hang", "refuse", "elsewhere"}),
    "sampler": frozenset({"refuse", "elsewhere"}),
    "sample": frozenset({"fail", "hang", "silent"}),
}


class TinkerServer:
    """A service of one base model, on loopback.

    Faults, of the next save, sampler or sample: "fail" (its future fails), "hang" (its future stays open until
    `release`), "refuse" (status 403), "elsewhere" (another path than was asked for), "silent" (no token).

    Args:
        api_key: as the SDK wants it: it begins with "tml-".
        port: 0 lets the system choose.

    Attributes:
        weights: what the trainer has now: the number of optimizer steps.
        saves: names, in the order in which they were submitted.
    """

    def __init__(self, *, api_key: str = "tml-for-tests-only", port: int = 0) -> None:
        self.api_key = api_key
        self.weights = 0
        self.saves: list[str] = []
        self._faults: dict[str, Fault] = {}
        self._released = threading.Event()
        self._saved: dict[str, int] = {}  # path -> weights
        self._samplers: dict[str, str] = {}  # sampler -> path
        self._futures: dict[str, tuple[Any, Fault | None]] = {}
        self.app = Api("a stand-in for tinker")
        for method in ("GET", "POST"):
            self.app.answer(method, "/api/v1/{path:path}", self._handle)
        self._server = ServerThread(self.app, ServerSettings(port=port), name="weightsync-tinker-stand-in")

    def start(self) -> str:
        """Starts to listen; the SDK's `base_url`."""
        return self._server.start()

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self.release()
        self._server.close()

    def arm(self, step: Literal["save", "sampler", "sample"], fault: Fault) -> None:
        """The next such call has this fault."""
        assert fault in _FAULTS[step]
        self._released.clear()
        self._faults[step] = fault

    def release(self) -> None:
        """Futures that hang are done."""
        self._released.set()

    async def _handle(self, request: Request) -> Response:
        path = request.path_params["path"]
        if request.headers.get("x-api-key") != self.api_key:
            return _refused(401, "the API key is not this service's")
        body = await request.body()
        asked = decode(body, dict[str, Any], what="a request") if body and path != "telemetry" else {}
        if path.startswith("samplers/"):
            return self._sampler(path.removeprefix("samplers/"))
        answers: dict[str, Callable[[], Response]] = {
            "client/config": lambda: JSONResponse({}),
            "client/dynamic_config": lambda: JSONResponse({}),
            "telemetry": lambda: JSONResponse({"status": "accepted"}),
            "session_heartbeat": lambda: JSONResponse({"type": "session_heartbeat"}),
            "create_session": lambda: JSONResponse({"session_id": "session"}),
            "create_model": lambda: self._future({"model_id": f"session:train:{asked['model_seq_id']}"}),
            "get_info": lambda: JSONResponse({"model_data": {"model_name": "tiny"}, "model_id": asked["model_id"]}),
            "optim_step": self._step,
            "save_weights_for_sampler": lambda: self._save(asked),
            "create_sampling_session": lambda: self._new_sampler(asked),
            "asample": lambda: self._sample(asked),
        }
        if path == "retrieve_future":
            return await self._retrieve(asked["request_id"])
        if path.startswith("sessions/"):
            return Response(status_code=204)
        if path not in answers:
            return _refused(404, f"the stand-in has no {path}")
        return answers[path]()

    def _step(self) -> Response:
        self.weights += 1
        return self._future({"type": "optim_step"})

    def _save(self, asked: dict[str, Any]) -> Response:
        name, fault = asked["path"], self._faults.pop("save", None)
        if fault == "refuse":
            return _refused(403, "this account may not save")
        path = f"tinker://{asked['model_id']}/sampler_weights/{name if fault != 'elsewhere' else 'another'}"
        self.saves.append(name)
        self._saved[path] = self.weights
        return self._future({"path": path}, fault)

    def _new_sampler(self, asked: dict[str, Any]) -> Response:
        fault, path = self._faults.pop("sampler", None), asked["model_path"]
        if fault == "refuse" or path not in self._saved:
            return _refused(403 if fault else 404, f"{path} can't be sampled")
        sampler = f"session:sample:{asked['sampling_session_seq_id']}"
        self._samplers[sampler] = path if fault != "elsewhere" else next(iter(self._saved))
        return JSONResponse({"sampling_session_id": sampler})

    def _sampler(self, sampler: str) -> Response:
        return JSONResponse({"sampler_id": sampler, "base_model": "tiny", "model_path": self._samplers[sampler]})

    def _sample(self, asked: dict[str, Any]) -> Response:
        weights = self._saved[self._samplers[asked["sampling_session_id"]]]
        fault = self._faults.pop("sample", None)
        return self._future([] if fault == "silent" else [weights], fault, sample_sequence_ids=["sequence"])

    def _future(self, result: Any, fault: Fault | None = None, **facts: Any) -> Response:
        request_id = f"request-{len(self._futures)}"
        self._futures[request_id] = (result, fault)
        return JSONResponse({"request_id": request_id, **facts})

    async def _retrieve(self, request_id: str) -> Response:
        result, fault = self._futures[request_id]
        if fault == "hang" and not await asyncio.to_thread(self._released.wait, _POLL_S):
            return JSONResponse(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, status_code=408
            )
        if fault == "fail":
            return JSONResponse({"error": "told to fail", "category": "server"})
        return _tokens(result) if isinstance(result, list) else JSONResponse(result)


def _tokens(tokens: list[int]) -> Response:
    """A sample, in the SDK's own protobuf."""
    pb = importlib.import_module("tinker.proto.tinker_public_pb2")
    sequence = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_LENGTH,
        tokens=np.array(tokens, np.int32).tobytes(),
        logprobs=np.zeros(len(tokens), np.float32).tobytes(),
    )
    content = pb.SampleResponse(sequences=[sequence]).SerializeToString()
    return Response(content, media_type="application/x-protobuf")


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"detail": why}, status_code=status)
