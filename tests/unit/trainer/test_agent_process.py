"""AgentProcess: what a death says to the next agent. With real processes: tests/multiproc/test_offload_agent.py."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from weightsync.trainer.agent_process import AgentProcess
from weightsync.types import Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import DeltaReport, Published

DELTA = DeltaReport(
    run_id="run", base=3, base_digest="0" * 32, version=4, nbytes=9, num_changed=1, num_elements=9, seconds=0.1
)


def test_deaths_before_a_proof_are_counted_from_version_to_version() -> None:
    """An agent that dies of a delta has proved the version in vain. Seen red: the next one made one at once, and
    died with every version."""
    steps = [
        (0, True, False),
        (1, True, False),
        (2, False, False),
        (3, True, False),
        (4, False, True),
        (5, True, False),
    ]
    rests = []
    with contextlib.closing(AgentProcess(AgentConfig(model_id="m"), lambda event: None)) as agent:
        for number, dies, has_delta in steps:
            version = Version(run_id="run", number=number)
            publication: Any = SimpleNamespace(manifest=SimpleNamespace(version=version))
            agent.publish(publication, 0)
            agent._given = agent._publication
            if dies:
                agent._died()
            rests.append(agent._config.delta_rest)
            agent._hear(Published(version=version, delta=DELTA if has_delta else None))
            agent._died()  # it is done with that version: this has nothing to do with it
    assert rests == [1, 3, 3, 7, 7, 1]
