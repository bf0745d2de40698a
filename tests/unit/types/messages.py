"""Hypothesis strategies for everything that travels."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from weightsync.types import (
    REQUEST_TYPES,
    AbortRequest,
    AuditRequest,
    BeginRequest,
    Box,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    CudaIpcWeightUpdateRequest,
    CudaMemoryHandle,
    DescribeRequest,
    EmptyWeightSyncInitInfo,
    EngineReply,
    InitRequest,
    Manifest,
    PackedCudaIpcWeightUpdateRequest,
    PatchBase,
    PatchWeightUpdateRequest,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    SharedMemoryHandle,
    StageRequest,
    TensorSpec,
    TorchDistributedWeightSyncInitInfo,
    UpdateRequest,
    Version,
    itemsize_bytes,
)
from weightsync.types.dtypes import ITEMSIZE_BYTES

text = st.text(min_size=1, max_size=20)
ids = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
"""Of runs and models: printable characters."""
seconds = st.floats(min_value=0.001, max_value=1e5)
dtypes = st.sampled_from(sorted(ITEMSIZE_BYTES))
shapes = st.lists(st.integers(0, 50), max_size=4).map(tuple)
versions = st.builds(Version, run_id=ids, number=st.integers(0, 2**62))


@st.composite
def specs(draw: Any) -> TensorSpec:
    shape = draw(shapes)
    box = None
    if draw(st.booleans()):
        offset = tuple(draw(st.integers(0, extent)) for extent in shape)
        box = Box(offset=offset, shape=tuple(draw(st.integers(0, e - o)) for e, o in zip(shape, offset, strict=True)))
    return TensorSpec(
        name=draw(text),
        dtype=draw(dtypes),
        shape=shape,
        box=box,
        source=draw(st.integers(0, 9)),
        offset=draw(st.integers(0, 2**40)),
    )


manifests = st.builds(
    Manifest,
    version=versions,
    model_id=ids,
    tensors=st.lists(specs(), min_size=1, max_size=4, unique_by=lambda spec: spec.name).map(tuple),
    model_digest=st.none() | text,
)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    size = itemsize_bytes(dtype)
    for extent in shape:
        size *= extent
    return size


@st.composite
def headers(draw: Any) -> dict[str, Any]:
    """The fields that every update request has."""
    names = draw(st.lists(text, min_size=1, max_size=4, unique=True))
    return {
        "session": draw(text),
        "seq": draw(st.integers(0, 10**6)),
        "names": tuple(names),
        "dtypes": tuple(draw(dtypes) for _ in names),
        "shapes": tuple(draw(shapes) for _ in names),
    }


def _layout(draw: Any, fields: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    sizes = tuple(_nbytes(s, d) for s, d in zip(fields["shapes"], fields["dtypes"], strict=True))
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // 256) * 256
    return sizes, tuple(offsets), max(end, 256)


@st.composite
def handles(draw: Any, size: int) -> CudaMemoryHandle | SharedMemoryHandle:
    offset = draw(st.integers(0, 2**30))
    if draw(st.booleans()):
        return CudaMemoryHandle(
            device_uuid=draw(text), handle=draw(st.binary(min_size=64, max_size=64)).hex(), offset_bytes=offset,
            size_bytes=size,
        )  # fmt: skip
    name = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True))
    return SharedMemoryHandle(host_nonce=draw(text), name=name, offset_bytes=offset, size_bytes=size)


@st.composite
def broadcasts(draw: Any) -> BroadcastWeightUpdateRequest:
    fields = draw(headers())
    _, offsets, total = _layout(draw, fields)
    return BroadcastWeightUpdateRequest(**fields, offsets=offsets, bucket_bytes=total)


@st.composite
def cuda_ipcs(draw: Any) -> CudaIpcWeightUpdateRequest:
    fields = draw(headers())
    sizes, _, _ = _layout(draw, fields)
    devices = draw(st.integers(1, 2))
    return CudaIpcWeightUpdateRequest(
        **fields, handles=tuple(tuple(draw(handles(size)) for size in sizes) for _ in range(devices))
    )


@st.composite
def packed_cuda_ipcs(draw: Any) -> PackedCudaIpcWeightUpdateRequest:
    fields = draw(headers())
    sizes, offsets, total = _layout(draw, fields)
    return PackedCudaIpcWeightUpdateRequest(
        **fields, sizes=sizes, offsets=offsets, handles=tuple(draw(handles(total)) for _ in range(draw(st.just(2))))
    )


@st.composite
def patches(draw: Any) -> PatchWeightUpdateRequest:
    fields = draw(headers())
    sizes = [_nbytes(s, d) // itemsize_bytes(d) for s, d in zip(fields["shapes"], fields["dtypes"], strict=True)]
    counts = tuple(draw(st.integers(0, size)) for size in sizes)

    def handle(each: int, count: int) -> SharedMemoryHandle:
        offset = each * draw(st.integers(0, 1 << 20))
        return SharedMemoryHandle(host_nonce=draw(text), name="s", offset_bytes=offset, size_bytes=each * count)

    return PatchWeightUpdateRequest(
        **fields,
        counts=counts,
        positions=tuple(handle(4, count) for count in counts),
        values=tuple(handle(itemsize_bytes(d), c) for d, c in zip(fields["dtypes"], counts, strict=True)),
    )


updates = broadcasts() | cuda_ipcs() | packed_cuda_ipcs() | patches()
init_infos = st.builds(EmptyWeightSyncInitInfo, strategy=text, group_name=text) | st.builds(
    TorchDistributedWeightSyncInitInfo,
    strategy=text,
    master_addr=text,
    master_port=st.integers(1, 65535),
    world_size=st.integers(2, 512),
    group_name=text,
    backend=st.sampled_from(["nccl", "gloo"]),
    join_timeout_s=seconds,
    transfer_timeout_s=seconds,
)
phases = st.builds(PhaseRecord, name=text, start_s=seconds, end_s=seconds, track=text, detail=text)
replies = st.builds(
    EngineReply,
    engine_id=text,
    world_size=st.integers(1, 64),
    serving=st.booleans(),
    version=st.none() | versions,
    writes_live=st.booleans(),
    pauses_first=st.booleans(),
    group=st.none() | text,
    digests_equal=st.none() | st.booleans(),
    model_digest=st.none() | text,
    unprovable=st.none() | text,
    accepts=st.lists(st.sampled_from(["full", "patch"])).map(tuple),
    unhealthy=st.none() | text,
    phases=st.lists(phases, max_size=3).map(tuple),
)
_by_type: dict[type, Any] = {
    DescribeRequest: st.just(DescribeRequest()),
    AuditRequest: st.just(AuditRequest()),
    InitRequest: st.builds(InitRequest, run_id=ids, model_id=ids, info=init_infos, rank_offset=st.just(1)),
    BeginRequest: st.builds(
        BeginRequest,
        session=text,
        manifest=manifests,
        deadline_s=seconds,
        base=st.none() | st.builds(PatchBase, version=versions, model_digest=text),
    ),
    UpdateRequest: st.builds(UpdateRequest, update=updates),
    StageRequest: st.builds(StageRequest, session=text, manifest=manifests),
    CommitRequest: st.builds(CommitRequest, session=text),
    AbortRequest: st.builds(AbortRequest, session=text, reason=text),
    PauseRequest: st.builds(PauseRequest, session=text, timeout_s=seconds, lease_s=seconds),
    ResumeRequest: st.builds(ResumeRequest, session=text),
}
requests = st.one_of([_by_type[kind] for kind in REQUEST_TYPES.values()])
