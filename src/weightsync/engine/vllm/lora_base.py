"""CheckpointDigest: which base a vLLM was started with, as a trainer's digest of its base would say it.

An adapter is bound to its base's digest. A vLLM that was given no base by this library has that of its checkpoint; its
files are read once, beside what the worker generates. A trainer may hold the same weights in a wider dtype: the digests
of the checkpoint in these are compared, too.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightsync.codec.digest import digest_of
from weightsync.errors import BusyError, WrongBaseError
from weightsync.extract.checkpoint_files import checkpoint_files
from weightsync.types import HeldTensor, TensorSpec, TensorTable, Version, dtype_name
from weightsync.types.adapter import Adapter

_CASTS = (None, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_TIED = "lm_head.weight"

_logger = logging.getLogger(__name__)


class CheckpointDigest:
    """Thread-safe.

    Args:
        vllm_config: vLLM's: where its checkpoint lies.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = getattr(vllm_config, "model_config", None)
        self._folder = Path(str(getattr(model, "model", "") or "/nonexistent"))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found: dict[torch.dtype | None, str] = {}
        self._ended = False
        self._is_whole = False  # whether all digests were found

    def equals(self, digest: str) -> bool | None:
        """Whether the checkpoint has that digest in one of the dtypes; None: it can't be told (no files here, quantised
        ones, some that can't be read, or of a model whose modules have other names than its files).

        Raises:
            BusyError: it is being read; ask again.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightsync-base", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(0.05)
        with self._lock:
            if digest in self._found.values():
                return True
            if not self._ended:
                raise BusyError("the base's checkpoint is being read for its digest: ask again")
            return False if self._is_whole else None

    def __str__(self) -> str:
        return f"the checkpoint {self._folder.name}"

    def _run(self) -> None:
        try:
            is_converted = _is_converted(_config(self._folder))
            for dtype in _CASTS:
                if (digest := _digest(self._folder, dtype)) is None:
                    break
                with self._lock:
                    self._found[dtype] = digest
                    self._is_whole = len(self._found) == len(_CASTS) and not is_converted
        except Exception as error:
            _logger.warning("the digest of the checkpoint %s can't be computed: %s", self._folder, error)
        finally:
            with self._lock:
                self._ended = True


def check_base(adapter: Adapter, checkpoint: CheckpointDigest, version: Version | None, digest: str | None) -> None:
    """Raises WrongBaseError where the base is known to be another one. A base that is bound by its version alone
    may come yet: with a set of models the adapter is staged before the base is committed."""
    wanted = adapter.base
    if wanted is None:
        return
    has = f"{version} ({digest})" if version is not None else str(checkpoint)
    if wanted.model_digest is None:
        assert wanted.version is not None
        wrong = version is not None and (
            version.run_id != wanted.version.run_id or version.number > wanted.version.number
        )
    elif digest is not None:
        wrong = digest != wanted.model_digest
    else:
        wrong = checkpoint.equals(wanted.model_digest) is False
    if wrong:
        raise WrongBaseError(
            f"the adapter was trained on {wanted}, and this engine has {has}: load that base first (or publish "
            "the adapter with base=False: no engine looks then)",
            state_left="nothing was changed; the adapter that was served is served on",
        )


def _digest(folder: Path, dtype: torch.dtype | None) -> str | None:
    """The model digest of a folder's tensors, cast; None where that means nothing."""
    tensors = dict(_tensors(folder))
    if not tensors or any(tensor.is_floating_point() and tensor.dtype not in _PLAIN for tensor in tensors.values()):
        return None

    def cast(tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype

    specs = TensorTable.of(
        TensorSpec(name=name, dtype=dtype_name(cast(tensor)), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    held = (  # one copy at a time: all of them together are twice the model, in each worker
        HeldTensor(spec=spec, box=None, tensor=tensor.to(cast(tensor)))
        for spec, tensor in zip(specs, tensors.values(), strict=True)
    )
    return digest_of(held, specs)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Mapped, not read yet."""
    from safetensors import safe_open

    files = checkpoint_files(folder, all_of_them=False) if any(folder.glob("*.safetensors")) else ()
    config = _config(folder)
    if config.get("quantization_config"):
        return
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name != _TIED or not config.get("tie_word_embeddings"):
                    yield name, opened.get_tensor(name)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _is_converted(config: dict[str, Any]) -> bool:
    """Whether transformers gives tensors of such a model other names or shapes than its files have, as of each mixture
    of experts from release 5 on: a trainer's digest is of the modules'."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # an older release, which loads what the files have
        return False
    text = config.get("text_config")
    kinds = [config.get("model_type"), *(config.get("architectures") or ())]
    kinds += [text.get("model_type")] if isinstance(text, dict) else []
    return any(kind is not None and get_checkpoint_conversion_mapping(kind) is not None for kind in kinds)
