"""Families of models in a real vLLM: what their live weights say after each optimiser step's delta.

The steps are real ones of AdamW, on a tiny model of each family. Four steps and one fresh engine in `make test`; 50
steps, and a fresh engine after each, in `make soak`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_faults
from tests.engines.vllm_families import EngineProcess, trainer_main
from tests.engines.vllm_support import (
    DIFFERENT,
    NEEDS_PACKING,
    NEEDS_VLLM,
    OPTIONS,
    PACKS,
    SAME,
    Oracle,
    distance,
    engine_env,
    vllm_is_there,
)
from tests.engines.vllm_unpacked import LINEAR, VARIABLE
from tests.standins.processes import Child, children

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)]
FEW, MANY = 4, 50
PLAIN = [
    ("Qwen2", False), ("Qwen2", True), ("Qwen3", False), ("Qwen3", True), ("Llama", False), ("Llama", True),
    ("Gemma", False), ("Gemma", True), ("Gemma3", True), ("Qwen3Moe", False), ("Qwen3Moe", True),
]  # fmt: skip
BUILDS: dict[str, dict[str, str]] = {
    "unpacked": {VARIABLE: "1"},
    "packed experts": {VARIABLE: LINEAR},
    "packed": {},
    "fp8": {VARIABLE: "1", OPTIONS: json.dumps({"quantization": "fp8_per_channel"})},
    "experts apart": {VARIABLE: "1", OPTIONS: json.dumps({"enable_expert_parallel": True})},
}
"""How vLLM keeps weights: as they come, as on a GPU; as its CPU build does, in part or whole; quantised by itself; each
expert whole in one worker."""
IDS = [f"{family}-{'tied' if tied else 'untied'}" for family, tied in PLAIN]
SHORT = [("Qwen2", True), ("Llama", False), ("Gemma3", True), ("Qwen3Moe", False)]
MARKED = [
    ("packed", "Qwen2", True, "the engine keeps"),
    ("fp8", "Qwen3", False, "Fp8PtpcOnlineLinearMethod may keep it in a form of its own"),
]
_logger = logging.getLogger(__name__)


class Workshop:
    """A process for engines, and one for fresh engines that keep their weights alike.

    Args:
        trainer: runs `trainer_main`.
        folder: for everything.
        tp: tensor-parallel size of every engine.
        build: one of `BUILDS`.

    Attributes:
        busy: a run is under way, or has failed.
    """

    def __init__(self, trainer: Child, folder: Path, *, tp: int, build: str) -> None:
        self.busy = False
        self._trainer = trainer
        self._folder = folder
        self._tp = tp
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        env = BUILDS[build]
        spread = engine_env(tp) if tp > 1 else {}
        self._oracle = Oracle(self._log, env={**vllm_faults.install(folder / "oracle"), **env, **spread}, tp=tp)
        self._engine = EngineProcess(folder / "engine", env={**engine_env(tp), **env})

    def run(
        self, family: str, *, tied: bool, steps: int, compare: int | None, marked: str | None = None,
        as_files: bool = False,
    ) -> None:  # fmt: skip
        """Trains and syncs so many steps; asserts all that there is to assert.

        Args:
            family: one of `FAMILIES`.
            tied: whether its output layer is its embedding.
            steps: of the optimiser.
            compare: with a fresh engine, after every so many of them; None: after the last one, with a full load into
                the same engine.
            marked: words of the reason why its live weights can't be written one by one; None where they can. Every
                other step then changes the first layer alone.
            as_files: under the names that tensors have in files.
        """
        self.busy = True
        begun = self._published("begin", family, tied, str(self._folder / f"{family}-{tied}-{as_files}"), as_files)
        self._engine.order(do="start", checkpoint=begun["checkpoint"], endpoint=begun["endpoint"], tp=self._tp)
        told, patched, changed = [], 0, []
        compared: list[tuple[Path, list[list[float]]]] = []
        made = begun
        for step in range(steps + 1):
            if step:
                made = self._published("step", "layers.0." if marked and step % 2 else "")
                changed.append(made["changed"])
            is_compared = compare is not None and step > 0 and step % compare == 0
            if is_compared and self._tp == 1:  # two engines of two workers at once hold each other up
                self._oracle.learn([Path(made["checkpoint"])])
            said = self._synced(made)
            assert said["num_deltas"] == int(step > 0), said
            assert said["num_patched"] == int(step > 0), said
            if marked is None:
                assert (said["equal"], said["digest"], said["unprovable"]) == (True, made["digest"], {}), said
            else:
                assert said["equal"] is None, said
                assert marked in said["why_unknown"], said
            told.append(said["logprobs"])
            patched += said["num_patched"]
            if is_compared:
                compared.append((Path(made["checkpoint"]), said["logprobs"]))
        distances = []
        if compare is None:
            said = self._loaded_again()
            assert (said["num_deltas"], said["num_patched"]) == (0, 0), said
            distances = [distance(said["logprobs"], told[-1])]
        self._engine.order(do="stop")
        assert made["never"] == [], "every tensor was in a delta"
        distances += [distance(logprobs, self._oracle.logprobs(checkpoint)) for checkpoint, logprobs in compared]
        assert max(distances) <= SAME, distances
        assert distance(told[0], told[-1]) >= DIFFERENT, "the steps change what it says"
        self.busy = False
        _logger.warning(
            "%s, %s, TP %d, %s: %d steps, %d patched in place, %.1f %% of the elements changed by a step, %.2g "
            "from %d others at most, %.2g from the first version",
            family, "tied" if tied else "untied", self._tp, "marked" if marked else "live", steps, patched,
            100 * sum(changed) / len(changed), max(distances), len(distances), distance(told[0], told[-1]),
        )  # fmt: skip

    def fails_in_reloads(self, *, patches: int) -> None:
        """Each worker fails once in the reload of its layers, at its start and in the middle: the others take theirs
        back, and the version is loaded in full. Then so many patches.
        """
        self.busy = True
        begun = self._published("begin", "Qwen2", True, str(self._folder / "fails"))
        self._engine.order(do="start", checkpoint=begun["checkpoint"], endpoint=begun["endpoint"], tp=self._tp)
        self._synced(begun)
        folder = self._folder / "engine"
        for worker, chunk in itertools.product(range(self._tp), (0, 2)):
            fault = {"at": "reload", "do": "raise", "chunk": chunk, "worker": worker}
            vllm_faults.arm(folder, fault)
            assert self._synced(self._published("step", "layers.1."))["num_patched"] == 0, fault
            assert not vllm_faults.armed(folder)
            assert self._synced(self._published("step", ""))["num_patched"] == 1, fault
        for _ in range(patches):
            said = self._synced(self._published("step", "layers.0."))
            assert said["num_patched"] == 1
        assert distance(said["logprobs"], self._loaded_again()["logprobs"]) <= SAME
        self._engine.order(do="stop")
        self.busy = False

    def _loaded_again(self) -> dict[str, Any]:
        """What it says when vLLM's own loader has brought all of the same weights."""
        vllm_faults.arm(self._folder / "engine", {"at": "begin", "do": "distrust", "always": True})
        said = self._synced(self._published("again"))
        vllm_faults.disarm(self._folder / "engine")
        return said

    def _published(self, *order: Any) -> dict[str, Any]:
        self._trainer.conn.send(order)
        made: dict[str, Any] = self._trainer.recv(120)
        return made

    def _synced(self, made: dict[str, Any]) -> dict[str, Any]:
        """What the engine says when it has what the trainer has published."""
        said = self._engine.order(do="sync", run_id=made["run_id"], endpoint=made["endpoint"], version=made["version"])
        assert (said["version"], said["errors"]) == (made["version"], {}), said
        return said

    def close(self) -> None:
        """Ends its processes."""
        self._engine.close()
        self._oracle.close()
        self._log.close()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Workshop]]:
    """The workshop of these settings; one at a time is open."""
    with children() as start, contextlib.ExitStack() as stack:
        trainer = start(trainer_main, talk=True, name="trainer")
        opened: dict[tuple[int, str], Workshop] = {}

        def of(*, tp: int = 1, build: str = "unpacked") -> Workshop:
            if build == "packed" and not PACKS:
                pytest.skip(NEEDS_PACKING)
            if (tp, build) not in opened or opened[tp, build].busy:
                stack.pop_all().close()
                opened.clear()
                folder = tmp_path_factory.mktemp("families")
                opened[tp, build] = Workshop(trainer, folder, tp=tp, build=build)
                stack.callback(opened[tp, build].close)
            return opened[tp, build]

        yield of


