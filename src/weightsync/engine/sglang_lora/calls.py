"""What the middleware asks of the SGLang that it stands before: its own routes, from inside, and what its state shows.

SGLang keeps a registry of adapters in the process of its HTTP server, and evicts from it and from its slots whoever was
used least lately, unless it is pinned: ours are pinned, and counted, so none of them is read again from a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import types
from pathlib import Path
from typing import Any

from weightsync.engine.sglang_lora.worker import MARK, num_proofs
from weightsync.engine.vllm.asgi import App, Scope
from weightsync.engine.vllm.lora_base import CheckpointDigest, check_base
from weightsync.engine.vllm.lora_calls import Inside
from weightsync.errors import (
    AuthError,
    BusyError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    UnsupportedError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.handles.lora_messages import MANIFEST_FILE
from weightsync.handles.vllm_messages import version_in
from weightsync.net.messages import decode
from weightsync.types import Deadline, Manifest

_DEFAULT = "default"
_LOOK_S = 0.2
_READ_S = 600.0
_LEFT = "nothing was changed; the adapter that was served is served on"
_checkpoints: dict[str, CheckpointDigest] = {}


class SGLangInside(Inside):
    """See `Inside`.

    Args:
        app, scope: see `Inside`.
        tokenizer_manager: SGLang's.
    """

    engine = "SGLang"

    def __init__(self, app: App, scope: Scope, tokenizer_manager: Any) -> None:
        super().__init__(app, scope)
        self._arguments = tokenizer_manager.server_args

    async def check_allowed(self) -> None:
        """Raises AuthError where the caller could not load an adapter at SGLang's own door, by SGLang's own rule."""
        check_key(self._scope, self._arguments, path="/load_lora_adapter", level="ADMIN_OPTIONAL")

    async def load(self, name: str, folder: str) -> str | None:
        """Checks the base, then loads; see `Inside.load`. After an error SGLang has none of that name.

        Raises:
            WrongBaseError: the adapter belongs to another base.
            ConfigError, ManifestMismatchError: SGLang has no place for it.
            DigestMismatchError: what a worker holds is not what was published.
        """
        body = (Path(folder) / MANIFEST_FILE).read_bytes()
        await self._check_base(decode(body, Manifest, what="the folder's manifest"))
        # pinned: SGLang never evicts it, and never reads its folder again
        asked = {"lora_name": name, "lora_path": folder, "pinned": True}
        try:
            status, answer = await self._call("POST", "/load_lora_adapter", asked, limited=False)
            if status != 200:
                raise _typed(answer) or self._error(status, answer, "/load_lora_adapter")
        except Exception:
            with contextlib.suppress(Exception):  # some worker may have it
                await self.unload(name)
            raise
        workers = int(self._arguments.tp_size) * int(self._arguments.pp_size)
        if (found := num_proofs(folder)) < workers:
            return f"{found} of SGLang's {workers} workers have compared what they hold: our plug-in is not in all"
        return None

    async def unload(self, name: str) -> None:
        """Ends it, when its last request has ended. One that is not there is no error."""
        status, answer = await self._call("POST", "/unload_lora_adapter", {"lora_name": name}, limited=False)
        if status != 200 and b"does not exist" not in answer:
            raise self._error(status, answer, "/unload_lora_adapter")

    async def drop(self, lora_id: int) -> None:
        """SGLang's workers let go when it is unloaded."""

    async def score(self, name: str, tokens: tuple[int, ...], replica: int | None) -> tuple[float, ...]:
        """Log-probabilities of a prompt's tokens but the first."""
        asked = {
            "input_ids": list(tokens), "lora_path": name, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }  # fmt: skip
        body = await self._good("POST", "/generate", asked)
        try:
            return tuple(float(each[0]) for each in json.loads(body)["meta_info"]["input_token_logprobs"][1:])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(f"SGLang told no log-probabilities of a prompt: {error!r:.200}") from error

    async def _check_base(self, manifest: Manifest) -> None:
        if manifest.adapter is None:
            raise InvalidRequestError("the manifest is of no adapter")
        path, called = str(self._arguments.model_path), str(self._arguments.weight_version)
        version = None if called == _DEFAULT else version_in(called)
        base = manifest.adapter.base
        if called != _DEFAULT and (version is None or base is None or base.model_digest is not None):
            return None  # somebody has loaded other weights, whose digest nobody knows
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(model=path))
        checkpoint = _checkpoints.setdefault(path, CheckpointDigest(config))
        deadline = Deadline(_READ_S)
        while True:
            try:  # in a thread: it waits a little for the one that reads, and this loop carries all answers
                return await asyncio.to_thread(check_base, manifest.adapter, checkpoint, version, None)
            except BusyError:  # it is being read, once
                deadline.check("read the base's checkpoint")
                await asyncio.sleep(_LOOK_S)


