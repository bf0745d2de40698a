"""ChangesCodec: a push of what has changed since the version that every engine serves; all of it where one does not.

The sending half keeps the bytes that it pushed last, one model of them. A tensor that changed travels as two: where
(`NAME#positions`, uint32) and what (`NAME#values`, of its dtype), so any transport that sends can carry them.
`codec.patch.PatchDecoder` makes patches of them. The proof is the model's digest: base + change is the published one.

What was kept is written while a version is on its way, so it is the base of nothing until that version is committed
on every engine: after a failure the next push is a full one.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec import delta_kernels as kernels
from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.full import FullCodec, FullDecoder, FullEncoder
from weightsync.codec.patch import POSITIONS, VALUES
from weightsync.errors import ConfigError, DeltaTooLargeError, InvalidRequestError
from weightsync.tensors import byte_view
from weightsync.threads import map_all
from weightsync.types import EngineReply, Manifest, PatchBase, WeightChunk
from weightsync.types.requests import MAX_PATCHED_ELEMENTS
from weightsync.types.spec import MAX_NAME_LENGTH

_logger = logging.getLogger(__name__)

_PIECE_ELEMENTS = 1 << 20
"""What a thread compares at a time."""
_CHUNK_BYTES = 32 << 20
"""Changes are gathered to chunks of about so many bytes: a broadcast for each chunk of the extractor would be many."""
_LONGEST_REST = 31
_POSITION_BYTES = 4
_COMPILED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ChangesCodec(Codec):
    """A codec with a memory: one object for one `PushSync`. Training rank 0 alone uses it; other ranks' stays empty.

    Engines need no setting: they take a change where their loader does (`accepts` has "patch") and where they serve
    exactly its base. If one of them does not, all get a full. So they do after a failed sync, and where a change was
    larger than `largest`: then for 1, 3, 7, at most 31 syncs.

    Args:
        largest: the most bytes of changes that are sent, as a share of the model's: a changed bf16 element has 6 of
            them, so 0.5 means one element in six. An engine holds about 1.3 times as many bytes while it takes them.
        full_sync_interval: every version whose number is a multiple of it goes out in full; 0: none has to.
        keep_on: where the bytes that were pushed last are kept: "cpu", in host memory of training rank 0, or "device",
            beside the tensors; on a GPU they are compared there, and only what changed leaves it.

    Raises:
        ConfigError: a value that can't be.
    """

    name = "changes"
    passes_through = False

    def __init__(
        self, *, largest: float = 0.5, full_sync_interval: int = 0, keep_on: Literal["cpu", "device"] = "cpu"
    ) -> None:
        if isinstance(largest, bool) or not isinstance(largest, int | float) or not 0 < largest <= 1:
            raise ConfigError(f"largest is a share of the model's bytes, above 0 and at most 1, not {largest!r}")
        if isinstance(full_sync_interval, bool) or not isinstance(full_sync_interval, int) or full_sync_interval < 0:
            raise ConfigError(f"full_sync_interval is a number of versions, 0 or more, not {full_sync_interval!r}")
        if keep_on not in ("cpu", "device"):
            raise ConfigError(f"keep_on is 'cpu' or 'device', not {keep_on!r}")
        self._largest = largest
        self._full_sync_interval = full_sync_interval
        self._keep_on = keep_on
        self._owner: weakref.ref[object] | None = None
        self._warned = False
        self._nothing_kept = "nothing was pushed before"
        self._kept: dict[str, torch.Tensor] = {}
        self._is_now: Manifest | None = None  # what is kept, proved; None while it is written
        self._sends_changes = False
        self._rest = 0
        self._num_resting = 0

    def base_for(self, replies: Mapping[str, EngineReply], manifest: Manifest) -> PatchBase | None:
        kept = self._is_now
        self.why_full = self._reason(kept, replies, manifest)
        if self.why_full is not None or kept is None or kept.model_digest is None:
            return None
        return PatchBase(version=kept.version, model_digest=kept.model_digest)

    def _reason(self, kept: Manifest | None, replies: Mapping[str, EngineReply], manifest: Manifest) -> str | None:
        """Why all of this version has to be sent. A vLLM takes changes from its first version on, and not before."""
        if kept is None or kept.model_digest is None:
            return self._nothing_kept
        whole = sorted(who for who, reply in replies.items() if "patch" not in reply.accepts)
        for_ever = [who for who in whole if replies[who].version is not None]  # a vLLM that has none may take them yet
        if for_ever and not self._warned:
            self._warned = True
            _logger.warning(
                "whole tensors alone are taken by %s: while it is there, every version goes out in full, and the copy "
                "that a push of deltas keeps is for nothing", ", ".join(for_ever),
            )  # fmt: skip
        if for_ever:
            return f"whole tensors alone are taken by {', '.join(for_ever)}"
        if whole:
            return _not_as_pushed(kept, {who: replies[who] for who in whole})
        if not _can_be_patched(kept, manifest):
            return "the model has other tensors than before, or one that no position of 4 bytes reaches"
        if self._full_sync_interval and manifest.version.number % self._full_sync_interval == 0:
            return f"{manifest.version.number} is a multiple of full_sync_interval {self._full_sync_interval}"
        if self._num_resting:
            self._num_resting -= 1
            number = self._num_resting
            more = f"the next {number} go out in full too" if number > 1 else "the next one goes out in full too"
            return f"a change before was too large; {more if number else 'a change is tried again with the next one'}"
        return _not_as_pushed(kept, replies)

    def claim(self, owner: object) -> None:
        other = None if self._owner is None else self._owner()
        if other is not None and other is not owner:
            raise ConfigError("this ChangesCodec belongs to another PushSync, whose bytes it keeps: make one for each")
        self._owner = weakref.ref(owner)

    def encoder(self, base: PatchBase | None = None) -> Encoder:
        """See `Codec.encoder`.

        Raises:
            InvalidRequestError: it has no such base. What was kept stays.
        """
        if base is not None:
            kept = self._is_now
            if kept is None or (kept.version, kept.model_digest) != (base.version, base.model_digest):
                raise InvalidRequestError(f"the bytes kept are not those of {base.version}")
            self._is_now, self._sends_changes = None, True
            return _ChangesEncoder(self._kept, kept.total_bytes, largest=self._largest)
        self._is_now, self._sends_changes = None, False
        self._kept, kept_before = {}, self._kept
        return _KeepingEncoder(self._kept, kept_before, on_device=self._keep_on == "device")

    def decoder(self) -> Decoder:
        """See `Codec.decoder`; of a session without a base."""
        return FullDecoder()

    def close(self) -> None:
        self._kept, self._is_now = {}, None
        self._nothing_kept = "nothing was pushed before"

    def ended(self, manifest: Manifest | None, error: BaseException | None = None) -> None:
        self._is_now = manifest
        self._nothing_kept = "the sync before failed" if error is not None else "an engine can't prove what it serves"
        if isinstance(error, DeltaTooLargeError):
            self._rest = min(_LONGEST_REST, 2 * self._rest + 1)
            self._num_resting = self._rest
        elif error is None and self._sends_changes:
            self._rest = 0


class _KeepingEncoder(Encoder):
    """The full codec's, which keeps a copy of what passes."""

    def __init__(self, kept: dict[str, torch.Tensor], reusable: dict[str, torch.Tensor], *, on_device: bool) -> None:
        self._full: FullEncoder = FullCodec().encoder()
        self._kept = kept
        self._reusable = reusable
        self._on_device = on_device

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        for chunk in self._full.encode(chunks):
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                self._keep(name, tensor.detach())
            del tensor
            yield chunk
            del chunk
        self._reusable.clear()

    def digests(self) -> Mapping[str, str]:
        return self._full.digests()

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        device = tensor.device if self._on_device else torch.device("cpu")
        there = self._reusable.pop(name, None)
        if there is None or (there.shape, there.dtype, there.device) != (tensor.shape, tensor.dtype, device):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._kept[name] = there.copy_(tensor)


