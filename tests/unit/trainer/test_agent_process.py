"""AgentProcess: what a death says to the next agent. With real processes: tests/multiproc/test_offload_agent.py."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.standins.threads import logged_here
from weightsync.trainer import agent_process
from weightsync.trainer.agent_process import AgentProcess
from weightsync.types import Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import DeltaBegun, DeltaReport, Published

DELTA = DeltaReport(
    run_id="run", base=3, base_digest="0" * 32, version=4, nbytes=9, num_changed=1, num_elements=9, seconds=0.1
)


def test_an_agent_behind_one_that_died_of_a_delta_is_told_to_rest() -> None:
    """Seen red: the next one made one at once, and died with every version; and, behind a death that was none of a
    delta's, versions went without theirs."""
    steps = [  # what it says of each version before it dies or goes on
        ((DeltaBegun(),), True),
        ((), True),
        ((DeltaBegun(), Published(version=Version(run_id="run", number=2))), True),
        ((DeltaBegun(),), True),
        ((DeltaBegun(), Published(version=Version(run_id="run", number=4), delta=DELTA)), False),
        ((DeltaBegun(),), True),
    ]
    rests = []
    with contextlib.closing(AgentProcess(AgentConfig(model_id="m"), lambda event: None)) as agent:
        for number, (said, dies) in enumerate(steps):
            publication: Any = SimpleNamespace(manifest=SimpleNamespace(version=Version(run_id="run", number=number)))
            agent.publish(publication, 0)
            for event in said:
                agent._hear(event)
            if dies:
                agent._died()
            rests.append(agent._config.delta_rest)
    assert rests == [1, 1, 1, 3, 0, 1]


def test_an_agent_that_can_not_be_started_for_weeks_is_two_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: two each 5 s."""

    class Ends(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            tries.append(timeout)
            if len(tries) == 6:
                self.set()
            return self.is_set()

    def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(f"no more processes, try {len(tries)}")

    tries: list[float | None] = []
    monkeypatch.setattr(agent_process, "AgentRun", none_left)
    agent = AgentProcess(AgentConfig(model_id="m"), lambda event: None)
    with contextlib.closing(agent):
        agent._started.set()
        agent._closed = Ends()
        agent._supervise()
    warned = [record.getMessage() for record in logged_here(caplog) if record.levelname == "WARNING"]
    assert len(tries) == 6
    assert warned == [
        "the agent could not be started again: no more processes, try 0",
        "the agent of model m died: it is started again in 0.2 s",
    ]
