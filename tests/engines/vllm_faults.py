"""A vLLM plugin for tests: makes a worker's real loader fail where a file says so.

The file, JSON: {"at": "begin" | "receive" | "load" | "stage" | "commit" | "reload" | "patch" | "audit" | "behind",
"chunk": k, "do": "raise" | "corrupt" | "kill" | "distrust", "worker": index, "always": true}. A fault fires once, if
not always. "distrust" at "begin" is none: what is live is loaded by vLLM's own loader then, whatever is known of it.
"stage" is where all is there and proved, "receive" where bytes have come and nobody has looked at them, "reload" the
middle of vLLM's own reload, when live weights are gone in part (its chunks are tensors), "patch" the middle of a
patch, when live weights are written in part; "corrupt" at "audit" turns a bit of the live weights before they are
read because somebody asked, at "behind" before they are read by themselves, behind a patch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_VARIABLE = "WEIGHTSYNC_TEST_FAULT"


def install(folder: Path) -> dict[str, str]:
    """Environment of an engine whose processes have this plugin; the fault's file is `folder / "fault.json"`."""
    info = folder / "weightsync_faults-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightsync-faults\nVersion: 0\n", encoding="utf-8")
    entry = (
        "[vllm.general_plugins]\nweightsync_faults = tests.engines.vllm_faults:register\n"
        "weightsync_unpacked = tests.engines.vllm_unpacked:register\n"
        "weightsync_commits = tests.engines.vllm_commits:register\n"
        "weightsync_forks = tests.engines.vllm_forks:register\n"
    )
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    root = Path(__file__).parents[2]
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), FILE_VARIABLE: str(folder / "fault.json")}


def arm(folder: Path, fault: Mapping[str, Any]) -> None:
    """Arms a fault, as one step."""
    fresh = folder / "fault.new"
    fresh.write_text(json.dumps(fault), encoding="utf-8")
    fresh.rename(folder / "fault.json")


def armed(folder: Path) -> bool:
    """Whether a fault waits to fire."""
    return (folder / "fault.json").exists()


def disarm(folder: Path) -> None:
    """Takes back what has not fired."""
    (folder / "fault.json").unlink(missing_ok=True)


def register() -> None:
    """vLLM calls it in each of its processes; it wraps weightsync's loader, nothing of vLLM."""
    import torch

    from weightsync.codec.full import FullDecoder
    from weightsync.load import vllm as loader

    kind: Any = loader.VLLMWeightLoader
    if getattr(kind, "has_faults", False):
        return
    kind.has_faults = True
    audited, verify, prepare = kind.audited, kind.verify, kind.prepare_patch
    begin, load, commit, reload = kind.begin, kind.load_weights, kind.commit, loader.LayerwiseReload.load
    decode = FullDecoder.decode
    chunks: dict[int, int] = {}

    def faulty_begin(self: Any, manifest: Any) -> None:
        chunks[id(self)] = 0
        _fire("begin")
        if _take("begin", -1, "distrust"):
            self.distrust()
        begin(self, manifest)

    def faulty_load(self: Any, updates: Iterable[Any]) -> None:
        chunk = chunks[id(self)]
        chunks[id(self)] += 1
        _fire("load", chunk)
        load(self, updates)

    def faulty_decode(self: Any, updates: Iterable[Any]) -> Any:
        return decode(self, _corrupted(updates) if _take("receive", 0, "corrupt") else updates)

    def faulty_commit(self: Any, version: Any) -> None:
        _fire("commit")
        commit(self, version)

    def faulty_verify(self: Any) -> None:
        verify(self)
        if self._patch is None or self._comes_whole:
            _fire("stage")

    def faulty_prepare(self: Any) -> Any:
        changes = prepare(self)
        if not self._comes_whole:
            _fire("stage")
        return changes

    def faulty_audited(self: Any) -> Any:
        at = "behind" if threading.current_thread().name.endswith("behind") else "audit"
        if _take(at, -1, "corrupt"):
            piece = next(iter(self._plan.pieces.values()))[0]
            piece.live.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1
        return audited(self)

    def faulty_reload(self: Any, weights: Iterable[tuple[str, Any]]) -> None:
        def some() -> Iterator[tuple[str, Any]]:
            for count, pair in enumerate(weights):
                if count == _read().get("chunk", 2):  # q_proj is given, k_proj not: a fused module is there in part
                    _fire("reload", count)
                yield pair

        reload(self, list(some()) if not _pending("reload") else some())

    from weightsync.load import live

    apply = live.ShardPatch.apply

    def faulty_apply(self: Any) -> None:
        turns = self._live._turns
        if _pending("patch"):
            self._live._turns = [turn[: max(1, len(turn) // 2)] for turn in turns]
        apply(self)
        self._live._turns = turns
        _fire("patch")

    live.ShardPatch.apply = faulty_apply  # type: ignore[method-assign]
    kind.audited, kind.verify, kind.prepare_patch = faulty_audited, faulty_verify, faulty_prepare
    kind.begin, kind.load_weights, kind.commit = faulty_begin, faulty_load, faulty_commit
    loader.LayerwiseReload.load = faulty_reload  # type: ignore[method-assign]
    FullDecoder.decode = faulty_decode  # type: ignore[method-assign]


def _corrupted(updates: Iterable[Any]) -> Iterator[Any]:
    for count, update in enumerate(updates):
        if count == 0:
            update.tensor.view(-1)[0] += 1
        yield update


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        fault: dict[str, Any] = json.loads(Path(os.environ[FILE_VARIABLE]).read_text(encoding="utf-8"))
        return fault
    return {}


def _pending(at: str) -> bool:
    return _read().get("at") == at


def _take(at: str, chunk: int, do: str) -> bool:
    """Whether the armed fault is this one; then it is used up."""
    fault = _read()
    if (fault.get("at"), fault.get("do")) != (at, do) or fault.get("chunk", chunk) != chunk:
        return False
    if "worker" in fault and fault["worker"] != _worker():
        return False
    if not fault.get("always"):
        Path(os.environ[FILE_VARIABLE]).unlink(missing_ok=True)
    return True


def _worker() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().rank_in_group)


def _fire(at: str, chunk: int = -1) -> None:
    if _take(at, chunk, "raise"):
        raise RuntimeError(f"planted at {at}")
    if _take(at, chunk, "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
