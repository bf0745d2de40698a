"""TokenVersions: a logits processor of vLLM's that records which version samples each row; logits stay as they are.

    vllm ... --logits-processors weightsync.engine.vllm.token_versions:TokenVersions

vLLM calls it before each forward pass with what changed in its batch. A row that comes, a version that changes and a
row that leaves are written to the board that the request's tag names (`version_middleware`). Rows without a tag cost
nothing.

A row's `len(tokens)` is then the position of the token that is sampled next, also under vLLM's asynchronous
scheduling: the step before has put its token there, or a placeholder for it. A commit comes between two steps, in the
same thread.

vLLM takes no custom logits processors with speculative decoding: it refuses to start. Its second model runner has
another interface for them: start it with `VLLM_USE_V2_MODEL_RUNNER=0` where it would choose that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from weightsync.engine.vllm import version_board
from weightsync.engine.vllm.spans import Edge, tokens_digest
from weightsync.engine.vllm.version_board import TAG, BoardWriter
from weightsync.types import Version

_NOT_YET = -1  # vLLM's token that is still on its way from the device


class _Row:
    def __init__(self, stay: int, tag: str, prompt: bytes, tokens: Sequence[int]) -> None:
        self.stay = stay
        self.tag = tag
        self.prompt = prompt
        self.tokens = tokens  # vLLM's own list: it grows


class TokenVersions(LogitsProcessor):  # type: ignore[misc]
    """See the module. Records on the one worker whose rows are whole; with pipeline or data parallelism on none."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        parallel = vllm_config.parallel_config
        self._records = parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1 and _is_first()
        self._rows: dict[int, _Row] = {}
        self._num_stays = 0
        self._version: Version | None = None
        self._writer = BoardWriter()

    def is_argmax_invariant(self) -> bool:
        """It changes nothing."""
        return True

    def apply(self, logits: Any) -> Any:
        """The logits as they are."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """vLLM calls it before each forward pass, in the thread in which weights are committed."""
        if not self._records:
            return
        version = _served(version_board.served) if self._rows or batch_update else self._version
        come = self._changed(batch_update) if batch_update else ()
        rows = self._rows.values() if version != self._version else come
        self._version = version
        for row in rows:
            self._write(row, version)

    def _changed(self, batch_update: Any) -> list[_Row]:
        """Follows vLLM's batch; the rows that came."""
        come = []
        for index in batch_update.removed:
            self._leave(index)
        for index, params, prompt, tokens in batch_update.added:
            self._leave(index)
            tag = (params.extra_args or {}).get(TAG)
            if isinstance(tag, str):
                self._num_stays = (self._num_stays + 1) % (1 << 32)
                self._rows[index] = _Row(self._num_stays, tag, tokens_digest(prompt or ()), tokens)
                come.append(self._rows[index])
        for one, other, direction in batch_update.moved:
            row, theirs = self._rows.pop(one, None), self._rows.pop(other, None)
            if row is not None:
                self._rows[other] = row
            if theirs is not None and direction == MoveDirectionality.SWAP:
                self._rows[one] = theirs
            elif theirs is not None:
                self._write(theirs, None, leaves=True)
        return come

    def _leave(self, index: int) -> None:
        if (row := self._rows.pop(index, None)) is not None:
            self._write(row, None, leaves=True)

    def _write(self, row: _Row, version: Version | None, *, leaves: bool = False) -> None:
        known = len(row.tokens)
        while known and row.tokens[known - 1] == _NOT_YET:
            known -= 1
        edge = Edge(
            stay=row.stay, prompt=row.prompt, position=len(row.tokens), known=known,
            tokens=tokens_digest(row.tokens[:known]), version=None if version is None else str(version), leaves=leaves,
        )  # fmt: skip
        self._writer.write(row.tag, edge)


def _served(tell: Callable[[], Version | None] | None) -> Version | None:
    return None if tell is None else tell()


def _is_first() -> bool:
    """Whether this is the tensor-parallel worker that records; the others sample the same."""
    from vllm.distributed import parallel_state

    with contextlib.suppress(AssertionError):  # not initialised: one process
        return bool(parallel_state.get_tp_group().rank_in_group == 0)
    return True
