"""How weights get into a paused SGLang server: one way each, chosen by the init info of whoever brings them.

    GroupLoad    a broadcast of the trainer's        /update_weights_from_distributed
    FileLoad     a safetensors file of this host     /update_weights_from_disk
    MappedLoad   memory of this host, which SGLang's workers map by themselves; `weightsync.engine.sglang` in each of
                 them proves the bytes before it loads them
                                                     /update_weights_from_tensor

The server is paused from `open` on. `touched` says whether live weights may be partly new ones: no way but the last can
take a load back, and that one until its commit.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import os
from typing import Any

import msgspec

from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    ManifestMismatchError,
    SharedMemoryError,
    UnsupportedError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.sglang_messages import (
    LOADER,
    STEP,
    InitGroup,
    StepAnswer,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
    WorkerStep,
    pickled_pair,
)
from weightsync.memory import PrivateFolder, host_nonce
from weightsync.memory.folder import read_head
from weightsync.net.messages import decode, encode
from weightsync.plan.safetensors import read_header
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    Deadline,
    EngineOp,
    InitRequest,
    Manifest,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryHandle,
    StageRequest,
    TorchDistributedWeightSyncInitInfo,
    UpdateRequest,
)

_logger = logging.getLogger(__name__)
_LENGTH_BYTES = 8
_ALREADY = "already open"  # SGLang's words
_FUSES = "SGLang fuses and shards weights, so live bytes can't be read back in the manifest's coordinates"
_INSTEAD = (
    "SGLang loads a staged file here, as a rollout service beside it has one; push to it with strategy 'sglang', or "
    "with load_by='tensor'"
)
_FROM_GROUP = f"{_FUSES}; nor does it digest what arrives"
_FROM_FILE = f"{_FUSES}; the file that it read was proved"


class SGLangLoad(abc.ABC):
    """One way, of one handle and one init. Used by one session at a time.

    Args:
        api: of the server.
        clear: whether what was cached of old weights is dropped.
        request: the init.

    Attributes:
        touched: whether live weights may be partly new ones.
    """

    def __init__(self, api: SGLangApi, *, clear: bool, request: InitRequest) -> None:
        self._api = api
        self._clear = clear
        self._init = request
        self._bracketed = True
        self._folder: PrivateFolder | None = None
        self.touched = False

    @property
    def name(self) -> str:
        """Of the transfer group."""
        return self._init.info.group_name

    def join(self, world_size: int, deadline: Deadline) -> None:  # noqa: B027  (most need nothing)
        """Gets ready, once."""

    def leave(self, deadline: Deadline) -> None:
        """Another init took over, or its trainer has ended."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def open(self, begin: BeginRequest, deadline: Deadline) -> None:
        """A session begins, and the server is paused."""
        self.touched = False

    @abc.abstractmethod
    def update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        """One chunk, in its turn.

        Raises:
            UnsupportedError: this way does not take it. Nothing was changed.
        """

    @abc.abstractmethod
    def stage(self, request: StageRequest, deadline: Deadline) -> StepAnswer:
        """All chunks are there; what is proved of them."""

    def commit(self, request: CommitRequest, deadline: Deadline) -> None:  # noqa: B027
        """What was staged is live when this returns."""

    def abort(self, request: AbortRequest, deadline: Deadline) -> None:
        """Ends what the session has left open on the server."""
        with contextlib.suppress(WeightSyncError):  # it was ended already
            self._close_bracket(deadline)

    def _open_bracket(self, deadline: Deadline) -> None:
        """Before any update. Releases before 0.5.21 have no such thing, and take updates at any time."""
        self._bracketed = True
        try:
            self._api.begin_update(timeout_s=deadline.check("answer"))
        except UnsupportedError:
            self._bracketed = False
        except EngineError as error:
            if _ALREADY not in error.message:
                raise
            # a trainer that died has left its bracket open
            self._api.end_update(timeout_s=deadline.check("answer"))
            self._api.begin_update(timeout_s=deadline.check("answer"))

    def _close_bracket(self, deadline: Deadline) -> None:
        if self._bracketed:
            self._api.end_update(timeout_s=deadline.check("answer"))


