"""Rollout: what every engine of the demo is, whatever serves its weights: it generates all the time, and reports."""

from __future__ import annotations

import abc
import threading
import time
from typing import Any, ClassVar

import msgspec

from weightsync.demo.data import PROMPT, ByteText
from weightsync.demo.model import model_size
from weightsync.observe import Recorder


class Rollout(abc.ABC):
    """An engine that generates in a thread of its own.

    Args:
        rest_s: shortest pause between two generations. It lasts three times as long as the last one has computed here:
            engines and trainers share few cores.
    """

    refusals: ClassVar[tuple[type[Exception], ...]]
    """What a generation raises that the engine refuses."""
    end_s: ClassVar[float] = 5.0
    """How long `close` waits for a generation."""

    def __init__(self, engine_id: str, size: str, *, rest_s: float = 0.05) -> None:
        self._batch = ByteText().held_out(row_length=model_size(size).row_length)
        self._recorder = Recorder(f"{engine_id}/rollout")
        self._rest_s = rest_s
        self._num_refused = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._generate_all_the_time, name="rollout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops generating, and ends what was opened. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self.end_s)

    @abc.abstractmethod
    def _generate_once(self) -> None: ...

    def _told(self, version: int | None, loss: float, text: str) -> dict[str, Any]:
        """A report: loss on the held-out text and a sample, both under one version; what happened since the last."""
        return {
            "version": version, "loss": loss, "sample": PROMPT + text, "num_refused": self._num_refused,
            "phases": msgspec.to_builtins(self._recorder.drain()),
        }  # fmt: skip

    def _generate_all_the_time(self) -> None:
        rest_s = self._rest_s
        while not self._ended.wait(rest_s):
            begun_s = time.thread_time()
            try:
                self._generate_once()
            except self.refusals:
                if not self._ended.is_set():
                    self._num_refused += 1
                    self._refused()
            rest_s = max(self._rest_s, 3 * (time.thread_time() - begun_s))

    def _refused(self) -> None:  # noqa: B027  (a hook)
        """A generation was refused."""
