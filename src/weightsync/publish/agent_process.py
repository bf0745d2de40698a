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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weightsync.errors import EngineUnreachableError, error_from_dict
from weightsync.publish.agent_config import AgentConfig
from weightsync.types.layout import PublicationLayout
from weightsync.types.process import of_one_process
from weightsync.types.publication import Publication

_START_S = 30.0
_LOAD_CODEC_S = 90.0  # on top, where its kernels have to be compiled first
_RESTART_S = 0.2
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
            has longer for a large publication. Time in which this process itself stood still does not count.
    """

    def __init__(
        self, config: AgentConfig, on_event: Callable[[dict[str, Any]], None], *, answer_within_s: float = 10.0
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._publication: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._wake = threading.Event()
        self._answer_within_s = answer_within_s
        self._silent_s = 0.0
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
        order = {"order": "publish", "publication": publication, "source": source}
        with self._lock:
            self._publication = order
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
            _logger.warning("the agent of model %s died: it is started again", self._config.model_id)
            self._on_event({"event": "restarted"})
            self._wake.wait(_RESTART_S)

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
                        self._silent_s = 0.0
                        event = json.loads(line)
                        if event["event"] != "pong":
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
        self._silent_s = 0.0
        while True:
            self._orders.put({"order": "ping"})
            before_s = time.monotonic()
            if over.wait(look_s) or self._closed:
                return
            # No more than two looks' time: this process may have stood still itself, its answers unread.
            self._silent_s += min(time.monotonic() - before_s, 2 * look_s)
            if self._silent_s > self._answer_within_s + self._order_bytes / _READS_BYTES_S:
                _logger.warning(
                    "the agent of model %s has not answered for %.1f s: it is killed", self._config.model_id,
                    self._silent_s,
                )  # fmt: skip
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
                    layout = PublicationLayout.of(order["publication"])
                    line = b""
                    if layout is not told_layout:  # once: the next versions only name it
                        raw = layout.encode()
                        line = _line(order="layout", digest=layout.digest, layout=msgspec.Raw(raw))
                    line += _line(order="publish", head=layout.head(order["publication"]), source=order["source"])
                    self._order_bytes = len(line)
                    _write_all(process.stdin.fileno(), line)
                    told, told_layout = order, layout
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
