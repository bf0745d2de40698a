"""The torch side of `types`: dtypes, byte views, contiguity. The lowest module that imports torch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import UnsupportedError
from weightsync.types import Box, Full, TensorSpec, Update, WeightUpdateRequest, dtype_name

_logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16".

    Raises:
        UnsupportedError: this build of torch has no such dtype.
    """
    dtype = getattr(torch, dtype_name(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"this torch {torch.__version__} has no dtype {name}")
    return dtype


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a whole tensor."""
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def own_streams() -> list[torch.cuda.Stream]:
    """This thread's streams, of every device where it is not the default one, which a new thread has anyway."""
    found = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
    return [stream for stream in found if stream != torch.cuda.default_stream(stream.device)]


def gpus_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """The GPUs that tensors are on."""
    return frozenset(tensor.device for tensor in tensors if tensor.is_cuda)


def wait_idle(gpus: Iterable[torch.device]) -> None:
    """Returns when nothing is queued there any more, on whatever stream: an answer that was given may be computed
    yet."""
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def write_counter(tensor: torch.Tensor) -> int | None:
    """How often torch has seen the tensor written in place; it does not see writes into `tensor.data`. None where it
    does not count: the tensor was made in inference mode, whatever `.data` it was given since."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def cut_out(tensor: torch.Tensor, block: Box, *, origin: tuple[int, ...] = ()) -> torch.Tensor:
    """The block of a tensor that starts at `origin` (at 0 where it is not given); a view."""
    starts = origin or (0,) * len(block.shape)
    return tensor.detach()[
        tuple(
            slice(place - start, place - start + extent)
            for place, start, extent in zip(block.offset, starts, block.shape, strict=True)
        )
    ]


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage goes as far as the tensor does: it may be freed, or shrunk, at any time."""
    reach = tensor.numel()
    if reach and not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not reach or (tensor.storage_offset() + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory; any dtype, 0-d and
    empty ones included.

    Raises:
        UnsupportedError: the tensor is not contiguous (a copy would not share memory).
    """
    if not tensor.is_contiguous():
        raise UnsupportedError(f"a byte view needs a contiguous tensor, got strides {tensor.stride()}")
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # one element, cut out of others: contiguous, and of any stride
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def byte_array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """`byte_view` as a numpy array. A CPU tensor shares its memory; a GPU tensor is copied to the host."""
    view = byte_view(tensor)
    return (view if view.device.type == "cpu" else view.cpu()).numpy()


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """New host memory; pinned for copies to and from a GPU, or, where no more can be pinned, plain: slower, and as
    right."""
    if pinned:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _say_not_pinned(str(error).partition("\n")[0])
    return torch.empty(shape, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=8)
def _say_not_pinned(why: str) -> None:
    """Once: a version has thousands of tensors."""
    _logger.warning("no more host memory can be pinned (%s): copies to and from the GPU are slower", why)


def tensor_from_bytes(buffer: torch.Tensor, *, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `dtype` and `shape` that shares `buffer` (1-D uint8, of exactly its bytes, aligned)."""
    kind = torch_dtype(dtype)
    if buffer.numel() == 0:
        return torch.empty(shape, dtype=kind, device=buffer.device)
    return buffer.view(kind).reshape(shape)


@dataclasses.dataclass(kw_only=True, eq=False)
class PackedUpdates(Iterator[Update]):
    """Whole tensors that lie in one buffer, as updates: one after the other, or all at once for those that look inside.

    All sequences have one entry a tensor, in the stream's order.

    Attributes:
        names: parameter names.
        dtypes: e.g. "bfloat16".
        shapes: of the whole tensors.
        offsets: first byte of each in the bucket, a multiple of its element's size.
        sizes: bytes of each.
        bucket: 1-D uint8, contiguous; borrowed like the tensor of a `Full`.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bucket: torch.Tensor
    _next: int = 0

    @classmethod
    def of(cls, request: WeightUpdateRequest, offsets: tuple[int, ...], bucket: torch.Tensor) -> PackedUpdates:
        """The tensors that a request announces, at these places of a bucket."""
        return cls(
            names=request.names,
            dtypes=request.dtypes,
            shapes=request.shapes,
            offsets=offsets,
            sizes=request.tensor_bytes(),
            bucket=bucket,
        )

    def __next__(self) -> Update:
        index = self._next
        if index == len(self.names):
            raise StopIteration
        self._next += 1
        part = self.bucket[self.offsets[index] : self.offsets[index] + self.sizes[index]]
        tensor = tensor_from_bytes(part, dtype=self.dtypes[index], shape=self.shapes[index])
        return Full(name=self.names[index], tensor=tensor)
