"""WeaverServer: a small stand-in for a hosted service of the kind that `WeaverMethod` asks, and a holder of its client.

There is no public client of Weaver: routes and bodies are of ours. It trains nothing: what the trainer has is a number,
and a sampler's token is the number that its weights were made of. So a test sees which weights were sampled.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.requests import Request

from weightsync.control.methods.hosted import ServedWeights
from weightsync.net.server import Api, ServerSettings, ServerThread

_HANGS_S = 60.0


class WeaverServer:
    """A service, on loopback.

    Args:
        port: 0 lets the system choose.

    Attributes:
        trained: what the trainer has now.
        num_hanging: so many of the next updates don't answer, and change nothing.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.trained = 0
        self.num_hanging = 0
        self._kept: dict[str, int] = {}
        self._serves: dict[str, Any] = {"run_id": None, "version": None, "path": None}
        app = Api("a stand-in for weaver")
        app.answer("POST", "/update", self._update)
        app.answer("GET", "/served", lambda: self._serves)
        app.answer("GET", "/sample", lambda: {"token": self._kept[self._serves["path"]]})
        self._server = ServerThread(app, ServerSettings(port=port), name="weightsync-weaver-stand-in")

    def start(self) -> str:
        """Starts to listen; the URL."""
        return self._server.start()

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._server.close()

    async def _update(self, request: Request) -> dict[str, bool]:
        asked = await request.json()
        if self.num_hanging:
            self.num_hanging -= 1
            await asyncio.sleep(_HANGS_S)
        path = f"weaver://{asked['model']}/{asked['run_id']}/{asked['version']}"
        self._kept[path] = self.trained
        self._serves = {"run_id": asked["run_id"], "version": asked["version"], "path": path}
        return {"ok": True}


class WeaverHolder:
    """A `WeaverServiceHolder`, as its user writes one.

    Args:
        url: of the service.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False)

    def update_weights(self, model_tag: str, run_id: str, version: int, *, timeout_s: float) -> None:
        """See `WeaverServiceHolder`."""
        body = {"model": model_tag, "run_id": run_id, "version": version}
        self._client.post("/update", json=body, timeout=timeout_s).raise_for_status()

    def served_weights(self, model_tag: str, *, timeout_s: float) -> ServedWeights:
        """See `WeaverServiceHolder`."""
        return ServedWeights(**self._client.get("/served", timeout=timeout_s).raise_for_status().json())

    def sample(self) -> int:
        """One token, with what the service samples with now."""
        return int(self._client.get("/sample").raise_for_status().json()["token"])

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
