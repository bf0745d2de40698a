"""AgentProcess: keeps one `TransferAgent` running beside the trainer, whatever becomes of it."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weightsync.errors import EngineUnreachableError, StateError, error_from_dict
from weightsync.publish.agent_config import AgentConfig
from weightsync.publish.watchdog import Patience
from weightsync.types.layout import PublicationLayout
from weightsync.types.process import of_one_process
from weightsync.types.publication import Publication

_START_S = 30.0
_LOAD_CODEC_S = 90.0  # on top, where its kernels have to be compiled first
_RESTART_S, _LONGEST_RESTART_S = 0.2, 5.0
_MAX_DEATHS = 4
"""An agent that dies so often with one version, before it has proved it, is not told of it any more."""
_NUM_LAST = 4
_CALM_S = 30.0
"""Who has run for so long, or proved something, is started again without a pause."""
_END_S = 5.0
_NUM_LOOKS = 10
"""How often a wait for an answer is looked at until it is over."""
_READS_BYTES_S = 5 << 20
"""What a busy agent reads of a publication in a second, at the least; it answers nothing meanwhile."""

_logger = logging.getLogger(__name__)


@of_one_process
class AgentProcess:
    """Starts the agent, tells it what to serve, and starts it again on the same ports when it dies or hangs.

    The trainer never waits for it: orders go through a queue that a thread of its own writes from. The agent is asked
    for a sign of life again and again, on the same pipe, which no receiver can fill.

    Args:
        config: how it runs.
        on_event: takes what it tells ("published", "not_published", "transfer", ...), and "hung" and "restarted"; from
            a thread.
        answer_within_s: an agent that tells nothing for so long, though it is asked, is killed and started again; it
            has longer for a large publication, and after one was killed. Time in which it wanted a CPU and got none
            does not count, nor does time in which this process itself stood still; ten times as long always does.
    """

    def __init__(
        self, config: AgentConfig, on_event: Callable[[dict[str, Any]], None], *, answer_within_s: float = 10.0
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._publication: dict[str, Any] | None = None
        self._last: deque[dict[str, Any]] = deque(maxlen=_NUM_LAST)
        self._good: dict[str, Any] | None = None  # the last one that was proved
        self._done: dict[str, Any] | None = None  # the last one that was proved, or refused
        self._num_deaths = 0  # with `_publication`, before it was done with
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._wake = threading.Event()
        self._answer_within_s = answer_within_s
        self._patience = Patience(answer_within_s)
        self._pause_s = _RESTART_S
        self._order_bytes = 0
        self.endpoint = ""
        self.host_nonce = ""
        self.num_restarts = 0

    @property
    def _start_s(self) -> float:
        """How long one may take until it is ready."""
        return _START_S + (_LOAD_CODEC_S if self._config.load_delta_codec else 0.0)

    def start(self) -> str:
        """Starts it; its endpoint.

        Raises:
            ConfigError: it could not listen, or the token is missing.
            EngineUnreachableError: it did not start in time, or died.
        """
        threading.Thread(target=self._supervise, name="weightsync-agent", daemon=True).start()
        if not self._started.wait(self._start_s):
            self.close()
            raise EngineUnreachableError(f"the agent did not start within {self._start_s:g} s")
        if self._failure is not None:
            raise self._failure
        return self.endpoint

    @property
    def pid(self) -> int | None:
        """Process id of the agent that runs now."""
        process = self._process
        return None if process is None else process.pid

    def publish(self, publication: Publication, source: int) -> None:
        """Tells it what to serve from now on. Returns at once."""
        number = publication.manifest.version.number
        order = {"order": "publish", "version": number, "publication": publication, "source": source}
        with self._lock:
            self._publication = order
            self._last.append(order)
            self._num_deaths = 0
        self._orders.put(order)

    def reset(self) -> None:
        """Tells it to end whatever reads superseded segments. Returns at once."""
        self._orders.put({"order": "reset"})

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._closed = True
        self._wake.set()
        self._orders.put(None)
        process = self._process
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _supervise(self) -> None:
        while not self._closed:
            begun_s = time.monotonic()
            try:
                self._run_once()
            except BaseException as error:
                if not self._started.is_set():
                    self._failure = error
                    self._started.set()
                    return
                _logger.warning("the agent could not be started again: %s", error)
            if self._closed:
                return
            self.num_restarts += 1
            self._died()
            if time.monotonic() - begun_s > _CALM_S:
                self._pause_s = _RESTART_S
            _logger.warning(
                "the agent of model %s died: it is started again in %.1f s", self._config.model_id, self._pause_s
            )
            self._on_event({"event": "restarted"})
            self._wake.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_RESTART_S)

    def _died(self) -> None:
        """Counts deaths with one version that is not done with; the next agents are spared it."""
        with self._lock:
            order = self._publication
            if order is None or order is self._done:
                return
            self._num_deaths += 1
            if self._num_deaths < _MAX_DEATHS:
                return
        self._give_up(order, f"the agent died {_MAX_DEATHS} times before it had proved it; see what it wrote to stderr")

    def _give_up(self, order: dict[str, Any], why: str) -> None:
        """One version is not told to any agent any more; the last one that was proved is, if it is there still."""
        version = order["publication"].manifest.version
        with self._lock:
            if self._publication is order:
                self._publication = self._done = self._good
        _logger.error("version %s is given up: %s", version, why)
        error = StateError(f"it is given up: {why}", version=str(version))
        self._on_event({"event": "not_published", "version": version.number, "error": error.to_dict()})

    def _note(self, event: dict[str, Any]) -> None:
        """What became of a version that this agent was told of."""
        if event["event"] not in ("published", "not_published"):
            return
        with self._lock:
            done = next((order for order in reversed(self._last) if order["version"] == event["version"]), None)
            self._done = done or self._done
            if event["event"] == "published":
                self._good = done or self._good
                self._pause_s = _RESTART_S

    def _run_once(self) -> None:
        """From the start of one agent process to its end."""
        # -P: what lies in the trainer's working directory is none of the agent's modules; where we lie, it looks.
        found = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weightsync.publish.agent_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": found},
            process_group=0,  # Ctrl-C at a terminal is the trainer's; this one ends with it
        )
        with process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                _write_all(process.stdin.fileno(), msgspec.json.encode(self._config) + b"\n")
                self._process = process
                slow = threading.Timer(self._start_s, process.kill)
                slow.daemon = True
                slow.start()
                try:
                    self._hello(process.stdout.readline())
                finally:
                    slow.cancel()
                over = threading.Event()
                watcher = threading.Thread(target=self._watch, args=(process, over), name="weightsync-agent-life")
                watcher.daemon = True
                watcher.start()
                writer = threading.Thread(target=self._write, args=(process,), name="weightsync-orders", daemon=True)
                writer.start()
                try:
                    for line in process.stdout:
                        self._patience.heard()
                        event = json.loads(line)
                        if event["event"] != "pong":
                            self._note(event)
                            self._on_event(event)
                finally:  # also where a line was cut off: two writers would share the orders between them
                    over.set()
                    process.kill()
                    self._orders.put({"order": "stop", "process": process})
                    writer.join()
            finally:
                process.kill()

    def _watch(self, process: subprocess.Popen[bytes], over: threading.Event) -> None:
        """Kills one agent process where it tells nothing for too long."""
        look_s = self._answer_within_s / _NUM_LOOKS
        self._patience.begin(process.pid)
        while True:
            self._orders.put({"order": "ping"})
            before_s = time.monotonic()
            if over.wait(look_s) or self._closed:
                return
            self._patience.look(time.monotonic() - before_s, look_s)
            if self._patience.is_over(extra_s=self._order_bytes / _READS_BYTES_S):
                _logger.warning(
                    "the agent of model %s has not answered for %.1f s, and could have for %.1f s of it: it is killed",
                    self._config.model_id, self._patience.elapsed_s, self._patience.silent_s,
                )  # fmt: skip
                self._patience.killed()
                self._on_event({"event": "hung"})
                process.kill()
                return

    def _hello(self, line: bytes) -> None:
        said: dict[str, Any] = json.loads(line) if line else {"event": "died"}
        if said["event"] == "failed":
            raise error_from_dict(said["error"], peer="agent")
        if said["event"] != "ready":
            raise EngineUnreachableError("the agent ended before it could serve; see what it wrote to stderr")
        self.endpoint, self.host_nonce = said["endpoint"], said["host_nonce"]
        # the next one takes the same ports, so that receivers find it again
        self._config = msgspec.structs.replace(
            self._config,
            port=said["port"],
            blocks_port=said["blocks_port"],
            load_delta_codec=False,
        )
        self._started.set()

    def _lines_of(self, order: dict[str, Any], told: PublicationLayout | None) -> bytes:
        """A publication as it travels, its layout before it where another was told last; empty where it can't be."""
        publication: Publication = order["publication"]
        try:
            layout, lines = PublicationLayout.of(publication), b""
            if layout is not told:  # once: the next versions only name it
                raw = layout.encode()
                lines = _line(order="layout", digest=layout.digest, layout=msgspec.Raw(raw))
            head = layout.head(publication)
            return lines + _line(order="publish", version=order["version"], head=head, source=order["source"])
        except Exception as error:  # this thread hands on every other order, too
            self._give_up(order, f"it can't be told to the agent: {type(error).__name__}: {error}")
            return b""

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        """Hands orders on to one agent process; begins with what an earlier one was told last."""
        assert process.stdin is not None
        with self._lock:
            order: dict[str, Any] | None = self._publication
        told, told_layout = None, None
        try:
            while True:
                if order is not None and order["order"] != "publish":
                    _write_all(process.stdin.fileno(), msgspec.json.encode(order) + b"\n")
                elif order is not None and order is not told:
                    line = self._lines_of(order, told_layout)
                    self._order_bytes = len(line)
                    _write_all(process.stdin.fileno(), line)
                    told = order
                    told_layout = PublicationLayout.of(order["publication"]) if line else told_layout
                # an earlier process's writer may have taken the end
                order = None if self._closed else self._orders.get()
                if order is None:  # the end: its input ends, and with it the agent
                    _write_all(process.stdin.fileno(), b'{"order": "end"}\n')
                    process.stdin.close()
                    return
                if order["order"] == "stop":
                    if order["process"] is process:
                        return
                    order = None
                elif order["order"] == "publish":
                    with self._lock:  # what was queued before an agent died is older than what the next one began with
                        order = self._publication
        except (OSError, ValueError):
            return  # it died: whoever reads its output notices


def _line(**order: Any) -> bytes:
    return msgspec.json.encode(order) + b"\n"


def _write_all(fd: int, line: bytes) -> None:
    """Without a buffer: a child that is forked meanwhile would have a copy, and write it once more when it ends."""
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]
