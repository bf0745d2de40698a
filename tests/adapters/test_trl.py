"""TRL's own `AsyncGRPOTrainer` and rollout worker, a real vLLM server, and our adapter between them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.test_vllm_versions import OPTIONS
from tests.engines.vllm_support import MODEL_NAME, Server, build_model, save_checkpoint
from tests.engines.vllm_unpacked import VARIABLE
from weightsync.types import Deadline
from weightsync.verbs.serving import Service, serve

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4
"""In float32 the server's log-probabilities are the model's to some 1e-7, relatively."""
DIFFERENT = 5e-3
"""A step moves them by 0.02 or more, by less as all samples become good."""
STEPS = 20
KILL_AT = 8
END_S = 240.0

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        any(importlib.util.find_spec(each) is None for each in ("trl", "vllm")),
        reason="needs TRL and vLLM: pip install weightsync[engines-cpu]",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, with a tokenizer, and with versions in its answers."""
    from tests.adapters.trl_job import tokenizer

    tmp_path = tmp_path_factory.mktemp("trl")
    model = build_model()
    checkpoint = save_checkpoint(tmp_path / "model", model, dict(model.named_parameters()))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.update(dtype="float32", torch_dtype="float32")
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer().save_pretrained(checkpoint)
    options = (*OPTIONS, "--dtype", "float32", "--served-model-name", MODEL_NAME, str(checkpoint))
    made = Server(checkpoint, tmp_path / "server", env={VARIABLE: "1"}, options=options)
    with made.running():
        yield made


@pytest.fixture
def host(server: Server) -> Iterator[Service]:
    with serve({"actor": f"vllm+{server.url}"}, port=0) as service:
        yield service


class Training:
    """The job in a process of its own, and the lines that it says."""

    def __init__(self, folder: Path, server: Server, **job: Any) -> None:
        said = {"checkpoint": str(server.checkpoint), "server": server.url, "out": str(folder / "out"), **job}
        self.done = folder / "out" / "done"
        self._log = (folder / "trl.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "adapters" / "trl_job.py"), json.dumps(said)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL, text=True, process_group=0,
        )  # fmt: skip

    def lines(self) -> Iterator[dict[str, Any]]:
        """As they come, to the end of the job, which has to go well."""
        deadline = Deadline(END_S)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            assert not deadline.expired, self.tail()
            if line.startswith("{") and ('"off"' in line or '"oldest"' in line):
                yield msgspec.json.decode(line)
        assert self._process.wait(60) == 0, self.tail()

    def tail(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-4000:]

    def close(self) -> None:
        """Ends it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._log.close()


def test_sft_with_sharded_ranks_publishes_by_the_callback(tmp_path: Path, server: Server, host: Service) -> None:
    """Two ranks, FSDP2 by accelerate: vLLM ends with the weights that training ended with."""
    job = {
        "checkpoint": str(server.checkpoint), "to": [host.url], "steps": 5, "every": 2, "out": str(tmp_path),
    }  # fmt: skip
    command = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT / "tests" / "adapters" / "sft_job.py"), json.dumps(job)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))
    assert (said["sharded"], said["last"]) == (25, 5)
    assert host.model_status("actor").version == 5
    told = server.logprobs([said["prompt"]])[0]
    assert relative(told, said["after"]) <= CLOSE
    assert relative(told, said["before"]) >= DIFFERENT


def relative(one: list[float], other: list[float]) -> float:
    """The largest relative distance."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def test_async_grpo_trains_against_a_server_that_is_killed_in_the_middle(
    tmp_path: Path, server: Server, host: Service
) -> None:
    """20 steps: behind each sync the server computes what the trainer's model does, and not what the one before did.
    Samples are of versions that were there."""
    with contextlib.closing(Training(tmp_path, server, to=[host.url], steps=STEPS, versioned=True)) as training:
        synced: list[dict[str, Any]] = []
        logged: list[tuple[int, dict[str, Any]]] = []
        for line in training.lines():
            if "off" in line:
                synced.append(line)
            else:
                logged.append((len(synced), line))
            if line.get("number") == KILL_AT:
                server.kill()
                server.start()
        assert training.done.read_text(encoding="utf-8") == str(STEPS)
    assert [each["number"] for each in synced] == list(range(1, STEPS + 2))
    assert_their_own(synced)
    # a server that was started again answers with its checkpoint at first: samples of no known version, at times all
    # of a step's, some of which TRL keeps for later steps
    known = [(number, each) for number, each in logged if each["oldest"] is not None]
    assert all(1 <= each["oldest"] <= each["newest"] <= number for number, each in known), logged
    assert all(each["unknown"] > 0 for _, each in logged if each["oldest"] is None), logged
    assert logged[-1][1]["newest"] > KILL_AT
    assert all(each["unknown"] == 0 for number, each in logged if number < KILL_AT), logged
    assert any(each["unknown"] == 0 for number, each in logged if number > KILL_AT), logged
    assert logged[-1][1]["unknown"] < 0.5, logged


def assert_their_own(synced: list[dict[str, Any]]) -> None:
    """The server computes what each version's model does, and not what the one before did."""
    off = [each for each in synced if each["off"] is None or each["off"] > CLOSE]
    alike = [each for each in synced[1:] if each["moved"] < DIFFERENT]
    assert (off, alike) == ([], [])


@pytest.mark.soak
def test_async_grpo_pushes(tmp_path: Path, server: Server) -> None:
    """From training rank 0 straight into the server."""
    with contextlib.closing(Training(tmp_path, server, to=[], steps=STEPS)) as training:
        synced = [line for line in training.lines() if "off" in line]
    assert [each["number"] for each in synced] == list(range(1, STEPS + 2))
    assert_their_own(synced)
