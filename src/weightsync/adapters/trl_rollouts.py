"""TRL's own rollout worker, which also says by which versions each of its samples was generated.

    worker = VersionedRolloutWorker(model_name=..., dataset=..., reward_funcs=[...], processing_class=..., ...)
    trainer = AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=transfer)

It reads what `VersionMiddleware` writes into vLLM's answers; where a server has none, versions are unknown. Written for
TRL 1.16: it overrides two methods of the loop that TRL's worker names as its `_loop_cls`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from itertools import chain
from typing import Any

import msgspec
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from weightsync.handles.vllm_messages import version_in
from weightsync.types.spans import VersionSpan

OLDEST, NEWEST, UNKNOWN = "weightsync/version_min", "weightsync/version_max", "weightsync/unknown_tokens_total"
"""Keys of a sample's metrics. TRL first takes the mean of each over the samples of a micro-batch; what these means come
to over the steps that it logs together it reads from the last word: the least, the greatest, or their sum."""

_FIELD = "weight_versions"
_spans: ContextVar[list[VersionSpan] | None] = ContextVar("weightsync_spans", default=None)
"""Of the conversation that this task generates."""


class VersionedRolloutLoop(AsyncRolloutWorker._loop_cls):  # type: ignore[misc]
    """TRL's loop in its child process. Each sample's metrics get three keys more, see `versions_of`."""

    async def _generate_one(self, *args: Any, **given: Any) -> Any:
        spans: list[VersionSpan] = []
        token = _spans.set(spans)
        try:
            outcome = await super()._generate_one(*args, **given)
        finally:
            _spans.reset(token)
        for sequence in outcome[2]:
            sequence.version_spans = spans
        return outcome

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **given: Any) -> Any:
        answer = await super()._post(path, payload, *args, **given)
        spans = _spans.get()
        if spans is not None and isinstance(answer, dict) and answer.get("choices"):
            spans.extend(spans_in(answer))
        return answer

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        rows = list(chain.from_iterable(group.completions_sequences))
        if len(rows) == len(samples):
            for row, sample in zip(rows, samples, strict=True):
                sample.metrics.update(versions_of(getattr(row, "version_spans", ())))
        return samples


class VersionedRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """TRL's `AsyncRolloutWorker`, with its arguments."""

    _loop_cls = VersionedRolloutLoop


def spans_in(answer: dict[str, Any]) -> list[VersionSpan]:
    """The spans that a completion's first choice says of itself; one of no known version where it says nothing."""
    records = answer.get(_FIELD) or [{}]
    try:
        found = msgspec.convert(records[0].get("spans"), list[VersionSpan] | None)
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError):
        found = None
    if found is not None:
        return found
    return [VersionSpan(version=None, start=0, end=len(answer["choices"][0].get("token_ids") or ()))]


def versions_of(spans: Iterable[VersionSpan]) -> dict[str, float]:
    """Metrics of one sample: number of the oldest and of the newest version that made a token of its conversation,
    where one is known, and how many tokens are of no known version."""
    numbers, unknown = [], 0
    for span in spans:
        version = version_in(span.version)
        if version is None:
            unknown += span.end - span.start
        else:
            numbers.append(version.number)
    known = {OLDEST: float(min(numbers)), NEWEST: float(max(numbers))} if numbers else {}
    return {**known, UNKNOWN: float(unknown)}
