"""A server with vLLM's routes for reloading, that holds bytes and no model. Real ones: tests/engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request

from tests.standins.sglang_server import Call, StandIn, read_weights
from weightsync.handles.vllm_messages import VllmState, error_text, other_state


class VllmStandIn(StandIn):
    """What a vLLM server answers to `VllmReloadApi` and to a probe.

    Args:
        checkpoint: what it serves at first.
        dev: whether it is in development mode.
        state: what its workers say of themselves, where they have our backend.
    """

    def __init__(self, checkpoint: Path, *, dev: bool = True, state: VllmState | None = None) -> None:
        super().__init__("vllm")
        self.state = state
        self.weights = read_weights(checkpoint)
        self.weight_version = "default"
        self.paused: str | None = None
        self.resets = True
        self.cached = True
        routes: list[tuple[str, str, Any]] = [("GET", "/version", self._version)]
        if dev:
            routes += [
                ("POST", "/pause", self._pause), ("POST", "/resume", self._resume),
                ("GET", "/is_paused", self._is_paused), ("POST", "/collective_rpc", self._rpc),
                ("POST", "/reset_prefix_cache", self._reset), ("GET", "/weight_info", self._weight_info),
                ("POST", "/update_weight_version", self._name), ("POST", "/weight_checker", self._checker),
            ]  # fmt: skip
            routes += [("POST", path, self._refuse) for path in (
                "/start_weight_update", "/update_weights", "/finish_weight_update",
            )]  # fmt: skip
            routes += [("POST", "/init_weight_transfer_engine", self._init), ("GET", "/get_world_size", self._size)]
        for method, path, handler in routes:
            self.app.add_api_route(path, handler, methods=[method])

    async def _version(self) -> dict[str, Any]:
        return {"version": "0.32.0"}

    async def _pause(self, mode: str, clear_cache: bool) -> dict[str, Any]:
        self.calls.append(Call(path="/pause", body={"mode": mode, "clear_cache": clear_cache}))
        self.paused = mode
        return {"status": "paused"}

    async def _resume(self) -> dict[str, Any]:
        self.calls.append(Call(path="/resume", body={}))
        self.paused = None
        return {"status": "resumed"}

    async def _is_paused(self) -> dict[str, Any]:
        return {"is_paused": self.paused is not None}

    async def _rpc(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.calls.append(Call(path="/collective_rpc", body=body))
        assert set(body) == {"method", "kwargs"}
        assert body["method"] == "reload_weights"
        assert set(body["kwargs"]) == {"weights_path"}
        try:
            self.weights = read_weights(Path(body["kwargs"]["weights_path"]))
        except OSError as error:
            raise HTTPException(500, f"Worker failed with error '{error}'") from error
        return {"results": [None]}

    async def _reset(self, reset_running_requests: bool, reset_external: bool) -> dict[str, Any]:
        self.calls.append(Call(path="/reset_prefix_cache", body={"running": reset_running_requests}))
        self.cached = self.cached and not self.resets
        return {"success": self.resets}

    async def _weight_info(self) -> dict[str, Any]:
        return {"weight_version": self.weight_version}

    async def _name(self, request: Request) -> dict[str, Any]:
        self.weight_version = (await request.json())["new_version"]
        return {"success": True, "new_version": self.weight_version}

    async def _checker(self) -> dict[str, Any]:
        return {"checksums": {name: each.tobytes().hex() for name, each in self.weights.items()}}

    async def _size(self) -> dict[str, Any]:
        return await self._refuse() if self.state is None else {"world_size": 1}

    async def _init(self) -> dict[str, Any]:
        if self.state is None:
            return await self._refuse()
        raise HTTPException(500, error_text(other_state(self.state)))

    async def _refuse(self) -> dict[str, Any]:
        raise HTTPException(400, "not here")
