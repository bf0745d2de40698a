"""How the suite is shared out among workers that run at the same time: `make test` starts them.

A worker takes one group of tests after the other. A group is a file, so that what a module's fixtures start is started
once; files that share more are named in TOGETHER. Groups that take long come first, so that short ones fill the end.
At most two groups run a real engine at once: a vLLM or SGLang that starts keeps a core busy.
A worker that has run Ray's tests ends with them: a process that was Ray's driver keeps threads that outlive the
cluster, and no other test runs there. So they come when short ones alone are left for the others. The workers after the
fourth begin then: the long ones keep two cores busy by four at a time, and short ones wait most of their time.
A test marked `alone` looks at the whole machine, or needs it quiet: no other test runs beside it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "weightsync"

ENGINE = "one vLLM server"
RAY = "one Ray cluster"
TOGETHER = {
    "cluster": RAY,
    "engines/test_controller_file.py": ENGINE,
    "engines/test_matrix.py": ENGINE,
    "engines/test_methods_vllm.py": ENGINE,
    "engines/test_pull_vllm.py": ENGINE,
    "engines/test_vllm_http.py": ENGINE,
    "engines/test_vllm_in_flight.py": ENGINE,
    "multiproc/test_extract_deepspeed.py": "one pool of ranks",
    "multiproc/test_extract_megatron.py": "one pool of ranks",
    "multiproc/test_offload_trainers.py": "one pool of ranks",
}
"""The group of a file, or of a folder, that shares more than a file does."""

FIRST = (
    "engines/test_sglang.py",
    "engines/test_sglang_tp.py",
    "engines/test_demo_vllm.py",
    "engines/test_matrix.py",
    "engines/test_methods_vllm.py",
    "engines/test_pull_vllm.py",
    "engines/test_vllm_http.py",
    "engines/test_vllm_in_flight.py",
    "adapters/test_trl.py",
    "multiproc/test_push_faults.py",
    "multiproc/test_demo.py",
    "engines",
    "multiproc",
    "hosts",
    "adapters",
    "documents",
    "gpu",
    "contract",
    "unit/engine/test_embedded_patches.py",
    "cluster",
)
"""Files and folders that take long, longest first; the others follow in their usual order."""

MOST_ENGINES = 2
MOST_LONG = 4
"""So many workers run groups that take long."""


settings.register_profile(
    "shared", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # an example takes as long as the tests beside it let it
settings.load_profile("shared")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the loops before workers start: each would do it for itself, half a minute long, in a new clone."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        for path in sorted(SOURCE.rglob("*kernels.py")):
            importlib.import_module(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the groups that take long first."""
    items.sort(key=lambda item: _turn(item.path.relative_to(TESTS).as_posix()))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole groups, in their order. (`--dist loadgroup` does nothing with pytest 9.2: it marks node ids.)"""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(Path(nodeid.partition("::")[0]).relative_to(TESTS.name).as_posix())

        def _reschedule(self, node: Any) -> None:
            if RAY in self.assigned_work.get(node, ()) and not node.shutting_down:
                node.shutdown()  # when it has run what it was given
            super()._reschedule(node)
            for other in self.nodes:
                if not (self.assigned_work[other] or other.shutting_down or self._rests(other)):
                    super()._reschedule(other)  # it rested until now
                    super()._reschedule(other)  # a worker begins with its last test when it knows that it is the last

        def _rests(self, node: Any) -> bool:
            return self.nodes.index(node) >= MOST_LONG and any(_is_long(scope) for scope in self.workqueue)

        def _assign_work_unit(self, node: Any) -> None:
            if self._rests(node):
                return
            busy = sum(
                any(_has_engine(scope) and not all(done.values()) for scope, done in work.items())
                for other, work in self.assigned_work.items()
                if other is not node
            )
            if busy >= MOST_ENGINES:
                light = next((scope for scope in self.workqueue if not _has_engine(scope)), None)
                if light is not None:
                    self.workqueue.move_to_end(light, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Groups(config, log)


def _group(file: str) -> str:
    return TOGETHER.get(file) or TOGETHER.get(file.partition("/")[0]) or file


def _has_engine(group: str) -> bool:
    return group.startswith(("engines/", "adapters/test_trl")) or group == ENGINE


def _is_long(group: str) -> bool:
    return group in TOGETHER.values() or _turn(group) < len(FIRST)


def _turn(file: str) -> int:
    places = (file, file.partition("/")[0])
    return min((FIRST.index(place) for place in places if place in FIRST), default=len(FIRST))