class GroupLoad(SGLangLoad):
    """SGLang's workers are members of the trainer's process group."""

    def join(self, world_size: int, deadline: Deadline) -> None:
        info = self._init.info
        assert isinstance(info, TorchDistributedWeightSyncInitInfo)
        group = InitGroup(
            master_address=info.master_addr,
            master_port=info.master_port,
            rank_offset=self._init.rank_offset,
            world_size=info.world_size,
            group_name=info.group_name,
            backend=info.backend,
        )
        self._api.init_group(group, timeout_s=deadline.check("time to join"))

    def leave(self, deadline: Deadline) -> None:
        with contextlib.suppress(WeightSyncError):  # it was started again, say
            self._api.destroy_group(self.name, timeout_s=deadline.check("answer"))

    def open(self, begin: BeginRequest, deadline: Deadline) -> None:
        super().open(begin, deadline)
        self._open_bracket(deadline)

    def update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        if not isinstance(update, BroadcastWeightUpdateRequest) or not is_dense(update):
            raise UnsupportedError(
                "SGLang takes broadcasts whose tensors lie one behind the other, without padding: this sender packs "
                "otherwise",
                state_left="nothing of this chunk was loaded",
            )
        self.touched = True
        message = UpdateFromDistributed(
            names=update.names,
            dtypes=update.dtypes,
            shapes=update.shapes,
            group_name=self.name,
            load_format="flattened_bucket",
            flush_cache=self._clear,
        )
        self._api.update_from_distributed(message, timeout_s=deadline.check("time to load"))

    def stage(self, request: StageRequest, deadline: Deadline) -> StepAnswer:
        self._close_bracket(deadline)
        return StepAnswer(unprovable=_FROM_GROUP)


class FileLoad(SGLangLoad):
    """SGLang reads the staged file where it lies: a link in a folder of ours leads there, and nothing is copied."""

    def __init__(self, api: SGLangApi, *, clear: bool, request: InitRequest) -> None:
        super().__init__(api, clear=clear, request=request)
        self._segments: set[str] = set()

    def open(self, begin: BeginRequest, deadline: Deadline) -> None:
        super().open(begin, deadline)
        self._segments = set()
        with contextlib.suppress(EngineError, UnsupportedError):  # none, unless a trainer that died left one open
            self._api.end_update(timeout_s=deadline.check("answer"))

    def update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        handle = update.handles[0] if isinstance(update, PackedCudaIpcWeightUpdateRequest) else None
        if not isinstance(handle, SharedMemoryHandle) or handle.host_nonce != host_nonce():
            raise UnsupportedError(f"this is no memory of SGLang's host: {_INSTEAD}")
        self._segments.add(handle.name)

    def stage(self, request: StageRequest, deadline: Deadline) -> StepAnswer:
        if len(self._segments) != 1:
            raise UnsupportedError(f"this version lies in {len(self._segments)} buckets: {_INSTEAD}")
        (segment,) = self._segments
        _check_file(segment, request.manifest)
        if self._folder is None:
            self._folder = PrivateFolder()
        link = f"{self._folder.path}/model.safetensors"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
        os.symlink(f"{os.path.dirname(self._folder.path)}/{segment}", link)
        self.touched = True
        message = UpdateFromDisk(
            model_path=self._folder.path,
            load_format="safetensors",  # whatever the server was started with, "dummy" say
            flush_cache=self._clear,
        )
        self._api.update_from_disk(message, timeout_s=deadline.check("time to load"))
        return StepAnswer(unprovable=_FROM_FILE)


