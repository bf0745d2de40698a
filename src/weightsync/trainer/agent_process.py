"""AgentProcess: keeps one `TransferAgent` running beside the trainer, whatever becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from weightsync.errors import StateError
from weightsync.net.routes import held_port
from weightsync.observe.told_once import ToldOnce
from weightsync.trainer.agent_run import AgentRun
from weightsync.trainer.watchdog import Patience
from weightsync.types import PhaseRecord, Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import DeltaBegun, Event, NotPublished, Ping, Pong, Published, ResetOrder
from weightsync.types.process import closed_in_children, of_one_process
from weightsync.types.publication import Publication

_START_S = 60.0
_LOAD_CODEC_S = 90.0  # on top, where its kernels have to be compiled first
_RESTART_S, _LONGEST_RESTART_S = 0.2, 5.0
_MAX_DEATHS = 4
"""An agent that dies so often with one version, before it has proved it, is not told of it any more."""
_NUM_LAST = 4
_CALM_S = 30.0
"""Who has run for so long, or proved something, is started again without a pause."""
_END_S = 5.0
_NUM_LOOKS = 10
_MAX_PHASES = 1000
"""How often a wait for an answer is looked at until it is over."""
_READS_BYTES_S = 5 << 20
"""What a busy agent reads of a publication in a second, at the least; it answers nothing meanwhile."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Told:
    """What an agent is told to serve."""

    publication: Publication
    source: int

    @property
    def version(self) -> Version:
        return self.publication.manifest.version


