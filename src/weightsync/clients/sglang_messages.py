"""SGLang's own messages, as its release 0.5.23 has them: what is sent, and what is read of its answers.

What we send has every field that matters, written out, so that no default of another release is relied on. Of answers,
fields that are not named here are not read; those that are have to fit.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weightsync.errors import InvalidRequestError

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
Selector: TypeAlias = Literal["target", "draft", "all"]
LoadFormat: TypeAlias = Literal["flattened_bucket"]

DEFAULT_GROUP = "weight_update_group"


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of what is sent."""


class InitGroup(_Message, frozen=True, kw_only=True):
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


class DestroyGroup(_Message, frozen=True, kw_only=True):
    """`/destroy_weights_update_group`: leaves it."""

    group_name: str


class BeginUpdate(_Message, frozen=True, kw_only=True):
    """`/begin_weight_update`: opens the bracket that updates need; touches live weights."""

    selector: Selector = "all"


class EndUpdate(_Message, frozen=True, kw_only=True):
    """`/end_weight_update`: closes it."""


class UpdateFromDistributed(_Message, frozen=True, kw_only=True):
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
    abort_all_requests: bool
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if not self.names or not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequestError("an update has as many names as dtypes and shapes, and at least one")


class UpdateFromDisk(_Message, frozen=True, kw_only=True):
    """`/update_weights_from_disk`: loads a checkpoint.

    Attributes:
        model_path: a folder as the server sees it.
        load_format: how it is read; None: as at the server's start.
        weight_version, flush_cache, abort_all_requests: as for `UpdateFromDistributed`.
    """

    model_path: str
    load_format: str | None
    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool


class SetVersion(_Message, frozen=True, kw_only=True):
    """`/update_weight_version`: names the weights without loading any."""

    new_version: str
    abort_all_requests: bool = False


class PauseGeneration(_Message, frozen=True, kw_only=True):
    """`/pause_generation`. "abort": running requests end with what they have; "retract": they wait, and are computed
    anew afterwards; "in_place": they stand still, and go on with keys and values of the old weights."""

    mode: PauseMode


class ContinueGeneration(_Message, frozen=True, kw_only=True):
    """`/continue_generation`."""


class CheckWeights(_Message, frozen=True, kw_only=True):
    """`/weights_checker`."""

    action: Literal["checksum"] = "checksum"


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
    version: str | None = None


class RankChecksum(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums of one worker's live weights, by SGLang's own names."""

    checksums: dict[str, str]
    per_gpu_checksum: str


class WeightsChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What `/weights_checker` answers."""

    success: bool
    message: str = ""
    ranks: tuple[RankChecksum, ...] = ()
    per_engine_checksum: str | None = None


class RouterWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as a router lists it."""

    url: str


class RouterWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """What a router's `GET /workers` answers."""

    workers: tuple[RouterWorker, ...]


# Learnt once, under the import lock; see types/engine.py.
for _kind in (Done, GenerationDone, ModelInfo, ServerInfo, WeightsChecked, RouterWorkers):
    msgspec.json.Decoder(_kind)