class _ChangesEncoder(Encoder):
    """Compares with what is kept, writes that, and hands out what differs."""

    def __init__(self, kept: Mapping[str, torch.Tensor], total_bytes: int, *, largest: float) -> None:
        self._kept = kept
        self._most_bytes = int(largest * total_bytes)
        self._too_large = (
            f"what changed takes over {self._most_bytes} bytes with its positions, more than {100 * largest:g} % of "
            "the model"
        )
        self._seen: set[str] = set()

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """See `Encoder.encode`; chunks without a change are not handed out.

        Raises:
            DeltaTooLargeError: more has changed than is worth it. Chunks before it were handed on.
            InvalidRequestError: a name comes twice, or was not pushed before.
        """
        gathered: dict[str, torch.Tensor] = {}
        size = total = 0
        for chunk in chunks:
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                if name in self._seen or name not in self._kept:
                    raise InvalidRequestError("the stream has this tensor twice, or anew", parameter=name)
                self._seen.add(name)
                room = _Room((self._most_bytes - total) // (_POSITION_BYTES + tensor.element_size()), self._too_large)
                positions, values = _exchange(self._kept[name], tensor.detach(), room)
                if not len(positions):
                    continue
                gathered[name + POSITIONS], gathered[name + VALUES] = positions, values
                size += positions.nbytes + values.nbytes
                total += positions.nbytes + values.nbytes
            del chunk, tensor
            if size >= _CHUNK_BYTES:
                yield _chunk_of(gathered)
                size = 0
        if gathered:
            yield _chunk_of(gathered)

    def digests(self) -> Mapping[str, str]:
        """None: the model's digest is the proof."""
        return {}


class _Room:
    """How many changes may still come; from all threads that look for them."""

    def __init__(self, num_elements: int, too_large: str) -> None:
        self._lock = threading.Lock()
        self._left = num_elements
        self._too_large = too_large

    def take(self, number: int) -> None:
        """So many were found.

        Raises:
            DeltaTooLargeError: they are more than there is room for.
        """
        with self._lock:
            self._left -= number
            if self._left < 0:
                raise DeltaTooLargeError(self._too_large, state_left="this version goes out in full")


def _chunk_of(gathered: dict[str, torch.Tensor]) -> WeightChunk:
    chunk = WeightChunk(names=tuple(gathered), tensors=tuple(gathered.values()))
    gathered.clear()
    return chunk


def _not_as_pushed(kept: Manifest, replies: Mapping[str, EngineReply]) -> str | None:
    """Why what an engine serves is no base, in words, of the first of which that holds; None where all is as kept."""
    for who, reply in replies.items():
        if reply.unhealthy is not None or not reply.serving:
            return f"{who} does not serve: {reply.unhealthy or 'half-loaded, or paused'}"
        if (reply.version, reply.model_digest) != (kept.version, kept.model_digest):
            return f"{who} serves {reply.version or 'nothing that was synced'}, not {kept.version} as it was pushed"
    return None


def _can_be_patched(kept: Manifest, manifest: Manifest) -> bool:
    """Whether they have the same tensors, none of them with too many elements or too long a name."""
    same = [(spec.name, spec.dtype, spec.shape) for spec in kept.tensors] == [
        (spec.name, spec.dtype, spec.shape) for spec in manifest.tensors
    ]
    longest = MAX_NAME_LENGTH - len(POSITIONS)
    return same and all(
        math.prod(spec.shape) <= MAX_PATCHED_ELEMENTS and len(spec.name) <= longest for spec in manifest.tensors
    )


def _exchange(kept: torch.Tensor, now: torch.Tensor, room: _Room) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes `kept` what `now` is; returns where they differed (uint32) and what is there now, both 1-D.

    Compares bits: −0.0 is not 0.0, and a NaN is itself. Piece by piece, so that nothing grows past the room.
    """
    if kept.dtype != now.dtype or kept.shape != now.shape:
        raise InvalidRequestError(
            f"the tensor was {kept.dtype} {tuple(kept.shape)}, and is {now.dtype} {tuple(now.shape)}"
        )
    now = now.to(kept.device).contiguous()
    if kept.device.type == "cpu" and kept.element_size() in _COMPILED and kept.numel():
        return _exchange_compiled(kept, now, room)
    words = torch.int64 if kept.element_size() > 8 else getattr(torch, f"int{8 * kept.element_size()}")
    each = kept.element_size() // words.itemsize
    there, here = (byte_view(tensor).view(words) for tensor in (kept, now))
    if each > 1:
        there, here = there.view(-1, each), here.view(-1, each)
    found, values = [there.new_empty(0, dtype=torch.int64)], [here[:0]]
    for start in range(0, len(there), _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        differ = there[piece] != here[piece]
        where = torch.nonzero(differ if each == 1 else differ.any(dim=1)).flatten()
        room.take(len(where))
        found.append(where + start)
        values.append(here[found[-1]])  # as integers: torch knows one True alone
        there[found[-1]] = values[-1]
    positions = torch.cat(found).to(torch.int32).view(torch.uint32)  # torch has few operations for it
    return positions, torch.cat(values).reshape(-1).view(kept.dtype)


def _exchange_compiled(kept: torch.Tensor, now: torch.Tensor, room: _Room) -> tuple[torch.Tensor, torch.Tensor]:
    """`_exchange` in host memory, on all cores."""
    width = kept.element_size()
    word = _COMPILED[width]
    there, here = byte_view(kept).numpy(), byte_view(now).numpy()
    piece = _PIECE_ELEMENTS * width

    def one(start: int) -> tuple[npt.NDArray[np.uint32], Any]:
        old, new = there[start : start + piece], here[start : start + piece]
        places = _find(old, new, word, most=len(old) // width // 16 + 64)
        room.take(len(places))
        values = new.view(word)[places]
        kernels.put_elements(old, places, values, width)
        return places + np.uint32(start // width), values

    found = map_all(one, range(0, len(there), piece))
    positions = np.concatenate([places for places, _ in found])
    values = np.concatenate([values for _, values in found])
    return torch.from_numpy(positions), torch.from_numpy(values.view(np.uint8)).view(kept.dtype)


def _find(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], word: Any, *, most: int) -> npt.NDArray[np.uint32]:
    width = np.dtype(word).itemsize
    most = min(most, len(old) // width)
    positions, steps = np.empty(most, np.uint32), np.empty(most, word)
    number = int(kernels.find_changes(old, new, steps, positions, 8 * width, 0, np.empty(1, np.uint64)))
    if number == kernels.TOO_MANY:
        return _find(old, new, word, most=len(old) // width)
    return positions[:number].copy()
