"""Requests and sync infos by the documents' names, constructed as the documents spell them.

    BroadcastWeightUpdateRequest(names=, dtypes=, shapes=)          EmptyWeightSyncInfo()

What is made is our message, with what ours has besides filled in; so it can be sent, and receivers take it. Our own
arguments can be given, too. `isinstance` with such a name is true of every message of ours of that kind.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weightsync import types
from weightsync.adapters.compat.groups import group_info
from weightsync.config import WeightSyncConfig
from weightsync.errors import InvalidRequestError
from weightsync.plan.buckets import plan_bucket
from weightsync.types import MemoryHandle, WeightUpdateRequest, dtype_name
from weightsync.types.spec import check_shape


class _Spelled(msgspec.StructMeta):
    """Of a name whose constructor is `spelled`; its instances are those of the class that it names."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.spelled(*args, **named)  # type: ignore[attr-defined]

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, self.__mro__[1])


class BroadcastWeightUpdateRequest(
    types.BroadcastWeightUpdateRequest, frozen=True, kw_only=True, tag="broadcast", metaclass=_Spelled
):
    """Of `names`, `dtypes` and `shapes`; the bucket is laid out as our sender does."""

    @staticmethod
    def spelled(
        names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], **ours: Any
    ) -> types.BroadcastWeightUpdateRequest:
        header = _header(names, dtypes, shapes)
        if "offsets" not in ours:
            layout = plan_bucket(_sizes(header))
            ours = {"offsets": layout.offsets, "bucket_bytes": layout.total_bytes, **ours}
        return types.BroadcastWeightUpdateRequest(**{**header, **ours})


class CudaIpcWeightUpdateRequest(
    types.CudaIpcWeightUpdateRequest, frozen=True, kw_only=True, tag="cuda_ipc", metaclass=_Spelled
):
    """Of `names`, `dtypes`, `shapes` and `ipc_handles`: one entry a name, or by name; each a handle of ours, or handles
    by device. What torch's `reduce_tensor` gives is refused: it is a pickle."""

    @staticmethod
    def spelled(
        names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], ipc_handles: Any = (), **ours: Any
    ) -> types.CudaIpcWeightUpdateRequest:
        if "handles" not in ours:
            entries = [ipc_handles.get(name) for name in names] if isinstance(ipc_handles, Mapping) else ipc_handles
            each = [_handles(entry) for entry in entries]
            if len(each) != len(names) or len({len(devices) for devices in each}) != 1:
                raise InvalidRequestError("ipc_handles has one entry a name, each with as many devices as the others")
            ours["handles"] = tuple(zip(*each, strict=True))
        return types.CudaIpcWeightUpdateRequest(**{**_header(names, dtypes, shapes), **ours})


class PackedCudaIpcWeightUpdateRequest(
    types.PackedCudaIpcWeightUpdateRequest, frozen=True, kw_only=True, tag="packed_cuda_ipc", metaclass=_Spelled
):
    """Of `names`, `dtypes`, `shapes`, `sizes` in bytes, and `ipc_handles` by device (the plan: one `ipc_handle`). The
    tensors lie one behind the other, unless `offsets` says otherwise."""

    @staticmethod
    def spelled(
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        sizes: Sequence[int],
        ipc_handles: Any = None,
        ipc_handle: Any = None,
        **ours: Any,
    ) -> types.PackedCudaIpcWeightUpdateRequest:
        if "handles" not in ours:
            ours["handles"] = _handles(ipc_handle if ipc_handles is None else ipc_handles)
        ours.setdefault("offsets", tuple(sum(sizes[:index]) for index in range(len(sizes))))
        return types.PackedCudaIpcWeightUpdateRequest(
            **{**_header(names, dtypes, shapes), "sizes": tuple(sizes), **ours}
        )


class TorchDistributedWeightSyncInitInfo(
    types.TorchDistributedWeightSyncInitInfo, frozen=True, kw_only=True, tag="torch_distributed", metaclass=_Spelled
):
    """Of an address, a port, a world size, a group's name and a backend; the deadlines are the config's defaults."""

    @staticmethod
    def spelled(
        master_addr: str, master_port: int, world_size: int, group_name: str, backend: str, **ours: Any
    ) -> types.TorchDistributedWeightSyncInitInfo:
        info = group_info(master_addr, master_port, world_size, group_name, backend, WeightSyncConfig())
        return msgspec.structs.replace(info, **ours)


class EmptyWeightSyncInitInfo(
    types.EmptyWeightSyncInitInfo, frozen=True, kw_only=True, tag="empty", metaclass=_Spelled
):
    """Of nothing: the strategy that is given it puts its own name in."""

    @staticmethod
    def spelled(strategy: str = "", group_name: str | None = None, **ours: Any) -> types.EmptyWeightSyncInitInfo:
        group_name = group_name or f"weightsync-{uuid.uuid4().hex[:12]}"
        return types.EmptyWeightSyncInitInfo(strategy=strategy, group_name=group_name, **ours)


REQUESTS: Mapping[type[WeightUpdateRequest], type[WeightUpdateRequest]] = {
    kind.__mro__[1]: kind
    for kind in (BroadcastWeightUpdateRequest, CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest)
}
"""By our type: the documents' name of it."""


def _header(names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "session": "by hand",
        "seq": 0,
        "names": tuple(names),
        "dtypes": tuple(dtype_name(dtype) for dtype in dtypes),
        "shapes": tuple(tuple(shape) for shape in shapes),
    }


def _sizes(header: Mapping[str, Any]) -> list[int]:
    lists = header["names"], header["dtypes"], header["shapes"]
    if len({len(each) for each in lists}) != 1:
        raise InvalidRequestError("names, dtypes and shapes have one entry a tensor")
    return [check_shape(shape, dtype=dtype, name=name) for name, dtype, shape in zip(*lists, strict=True)]


def _handles(entry: Any) -> tuple[MemoryHandle, ...]:
    found = tuple(entry.values()) if isinstance(entry, Mapping) else (entry,)
    if not all(isinstance(one, MemoryHandle) for one in found):
        raise InvalidRequestError(
            "a handle is a CudaMemoryHandle or a SharedMemoryHandle of weightsync.types: what torch's reduce_tensor "
            "gives is a pickle, which is never sent; a sender's create_request(chunk) makes handles"
        )
    return found