def check_key(scope: Scope, arguments: Any, *, path: str, level: str) -> None:
    """Raises AuthError where SGLang's own rule for its keys refuses a request to that path.

    Args:
        scope: of the request.
        arguments: SGLang's.
        path: what it asks.
        level: the name of SGLang's `AuthLevel` for it.
    """
    try:
        from sglang.srt.utils.auth import AuthLevel, decide_request_auth
    except ImportError as error:
        raise UnsupportedError("this release of SGLang has other keys than 0.5.23") from error
    fields = dict(scope.get("headers", ()))
    decision = decide_request_auth(
        method=str(scope["method"]), path=path,
        authorization_header=fields.get(b"authorization", b"").decode("latin-1") or None,
        api_key=arguments.api_key, admin_api_key=arguments.admin_api_key, auth_level=getattr(AuthLevel, level),
    )  # fmt: skip
    if not decision.allowed:
        raise AuthError("SGLang refuses the token")


class SGLangFacts:
    """What SGLang shows of itself; see `VllmFacts`.

    A batch has places for `--max-loras-per-batch` adapters, of which the base is one; SGLang pins all but one of them.

    Args:
        tokenizer_manager: SGLang's.
    """

    num_replicas = 1

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        arguments = tokenizer_manager.server_args
        self._enabled = bool(arguments.enable_lora) and int(arguments.dp_size) == 1
        passing = len(self._loaded()) - len(self.names())
        slots = int(arguments.max_loras_per_batch) - 1 if self._enabled else 0
        most = arguments.max_loaded_loras
        self.max_cpu_loras = slots if most is None else int(most) - passing
        self.max_loras = max(0, min(slots, self.max_cpu_loras))
        self.max_lora_rank = int(arguments.max_lora_rank or 0)
        self.updating = self._enabled

    def check(self) -> None:
        """Raises ConfigError where this SGLang takes no adapters."""
        if not self._enabled:
            raise ConfigError(
                "this SGLang takes no adapters: start it with --enable-lora and --dp-size 1", state_left=_LEFT
            )

    def names(self) -> set[str]:
        """Of all adapters that take a slot for good, as it is now."""
        return {name for name, ref in self._loaded().items() if ref.pinned}

    def base_names(self) -> set[str]:
        """Under which it serves its base."""
        return {str(self._manager.served_model_name)}

    def lora_id(self, name: str) -> int | None:
        """It has no number."""
        return None

    async def ended(self, name: str, deadline: Deadline) -> None:
        """Returns when SGLang counts no answer by that adapter. Its own unload waits for them too, and holds up all
        loads meanwhile.

        Raises:
            DeadlineExceededError: one goes on.
        """
        held = self._loaded().get(name)
        counter = getattr(self._manager.lora_registry, "_counters", {}).get(getattr(held, "lora_id", None))
        while counter is not None and counter.value() > 0:
            deadline.check(f"end of the last answer by {name}")
            await asyncio.sleep(_LOOK_S)

    def _loaded(self) -> dict[str, Any]:
        """SGLang's references to all adapters, by name."""
        return dict(self._manager.lora_registry.get_all_adapters())


def _typed(answer: bytes) -> WeightSyncError | None:
    """What a worker of ours says, or what is known of SGLang's own words."""
    try:
        words = str(json.loads(answer)["error_message"])
    except (ValueError, KeyError, TypeError):
        return None
    _, found, rest = words.partition(MARK)
    if found:
        return error_from_dict(json.JSONDecoder().raw_decode(rest)[0], peer="SGLang")
    if "incompatible with the current LoRA memory pool" in words:
        return ConfigError(f"SGLang has no place for it: {words}", state_left=_LEFT)
    return EngineError(f"SGLang did not load it: {words}", state_left=_LEFT)