@pytest.mark.parametrize(("family", "tied"), SHORT, ids=[each[0] for each in SHORT])
def test_a_familys_deltas_are_written_into_its_live_weights(
    workshop: Callable[..., Workshop], family: str, tied: bool
) -> None:
    """After each step its live digest is the checkpoint's; after the last, it answers as a fresh engine does."""
    workshop().run(family, tied=tied, steps=FEW, compare=FEW)


def test_experts_may_have_their_names_in_files(workshop: Callable[..., Workshop]) -> None:
    """As Megatron's bridge exports them, and a folder has them. Seen red: the engine's model had no such tensors."""
    pytest.importorskip("transformers.core_model_loading", reason="this release of transformers stacks no experts")
    workshop().run("Qwen3Moe", tied=False, steps=2, compare=2, as_files=True)


@pytest.mark.soak
def test_the_experts_of_two_workers_are_written_in_place(workshop: Callable[..., Workshop]) -> None:
    """Each worker has a part of every expert. What vLLM's own loader brings then says the same, to the bit."""
    workshop(tp=2).run("Qwen3Moe", tied=False, steps=FEW, compare=None)


@pytest.mark.soak
def test_experts_that_lie_whole_in_one_of_two_workers(workshop: Callable[..., Workshop]) -> None:
    """Expert parallelism."""
    workshop(tp=2, build="experts apart").run("Qwen3Moe", tied=False, steps=FEW, compare=None)


