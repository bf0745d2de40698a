"""SGLang's own messages, as its release 0.5.23 has them: what is sent, and what is read of its answers.

What we send has every field that matters, written out, so that no default of another release is relied on. Of answers,
fields that are not named here are not read; those that are have to fit.
"""

from __future__ import annotations

import base64
from typing import Literal, TypeAlias

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types import EngineOp
from weightsync.types.message import Message, learn

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
"""What becomes of running requests. "abort": they end with what they have; "retract": they wait, and are computed anew
afterwards; "in_place": they stand still, and go on with keys and values of the old weights."""
LoadFormat: TypeAlias = Literal["flattened_bucket"]


class InitGroup(Message, frozen=True, kw_only=True):
    """`/init_weights_update_group`: joins the trainer's process group.

    Attributes:
        master_address, master_port: where rank 0 listens.
        rank_offset: rank of the engine's first worker.
        world_size: all members.
        group_name, backend: which group, of which library.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["nccl", "gloo"]


class UpdateFromDistributed(Message, frozen=True, kw_only=True):
    """`/update_weights_from_distributed`: takes part in broadcasts of these tensors, and loads them.

    Attributes:
        names, dtypes, shapes: one each a tensor, in the order of the broadcasts.
        group_name: which group broadcasts.
        load_format: None: a broadcast a tensor; "flattened_bucket": one for all, their bytes one behind the other,
            without padding.
        flush_cache: drop keys and values of the old weights; fails while requests run.
        abort_all_requests: end running requests first.
        weight_version: what the server calls its weights from then on.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str
    load_format: LoadFormat | None
    flush_cache: bool
    abort_all_requests: bool = False
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if not self.names or not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequestError("an update has as many names as dtypes and shapes, and at least one")


class UpdateFromDisk(Message, frozen=True, kw_only=True):
    """`/update_weights_from_disk`: loads a checkpoint.

    Attributes:
        model_path: a folder as the server sees it.
        load_format: how it is read; None: as at the server's start.
        weight_version, flush_cache, abort_all_requests: as for `UpdateFromDistributed`.
    """

    model_path: str
    load_format: str | None
    weight_version: str | None = None
    flush_cache: bool
    abort_all_requests: bool = False


class UpdateFromTensor(Message, frozen=True, kw_only=True):
    """`/update_weights_from_tensor`: hands pickled (name, tensor) pairs to a loader.

    Attributes:
        serialized_named_tensors: for each tensor-parallel worker its own, in base64; see `pickled_pair`.
        load_format: the loader, as the server was started with it.
        flush_cache, abort_all_requests, weight_version: as for `UpdateFromDistributed`.
    """

    serialized_named_tensors: tuple[str, ...]
    load_format: str
    flush_cache: bool
    abort_all_requests: bool = False
    weight_version: str | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """How most calls are answered; `success` false is a failure, whatever the status."""

    success: bool
    message: str = ""


class GenerationDone(msgspec.Struct, frozen=True, kw_only=True):
    """How a pause and its end are answered."""

    status: str
    message: str = ""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `/model_info` is read for; older releases have it at `/get_model_info`, and no weight_version."""

    model_path: str
    weight_version: str | None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `/server_info` is read for; older releases have it at `/get_server_info`."""

    tp_size: int
    dp_size: int = 1
    pp_size: int = 1
    tokenizer_worker_num: int = 1
    version: str | None = None
    custom_weight_loader: tuple[str, ...] | None = None


class RankChecksum(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums of one worker's live weights, by SGLang's own names."""

    checksums: dict[str, str]
    per_gpu_checksum: str


class WeightsChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What `/weights_checker` answers."""

    success: bool
    message: str = ""
    ranks: tuple[RankChecksum, ...] = ()


class RouterWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as a router lists it."""

    url: str


class RouterWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """What a router's `GET /workers` answers."""

    workers: tuple[RouterWorker, ...]


LOADER = "weightsync.engine.sglang.load_weights"
"""What SGLang is started with (`--custom-weight-loader`) where its workers are to map weights by themselves."""
STEP = "weightsync"
"""Name of the pair that is no tensor, but a `WorkerStep`."""


class WorkerStep(Message, frozen=True, kw_only=True):
    """What `LOADER` is told in each of SGLang's workers: one step of a session.

    Attributes:
        number: of the step; each worker writes its answer into a file named after this and its rank.
        folder: name of the private folder beside the shared memory that the answer goes into.
        tp_size: how many workers there are.
        op, body: the step, and its request.
    """

    number: int
    folder: str
    tp_size: int
    op: EngineOp
    body: msgspec.Raw


class StepAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker's step went. At stage it says what was proved.

    Attributes:
        error: as `WeightSyncError.to_dict` has it; None where it went well.
        digests_equal, model_digest, unprovable: as in `EngineReply`.
        patches: at commit: whether the next version may come as a change of this one.
    """

    error: dict[str, object] | None = None
    digests_equal: bool | None = None
    model_digest: str | None = None
    unprovable: str | None = None
    patches: bool = False

    @staticmethod
    def file(number: int, rank: int) -> str:
        """Name of the file that it lies in."""
        return f"{number}-{rank}"


def pickled_pair(name: str, data: bytes) -> str:
    """The pickle that SGLang's interface demands, in base64: a list of one pair, the name and `torch.ByteTensor(data)`.

    Written out here, so that nothing else can get into it, and without torch. The data is one bytearray, not a number
    for each byte: a manifest has a mebibyte, and the server is paused meanwhile.
    """
    text = name.encode()
    array = b"\x96" + len(data).to_bytes(8, "little") + data  # BYTEARRAY8
    pair = b"X" + len(text).to_bytes(4, "little") + text + b"ctorch\nByteTensor\n" + array + b"\x85R\x86"
    return base64.b64encode(b"\x80\x05]" + pair + b"a.").decode("ascii")


learn(Done, GenerationDone, ModelInfo, ServerInfo, WeightsChecked, RouterWorkers, WorkerStep, StepAnswer)
