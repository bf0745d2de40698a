"""VllmServerEngine: what a `vllm+http://` URL gives: whole models by `VllmEngine`, adapters by `VllmLoraEngine`."""

from __future__ import annotations

from weightsync.handles.lora_engine import AdapterClient
from weightsync.handles.two_kinds import TwoKinds
from weightsync.handles.vllm import VllmEngine
from weightsync.handles.vllm_api import VllmHttpApi
from weightsync.handles.vllm_lora import HOW_TO_START, VllmLoraEngine


class VllmServerEngine(TwoKinds, VllmEngine):
    """Thread-safe.

    Args:
        url: of the server.
        token: bearer token of the proxy before it, or vLLM's `--api-key`.
        engine_id: name for messages; the URL where not given.
        options: of `VllmEngine`.
    """

    def __init__(self, url: str, *, token: str | None = None, engine_id: str | None = None, **options: object) -> None:
        api = VllmHttpApi(url, token=token)
        super().__init__(api, engine_id=engine_id, **options)  # type: ignore[arg-type]
        self._adapters = AdapterClient(url, how_to_start=HOW_TO_START, token=token)
        self._lora = VllmLoraEngine(api, self._adapters, engine_id=engine_id)