@pytest.mark.soak
def test_the_layers_of_experts_that_vllm_packs_are_loaded_alone(workshop: Callable[..., Workshop]) -> None:
    """As its CPU build does. Seen to answer wrongly: vLLM 0.32 leaves them unpacked at a reload."""
    marked = "packs the experts' weights"
    workshop(build="packed experts").run("Qwen3Moe", tied=False, steps=FEW, compare=FEW, marked=marked)


@pytest.mark.parametrize(("build", "family", "tied", "marked"), MARKED, ids=[each[0] for each in MARKED])
def test_layers_that_are_packed_or_quantised_are_loaded_alone(
    workshop: Callable[..., Workshop], build: str, family: str, tied: bool, marked: str
) -> None:
    """Those that a step has changed."""
    workshop(build=build).run(family, tied=tied, steps=FEW, compare=FEW, marked=marked)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "tied"), PLAIN, ids=IDS)
def test_fifty_steps(workshop: Callable[..., Workshop], family: str, tied: bool) -> None:
    """A fresh engine after each."""
    workshop().run(family, tied=tied, steps=MANY, compare=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "tied"), [("Gemma", True), ("Qwen3Moe", False)])
def test_fifty_steps_of_two_workers(workshop: Callable[..., Workshop], family: str, tied: bool) -> None:
    """A fresh engine of two workers after every tenth."""
    workshop(tp=2).run(family, tied=tied, steps=MANY, compare=10)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("build", "family", "tied", "marked"),
    [("packed experts", "Qwen3Moe", False, "packs the experts' weights"), *MARKED],
    ids=["packed experts", *[each[0] for each in MARKED]],
)
def test_fifty_steps_of_layers_that_are_loaded_alone(
    workshop: Callable[..., Workshop], build: str, family: str, tied: bool, marked: str
) -> None:
    """A fresh engine after each."""
    workshop(build=build).run(family, tied=tied, steps=MANY, compare=1, marked=marked)


@pytest.mark.soak
def test_the_layers_of_two_workers_are_loaded_alone(workshop: Callable[..., Workshop]) -> None:
    """What vLLM's own loader brings then says the same, to the bit."""
    build, family, tied, marked = MARKED[0]
    workshop(tp=2, build=build).run(family, tied=tied, steps=10, compare=None, marked=marked)


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 2])
def test_a_worker_that_fails_in_a_reload_of_its_layers(workshop: Callable[..., Workshop], tp: int) -> None:
    """And a hundred patches: what vLLM's own loader brings then says the same, to the bit."""
    workshop(tp=tp, build="packed").fails_in_reloads(patches=100)