class MappedLoad(SGLangLoad):
    """SGLang's workers run `LOADER`, which maps this host's memory, host or CUDA, and has a session as our own engines.

    Staged in each worker's host memory, once the size of the checkpoint; the commit loads it. The interface's pickle
    has nothing in it but a `WorkerStep`; each worker's answer lies in a file, since the interface has none.

    Attributes:
        takes_patches: whether what it committed last may be changed in place.
    """

    def __init__(self, api: SGLangApi, *, clear: bool, request: InitRequest) -> None:
        super().__init__(api, clear=clear, request=request)
        self.takes_patches = False
        self._numbers = itertools.count(1)
        self._world_size = 1

    def join(self, world_size: int, deadline: Deadline) -> None:
        loaders = self._api.server_info(timeout_s=deadline.check("answer")).custom_weight_loader or ()
        if LOADER not in loaders:  # it would end at the first request
            raise UnsupportedError(
                f"{self._api.url} was not started with --custom-weight-loader {LOADER}: its workers can't map memory "
                "of this host (load_by='tensor')",
                state_left="nothing was changed",
            )
        self._world_size = world_size
        self._folder = PrivateFolder()

    def open(self, begin: BeginRequest, deadline: Deadline) -> None:
        super().open(begin, deadline)
        self.takes_patches &= begin.base is not None  # a whole version overwrites the base
        self._open_bracket(deadline)
        self._step(EngineOp.INIT, self._init, deadline)
        self._step(EngineOp.BEGIN, begin, deadline)

    def update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        self._step(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=update), deadline)

    def stage(self, request: StageRequest, deadline: Deadline) -> StepAnswer:
        answers = self._step(EngineOp.STAGE, request, deadline)
        if self._world_size == 1:
            return answers[0]
        shards = f"each of {self._world_size} workers has a shard that SGLang chose"
        return StepAnswer(unprovable=f"{shards}; what arrived was proved in each")

    def commit(self, request: CommitRequest, deadline: Deadline) -> None:
        self.touched = True
        self.takes_patches = False
        answers = self._step(EngineOp.COMMIT, request, deadline, flush=self._clear)
        self.takes_patches = all(answer.patches for answer in answers)
        self._close_bracket(deadline)

    def abort(self, request: AbortRequest, deadline: Deadline) -> None:
        try:
            self._step(EngineOp.ABORT, request, deadline)
        except WeightSyncError as error:  # whatever it is, the server is not left in its bracket and pause
            _logger.warning("the workers of %s were not told of an abort: %s", self._api.url, error)
        super().abort(request, deadline)

    def _step(self, op: EngineOp, request: Any, deadline: Deadline, *, flush: bool = False) -> list[StepAnswer]:
        """Has every worker take a step.

        Raises:
            WeightSyncError: as the first worker that failed has it.
            EngineError: not every worker has answered.
        """
        assert self._folder is not None
        number = next(self._numbers)  # an abort takes one while a chunk's is under way
        step = WorkerStep(
            number=number,
            folder=os.path.basename(self._folder.path),
            tp_size=self._world_size,
            op=op,
            body=msgspec.Raw(encode(request)),
        )
        message = UpdateFromTensor(
            serialized_named_tensors=(pickled_pair(STEP, encode(step)),) * self._world_size,
            load_format=LOADER,
            flush_cache=flush,
        )
        self._api.update_from_tensor(message, timeout_s=deadline.check(f"time to {op}"))
        answers = [
            self._answer(f"{self._folder.path}/{StepAnswer.file(number, rank)}", rank)
            for rank in range(self._world_size)
        ]
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                error = error_from_dict(answer.error)
                error.rank = rank if error.rank is None else error.rank
                raise error
        return answers

    def _answer(self, path: str, rank: int) -> StepAnswer:
        try:
            with open(path, "rb") as file:
                body = file.read()
            os.unlink(path)
        except OSError as error:
            raise EngineError(
                f"SGLang's worker {rank} left no answer ({error.strerror}): it has to run on this host, as this user, "
                "with this host's /dev/shm"
            ) from error
        return decode(body, StepAnswer, what="a worker's answer")


def _check_file(segment: str, manifest: Manifest) -> None:
    """What SGLang would pass over in silence: a file that lacks tensors, or has others.

    Raises:
        ManifestMismatchError: the file is not what the manifest says.
    """
    length = int.from_bytes(read_head(segment, _LENGTH_BYTES, need_bytes=_LENGTH_BYTES), "little")
    try:
        head = read_head(segment, _LENGTH_BYTES + length, need_bytes=_LENGTH_BYTES + length)
        _, there, _ = read_header(memoryview(head))
    except (InvalidRequestError, SharedMemoryError) as error:
        raise UnsupportedError(f"these bytes are no safetensors file ({error.message}): {_INSTEAD}") from error
    for spec in manifest.tensors:
        found = there.get(spec.name)
        if found is None or (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise ManifestMismatchError("the staged file has not this tensor", parameter=spec.name)
    if len(there) != len(manifest.tensors):
        more = next(name for name in there if name not in manifest.by_name())
        raise ManifestMismatchError("the staged file has a tensor that the manifest has not", parameter=more)


def is_dense(update: BroadcastWeightUpdateRequest) -> bool:
    """Whether tensors lie in the bucket as SGLang unpacks it."""
    end = 0
    for offset, size in zip(update.offsets, update.tensor_bytes(), strict=True):
        if offset != end:
            return False
        end += size
    return update.bucket_bytes == end
