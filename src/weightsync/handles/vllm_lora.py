"""VllmLoraEngine: the LoRA adapters of one model in a vLLM server, see `lora_engine`. Its workers are asked through
vLLM's own calls for weight transfer, where our backend is there.
"""

from __future__ import annotations

import threading

import msgspec

from weightsync.errors import BusyError, InvalidRequestError, UnsupportedError
from weightsync.handles.lora_engine import AdapterClient, LoraEngine
from weightsync.handles.lora_messages import MIDDLEWARE, AdapterOrder, LoadedAdapter
from weightsync.handles.vllm_api import HOW_TO_START as PLUGIN_START
from weightsync.handles.vllm_api import VllmHttpApi
from weightsync.handles.vllm_messages import VllmInitMessage, as_info
from weightsync.types import Deadline, Manifest

NO_PLUGIN = (
    "this vLLM has no workers of ours, so nobody can read what they hold: start it with VLLM_SERVER_DEV_MODE=1 and "
    '--weight-transfer-config \'{"backend":"weightsync"}\''
)
HOW_TO_START = (
    "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and "
    f"--middleware {MIDDLEWARE}, in an environment where weightsync is installed"
)
_ASK_AGAIN_S = 0.2


class VllmLoraEngine(LoraEngine):
    """Thread-safe.

    Args:
        api: of the server.
        client: of its middleware.
        model_id: see `LoraEngine`.
        engine_id: see `LoraEngine`.
    """

    kind = "vLLM"
    how_to_start = HOW_TO_START
    slots_option = "--max-loras 2"

    def __init__(
        self, api: VllmHttpApi, client: AdapterClient, *, model_id: str | None = None, engine_id: str | None = None
    ) -> None:
        super().__init__(api.name, client, model_id=model_id, engine_id=engine_id)
        self._api = api

    def _check_at_workers(self, manifest: Manifest, deadline: Deadline) -> None:
        bare = msgspec.structs.replace(manifest, model_digest=None, digests=None)
        order = VllmInitMessage(adapter=AdapterOrder(what="check", manifest=bare))
        while True:
            try:
                self._tell_workers(order, deadline)
                return
            except BusyError:  # the base's checkpoint is read for its digest, once
                deadline.check("read the base's checkpoint")
                threading.Event().wait(_ASK_AGAIN_S)
            except UnsupportedError as error:
                if not _lacks_plugin(error):
                    raise
                return

    def _proved(self, manifest: Manifest, folder: str, held: LoadedAdapter, deadline: Deadline) -> str | None:
        """Why the workers can't prove what they hold; None: they have."""
        if manifest.digests is None:
            raise InvalidRequestError("a stage has the digests of what was published")
        order = AdapterOrder(what="prove", manifest=manifest, folder=folder, lora_id=held.lora_id)
        try:
            self._tell_workers(VllmInitMessage(adapter=order), deadline)
        except UnsupportedError as error:
            if not _lacks_plugin(error):
                raise
            return NO_PLUGIN
        return None

    def _tell_workers(self, message: VllmInitMessage, deadline: Deadline) -> None:
        self._api.init_engine(as_info(message), timeout_s=deadline.check("answer"))


def _lacks_plugin(error: UnsupportedError) -> bool:
    """Whether the server has no weight-transfer backend of ours, as `vllm_api` says it."""
    return type(error) is UnsupportedError and PLUGIN_START in error.message