@of_one_process
class AgentProcess:
    """Starts the agent, tells it what to serve, and starts it again on the same ports when it dies or hangs.

    Between two agents this process keeps the ports, so that nobody's connection gets one of them.

    The trainer never waits for it: a thread of its own tells it what is newest, and asks it for a sign of life again
    and again, over a channel that no receiver can fill.

    Args:
        on_event: takes what it tells, and "hung" and "restarted"; from the thread.
        answer_within_s: an agent that tells nothing for so long, though it is asked, is killed and started again; it
            has longer for a large publication, and after one was killed. Time in which it wanted a CPU and got none
            does not count, nor does time in which this process itself stood still; ten times as long always does.
    """

    def __init__(
        self,
        config: AgentConfig,
        on_event: Callable[[Event | Literal["hung", "restarted"]], None],
        *,
        answer_within_s: float = 10.0,
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._lock = threading.Lock()
        self._publication: _Told | None = None
        self._given: _Told | None = None  # what the agent that runs was told of last
        self._last: deque[_Told] = deque(maxlen=_NUM_LAST)
        self._good: _Told | None = None  # the last one that was proved
        self._done: _Told | None = None  # the last one that was proved, or refused
        self._num_deaths = 0  # with `_publication`, before it was done with
        self._resets = self._makes_delta = False
        self._phases: deque[PhaseRecord] = deque(maxlen=_MAX_PHASES)  # that no agent was told of yet
        self._run: AgentRun | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._in_order = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._supervise, name="weightsync-agent", daemon=True)
        self._answer_within_s = answer_within_s
        self._patience = Patience(answer_within_s)
        self._pause_s = _RESTART_S
        self._ports = contextlib.ExitStack()
        self.endpoint = ""
        self.host_nonce = ""

    def start(self) -> None:
        """Starts it; `wait_started` says whether it serves.

        Raises:
            ConfigError: it could not listen.
        """
        asked = {"port": self._config.port, "blocks_port": self._config.blocks_port}
        kept = {name: self._kept(asked[name]) for name in sorted(asked, key=lambda name: asked[name] == 0)}
        self._config = msgspec.structs.replace(self._config, **kept)
        closed_in_children(self, lambda agent: agent._ports.close())
        self._thread.start()

    def wait_started(self, timeout_s: float) -> bool:
        """Whether it serves; waits for that at most so long.

        Raises:
            ConfigError: it could not listen, or the token is missing.
            EngineUnreachableError: it did not start in time (see `_begin`), or died.
        """
        if not self._started.wait(timeout_s):
            return False
        if self._failure is not None:
            self._ports.close()
            raise self._failure
        return True

    @property
    def pid(self) -> int | None:
        """Process id of the agent that runs now."""
        run = self._run
        return None if run is None else run.pid

    def publish(self, publication: Publication, source: int) -> None:
        """Tells it what to serve from now on. Returns at once."""
        with self._lock:
            self._publication = _Told(publication=publication, source=source)
            self._last.append(self._publication)
            self._num_deaths = 0
        self._wake()

    def show(self, record: PhaseRecord) -> None:
        """A phase of the trainer's own, for the agent's `/timeline`; the next sign of life that is asked for takes it
        along. Returns at once."""
        self._phases.append(record)

    def reset(self) -> None:
        """Tells it to end whatever reads superseded segments. Returns at once."""
        self._resets = True
        self._wake()

    def close(self) -> None:
        """Ends it; receivers are told so where no exception has led here. Idempotent."""
        if not self._closed.is_set():
            self._in_order = sys.exception() is None
        self._closed.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(2 * _END_S)
        self._ports.close()
        with self._lock:
            if self._wake_fd >= 0 and not self._thread.is_alive():
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _kept(self, port: int) -> int:
        """The port, or any where it is 0, which is this process's from now on."""
        holder = held_port(self._config.host, port)
        if holder is None:
            return port
        self._ports.enter_context(holder)
        return int(holder.getsockname()[1])

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _supervise(self) -> None:
        starts, deaths = ToldOnce(_logger), ToldOnce(_logger)
        while not self._closed.is_set():
            begun_s, self._given = time.monotonic(), None
            try:
                with AgentRun(self._config, wake_fd=self._wake_fd, closed=self._closed) as run:
                    self._begin(run)
                    starts.over()
                    self._talk(run)
            except BaseException as error:
                if not self._started.is_set():
                    self._failure = error
                    self._started.set()
                    return
                starts.say(type(error), "the agent could not be started again: %s", error)
            if self._closed.is_set():
                return
            self._died()
            if time.monotonic() - begun_s > _CALM_S:
                self._pause_s = _RESTART_S
                deaths.over()
            words = "the agent of model %s died: it is started again in %.1f s"
            deaths.say("died", words, self._config.model_id, self._pause_s)
            self._on_event("restarted")
            self._closed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_RESTART_S)

    def _begin(self, run: AgentRun) -> None:
        """Waits until it serves; the next one takes the same ports, so that receivers find it again."""
        ready = run.ready(_START_S + (_LOAD_CODEC_S if self._config.load_delta_codec else 0.0))
        self._run = run
        self.endpoint, self.host_nonce = ready.endpoint, ready.host_nonce
        self._config = msgspec.structs.replace(
            self._config, port=ready.port, blocks_port=ready.blocks_port, load_delta_codec=False
        )
        self._started.set()

    def _talk(self, run: AgentRun) -> None:
        """Gives orders and hears events until the agent ends, or hangs, or this is closed."""
        look_s = self._answer_within_s / _NUM_LOOKS
        given: _Told | None = None
        self._patience.begin(run.pid)
        self._ping(run)
        passed_s = 0.0
        while not self._closed.is_set():
            has_ended = run.has_ended  # looked at first: what it has said before is heard below
            given, is_left = self._give_orders(run, given)
            self._given = given
            before_s = time.monotonic()
            run.wait(max(0.0, look_s - passed_s), to_send=is_left)
            passed_s += time.monotonic() - before_s
            for event in run.events():
                self._hear(event)
            if has_ended:
                return
            if passed_s >= look_s:
                if self._hangs(run, passed_s, look_s):
                    return
                self._ping(run)
                passed_s = 0.0
        run.end(_END_S, in_order=self._in_order)

    def _ping(self, run: AgentRun) -> None:
        """What it does not take now is lost: a trace is no reason to keep anything waiting."""
        phases = []
        while self._phases:
            phases.append(self._phases.popleft())
        try:
            run.send(Ping(phases=tuple(phases)))
        except UnicodeEncodeError:  # a name of the caller's own
            run.send(Ping())

    def _give_orders(self, run: AgentRun, given: _Told | None) -> tuple[_Told | None, bool]:
        """The version that it was told of last; and whether it does not take what there is for it now."""
        if self._resets and run.send(ResetOrder()):
            self._resets = False
        with self._lock:
            newest = self._publication
        if newest is not None and newest is not given:
            try:
                if run.publish(newest.publication, newest.source):
                    given = newest
            except StateError as error:
                self._give_up(newest, error.message)
        with self._lock:
            return given, self._resets or (self._publication is not None and self._publication is not given)

    def _hear(self, event: Event) -> None:
        self._patience.heard()
        if isinstance(event, DeltaBegun):
            self._makes_delta = True
        if isinstance(event, Pong | DeltaBegun):
            return
        if isinstance(event, Published | NotPublished):
            self._makes_delta = False
            with self._lock:
                done = next((each for each in reversed(self._last) if each.version == event.version), None)
                self._done = done or self._done
                if isinstance(event, Published):
                    self._good = done or self._good
                    self._pause_s = _RESTART_S
                    if event.delta is not None:
                        self._config = msgspec.structs.replace(self._config, delta_rest=0)
        self._on_event(event)

    def _hangs(self, run: AgentRun, passed_s: float, look_s: float) -> bool:
        """Looks at it; kills it where it has told nothing for too long."""
        self._patience.look(passed_s, look_s)
        if not self._patience.is_over(extra_s=run.order_bytes / _READS_BYTES_S):
            return False
        _logger.warning(
            "the agent of model %s has not answered for %.1f s, and could have for %.1f s of it: it is killed",
            self._config.model_id, self._patience.elapsed_s, self._patience.silent_s,
        )  # fmt: skip
        self._patience.killed()
        self._on_event("hung")
        run.kill()
        return True

    def _died(self) -> None:
        """Counts deaths with one version that it was told of and is not done with; the next agents are spared it."""
        if self._makes_delta:  # it may have died of that: as long a rest as `Deltas` takes by itself
            self._makes_delta = False
            self._config = msgspec.structs.replace(self._config, delta_rest=2 * self._config.delta_rest + 1)
        with self._lock:
            given = self._publication
            if given is None or given is self._done or given is not self._given:
                return
            self._num_deaths += 1
            if self._num_deaths < _MAX_DEATHS:
                return
        self._give_up(given, f"the agent died {_MAX_DEATHS} times before it had proved it; see what it wrote to stderr")

    def _give_up(self, given: _Told, why: str) -> None:
        """One version is not told to any agent any more; the last one that was proved is, if it is there still."""
        with self._lock:
            if self._publication is given:
                self._publication = self._done = self._good
        _logger.error("version %s is given up: %s", given.version, why)
        error = StateError(f"it is given up: {why}", version=str(given.version))
        self._on_event(NotPublished(version=given.version, error=error.to_dict()))
