"""SGLang's custom weight loader of ours: an `EngineWorker` behind it, in each of SGLang's workers.

SGLang (0.5.23) is started with `--custom-weight-loader weightsync.engine.sglang.load_weights`, and calls that function
in every worker with the model and what an update from tensors brings. `SGLangEngine(load_by="tensor")` brings one pair
that is no tensor, but a step of a session: the worker takes it, maps the trainer's or the rollout service's memory by
typed handles, proves the bytes, and loads them at the commit.

What a loader raises ends SGLang's worker, and what it returns is dropped: so a step raises nothing, and its outcome
is written into a file of a private folder, where the handle reads it. Nothing here imports SGLang.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from weightsync.engine.worker import EngineWorker
from weightsync.errors import EngineError, StateError, WeightSyncError, as_weightsync_error
from weightsync.handles.sglang_messages import STEP, StepAnswer, WorkerStep
from weightsync.load.sglang import SGLangWeightLoader
from weightsync.load.sglang import load_weights as load_checked
from weightsync.memory.private_folder import check_private
from weightsync.net.messages import decode, encode
from weightsync.types import AbortRequest, BeginRequest, CommitRequest, InitRequest, StageRequest, UpdateRequest
from weightsync.types.engine import REQUEST_TYPES

_workers: weakref.WeakKeyDictionary[nn.Module, EngineWorker] = weakref.WeakKeyDictionary()
_logger = logging.getLogger(__name__)


def load_weights(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """What SGLang calls. Tensors of others are loaded with checks, see `load.sglang.load_weights`.

    Raises:
        WeightSyncError: others' tensors don't fit the model; of a step nothing is raised.
    """
    pairs = list(named_tensors)
    for name, tensor in pairs:
        if name == STEP:
            _take(model, bytes(tensor.cpu().numpy()))
    if tensors := [pair for pair in pairs if pair[0] != STEP]:
        load_checked(model, tensors)


def _take(model: nn.Module, body: bytes) -> None:
    """One step; its outcome goes into the file that it names."""
    try:
        step = decode(body, WorkerStep, what="a step")
        rank = dist.get_rank() % step.tp_size if dist.is_initialized() else 0
        folder = check_private(step.folder)
    except Exception:
        _logger.exception("a step of a weight update can't be read: nothing was done, and nobody is told")
        return
    try:
        answer = _done(model, step, rank)
    except Exception as caught:
        error = as_weightsync_error(caught, EngineError, "the worker failed", rank=rank)
        answer = StepAnswer(error=error.to_dict())
    path = Path(folder) / StepAnswer.file(step.number, rank)
    part = path.with_suffix(".part")
    try:
        part.write_bytes(encode(answer))
        os.replace(part, path)
    except (OSError, WeightSyncError):
        _logger.exception("the outcome of a step of a weight update could not be told")


def _done(model: nn.Module, step: WorkerStep, rank: int) -> StepAnswer:
    worker = _workers.get(model)
    if worker is None:
        loader = SGLangWeightLoader(model, tp_size=step.tp_size)
        worker = _workers[model] = EngineWorker(loader, index=rank, track=f"sglang/worker-{rank}")
    match decode(bytes(step.body), REQUEST_TYPES[step.op], what=f"the request of {step.op}"):
        case InitRequest() as request:
            worker.init(request)
        case BeginRequest() as request:
            worker.begin(request)
        case UpdateRequest() as request:
            worker.update(request.update)
        case StageRequest() as request:
            reply = worker.stage(request)
            return StepAnswer(
                digests_equal=reply.digests_equal, model_digest=reply.model_digest, unprovable=reply.unprovable
            )
        case CommitRequest() as request:
            worker.commit(request.session)
            return StepAnswer(patches=bool(worker.loader.proved))
        case AbortRequest() as request:
            worker.abort(request.session, request.reason)
        case _:
            raise StateError(f"a worker of SGLang has no step {step.op}")
    return StepAnswer()
