"""A vLLM plugin for tests: a server's own log of what its worker has committed, and when.

A line for each commit, JSON, to the file that `WEIGHTSYNC_TEST_COMMITS` names. Times are the machine's monotonic clock.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "WEIGHTSYNC_TEST_COMMITS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit of a worker.

    Attributes:
        version: as `run_id/number`.
        began_s, ended_s: before its first byte is written; after the last.
    """

    version: str
    began_s: float
    ended_s: float


def read(file: Path) -> list[Commit]:
    """The log, in the order in which they ended."""
    return [Commit(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def register() -> None:
    """vLLM calls it in each of its processes; it wraps weightsync's worker, nothing of vLLM."""
    if VARIABLE not in os.environ:
        return
    from weightsync.engine.worker import EngineWorker

    kind: Any = EngineWorker
    if getattr(kind, "logs_commits", False):
        return
    kind.logs_commits = True
    commit = kind.commit

    def logged(self: Any, name: str) -> Any:
        began_s = time.monotonic()
        version = commit(self, name)
        made = Commit(version=str(version), began_s=began_s, ended_s=time.monotonic())
        with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as log:
            log.write(json.dumps(dataclasses.asdict(made)) + "\n")
        return version

    kind.commit = logged
