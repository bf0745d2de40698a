"""The proof behind a load, in each of SGLang's workers: what it holds is what was published, bit for bit.

SGLang reads the folder, puts the parts of fused layers under one another (q, k, v; gate, up), and keeps that; a batch
copies it into a slot of its pool. Here the folder is read again: each tensor has the digest of the manifest, and what
SGLang holds is made of these tensors, and of zeros where a part has none. Shapes are compared with the pool's: SGLang
looks at them in the middle of a batch, and ends there. What lies in the slot is shown by the canary.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync.engine.vllm.lora_worker import bits, read_proved
from weightsync.errors import (
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    ManifestMismatchError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.handles.lora_messages import MANIFEST_FILE
from weightsync.load.sglang import FUSED
from weightsync.net.messages import decode
from weightsync.types import Manifest

MARK = "weightsync: "
_PROOF = "weightsync_proved."
_LEFT = "nothing was loaded; the adapter that was served is served on"

_logger = logging.getLogger(__name__)


def num_proofs(folder: str) -> int:
    """How many workers have compared what they hold with that folder."""
    return sum(each.name.startswith(_PROOF) for each in Path(folder).iterdir())


def proved_load(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around SGLang's `Scheduler.load_lora_adapter`: a load that is not what was published is undone, and fails.
    Folders of others pass."""
    result = original(scheduler, request)
    folder = Path(str(request.lora_path))
    if not result.success or not (folder / MANIFEST_FILE).is_file():
        return result
    manager = scheduler.tp_worker.model_runner.lora_manager
    try:
        manifest = decode((folder / MANIFEST_FILE).read_bytes(), Manifest, what="the folder's manifest")
        _prove(manifest, folder.name, manager, manager.loras[request.lora_id])
        (folder / f"{_PROOF}{os.getpid()}").touch(mode=0o600)
    except Exception as caught:
        error = as_weightsync_error(caught, EngineError, "the proof failed")
        _logger.warning("an adapter is let go again: %s", error)
        try:  # what is raised here would end SGLang's scheduler
            scheduler.tp_worker.unload_lora_adapter(request)
        except Exception:
            _logger.exception("it could not be let go: the server's process asks for that again")
        return manager.create_lora_update_result(success=False, error_message=MARK + json.dumps(error.to_dict()))
    return result


def _prove(manifest: Manifest, folder: str, manager: Any, adapter: Any) -> None:
    if manifest.adapter is None:
        raise InvalidRequestError("the manifest is of no adapter")
    config = manifest.adapter.config_dict
    if config.get("use_rslora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise UnsupportedError(
            "SGLang scales every tensor of an adapter by lora_alpha / r: it has no use_rslora, rank_pattern or "
            "alpha_pattern; train it without them",
            state_left=_LEFT,
        )
    if adapter.embedding_layers or adapter.added_tokens_embeddings:
        raise UnsupportedError("adapters of embeddings and of lm_head can't be proved in SGLang", state_left=_LEFT)
    published = dict(read_proved(manifest, folder))
    seen: set[str] = set()
    for number, layer in enumerate(adapter.layers):
        for name, held in layer.weights.items():
            parts = _parts(name, published)
            seen.update(part for part in parts if part in published)
            _compare(name, held, [published.get(part) for part in parts])
            _check_place(name, held, number, manager.memory_pool)
    if missing := sorted(published.keys() - seen):
        raise ManifestMismatchError("SGLang has no place for it", parameter=missing[0], state_left=_LEFT)


def _parts(name: str, published: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """The names of what a tensor of SGLang's is made of."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name and name not in published:
            return tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
    return (name,)


def _compare(name: str, held: torch.Tensor, parts: list[torch.Tensor | None]) -> None:
    known = [part for part in parts if part is not None]
    rows = held.shape[0] - sum(part.shape[0] for part in known)
    num_absent = len(parts) - len(known)
    if not known or (rows and not num_absent) or rows < 0:
        raise DigestMismatchError("SGLang holds something else there", parameter=name)
    at = absent = 0
    for part in parts:
        if part is None:
            absent += 1
            if absent == num_absent and num_absent > 1:
                raise UnsupportedError("two parts of a fused layer have no adapter", parameter=name, state_left=_LEFT)
            if held[at : at + rows].count_nonzero():
                raise DigestMismatchError("SGLang holds something where nothing was published", parameter=name)
            at += rows
            continue
        found = held[at : at + part.shape[0]]
        if found.shape != part.shape or found.dtype != part.dtype or not torch.equal(bits(found.cpu()), bits(part)):
            raise DigestMismatchError("what SGLang holds is not what was published", parameter=name)
        at += part.shape[0]


def _check_place(name: str, held: torch.Tensor, layer: int, pool: Any) -> None:
    """Whether it fits its slot, of which a tensor-parallel worker has a part."""
    half = "A" if ".lora_A." in name else "B"
    module = name.rpartition(".lora_")[0].rpartition(".")[2]
    buffers = (pool.A_buffer if half == "A" else pool.B_buffer).get(module)
    if buffers is None or buffers[layer].dim() != 3:
        raise ManifestMismatchError(
            "SGLang takes no adapter there: name the module in --lora-target-modules", parameter=name, state_left=_LEFT
        )
    place = buffers[layer].shape
    size, room = (held.shape[1], place[2]) if half == "A" else (held.shape[0], place[1])
    if size != room and (int(pool.tp_size) == 1 or size < room):
        raise ManifestMismatchError(
            f"it has {size} elements where SGLang's model has {room}: the adapter is one of another base",
            parameter=name,
            state_left=_LEFT,
        )
