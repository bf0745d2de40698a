"""SGLangServerEngine: what an `sglang+http://` URL gives: models by `SGLangEngine`, adapters by `SGLangLoraEngine`."""

from __future__ import annotations

from weightsync.handles.lora_engine import AdapterClient
from weightsync.handles.sglang import SGLangEngine
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.sglang_lora import HOW_TO_START, SGLangLoraEngine
from weightsync.handles.two_kinds import TwoKinds


class SGLangServerEngine(TwoKinds, SGLangEngine):
    """Thread-safe.

    Args:
        url: of the server.
        token: the server's `--admin-api-key`, or its `--api-key`.
        verify: see `JsonClient`.
        engine_id: name for messages; the URL where not given.
        options: of `SGLangEngine`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        engine_id: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(SGLangApi(url, token=token, verify=verify), engine_id=engine_id, **options)  # type: ignore[arg-type]
        self._adapters = AdapterClient(url, how_to_start=HOW_TO_START, token=token, verify=verify)
        self._lora = SGLangLoraEngine(url, self._adapters, engine_id=engine_id)
