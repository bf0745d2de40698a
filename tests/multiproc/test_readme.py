"""The lines of README and of the pages, run as they stand but for the addresses."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.multiproc.spine import TOKEN, build, cast_bytes, shard, step
from tests.standins.processes import children, free_port, run_ranks
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.load.module import ModuleWeightLoader
from weightsync.tensors import byte_array

README = Path(__file__).parents[2] / "README.md"
_PORTS = ("8000", "8123", "8765", "9000")


def blocks() -> list[str]:
    """Publishing trainer, rollout host, pushing trainer. The host's command is tested in tests/engines."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 3
    return found


def at(code: str, ports: dict[str, str]) -> str:
    """With other ports, those that the lines leave to their defaults among them."""
    code = code.replace("to=[", "port=8765, to=[").replace("sources=[", "port=9000, sources=[")
    return re.sub("|".join(_PORTS), lambda found: ports[found[0]], code)


def some_ports() -> dict[str, str]:
    return {written: str(free_port()) for written in _PORTS}


def live_bytes(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: byte_array(t.detach().contiguous()).tobytes() for name, t in model.state_dict().items()}


def generating() -> Any:
    model: Any = build(99, dtype=torch.bfloat16)
    model.generate = lambda prompt: model(torch.tensor([1, 2]))
    return model


def host(code: str, ports: dict[str, str], conn: Any) -> None:
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope: dict[str, Any] = {"model": generating()}
    exec(at(code, ports), scope)  # noqa: S102
    conn.send("listening")
    while conn.recv() is not None:
        version, _ = scope["answer"]("hello")
        conn.send((version and version.number, live_bytes(scope["model"])))
    os._exit(0)


def engine(port: int, conn: Any) -> None:
    model = generating()
    served = EmbeddedEngine.of(ModuleWeightLoader(model), engine_id="engine-0")
    EngineServer(served, port=port, token=TOKEN).start()
    conn.send("listening")
    while conn.recv() is not None:
        conn.send((served.version and served.version.number, live_bytes(model)))
    os._exit(0)


def train(rank: int, world_size: int, code: str, ports: dict[str, str]) -> None:
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope: dict[str, Any] = {"model": shard(build(5), "shard0", world_size), "num_steps": 3, "train_step": step}
    exec(at(code, ports), scope)  # noqa: S102


def serves_three_steps(told: tuple[int | None, dict[str, bytes]]) -> None:
    model = build(5)
    for _ in range(3):
        step(model)
    assert told == (3, cast_bytes(model))


def test_the_readmes_trainer_publishes_and_its_host_serves_the_last_version() -> None:
    trainer, service, _ = blocks()
    ports = some_ports()
    with children() as start:
        serving = start(host, service, ports, talk=True)
        assert serving.recv() == "listening"
        run_ranks(train, 2, trainer, ports)
        serving.conn.send("what do you serve?")
        serves_three_steps(serving.recv())


def test_the_readmes_trainer_pushes() -> None:
    ports = some_ports()
    with children() as start:
        serving = start(engine, int(ports["8123"]), talk=True)
        assert serving.recv() == "listening"
        run_ranks(train, 2, blocks()[2], ports)
        serving.conn.send("what do you serve?")
        serves_three_steps(serving.recv())


def test_readmes_lines_are_few() -> None:
    """A trainer is six lines, a host one call or command."""
    for block in blocks():
        assert len([line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]) <= 6
    host_lines = re.findall(r"^weightsync serve .*$", README.read_text(), re.MULTILINE)
    assert len(host_lines) == 1


# --- the quickstart: files, as a user writes them ---


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "WEIGHTSYNC_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def quickstart(folder: Path) -> None:
    """Writes the files of both pages, each with its name in the first line."""
    ports = some_ports()
    for page in ("quickstart.md", "quickstart-push.md"):
        text = (README.parent / "docs" / page).read_text()
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
            (folder / name).write_text(at(code, ports))


def said_until(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    end, said = time.monotonic() + 60, []
    for line in process.stdout:
        said.append(line)
        if re.search(pattern, line):
            return
        assert time.monotonic() < end, said[-20:]
    raise AssertionError(said[-40:])


def torchrun(folder: Path, name: str) -> str:
    with running(folder, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                 str(free_port()), name) as trainer:  # fmt: skip
        said, _ = trainer.communicate(timeout=100)
    assert trainer.returncode == 0, said
    return said


def test_the_quickstarts_files_publish(tmp_path: Path) -> None:
    quickstart(tmp_path)
    with running(tmp_path, "host.py") as serving:
        said_until(serving, "listening on http")
        said = torchrun(tmp_path, "trainer.py")
        assert re.search(r"run-[0-9a-f]+/5 \d+\.\d+ s", said), said
        said_until(serving, r"^run-[0-9a-f]+/5 \[")


def test_the_quickstarts_files_push(tmp_path: Path) -> None:
    quickstart(tmp_path)
    with running(tmp_path, "engine.py") as serving:
        said_until(serving, "listening on http")
        said = torchrun(tmp_path, "push_trainer.py")
        assert re.search(r"v5: 0\.\d MB in .* proved", said), said
        said_until(serving, r"^run-[0-9a-f]+/5 \[")


def test_the_program_of_the_deltas_page_works() -> None:
    """The trainer and the rollout service of ten lines: from the second version on what changed alone is fetched."""
    page = (README.parent / "docs" / "deltas.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    said = [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]
    assert said[0] == [0, 0, 1050624, 0]
    for version, (number, num_deltas, received_bytes, num_patched) in enumerate(said[1:], start=1):
        assert (number, num_deltas, num_patched) == (version, 1, 1)
        assert received_bytes < 4000
