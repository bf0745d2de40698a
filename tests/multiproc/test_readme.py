"""The README's examples, run as they stand but for the addresses: a trainer of two FSDP2 ranks, and an engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.multiproc.spine import TOKEN, build, cast_bytes, shard, step
from weightsync.tensors import byte_array
from weightsync.testing.processes import children, free_port, run_ranks

README = Path(__file__).parents[2] / "README.md"


def examples() -> tuple[str, str]:
    return blocks()[0], blocks()[1]


def blocks() -> list[str]:
    """Trainer, engine, vLLM (which tests/engines runs), publishing trainer, rollout host."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 5
    return found


def serve(code: str, port: int, conn: Any) -> None:
    model: Any = build(99, dtype=torch.bfloat16)
    model.generate = lambda prompt: model(torch.tensor([1, 2]))
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope: dict[str, Any] = {"model": model}
    exec(code.replace("8123", str(port)), scope)  # noqa: S102
    conn.send("listening")
    while conn.recv() is not None:
        version, _ = scope["answer"]("hello")
        weights = {name: byte_array(t.detach().contiguous()).tobytes() for name, t in model.state_dict().items()}
        conn.send((version.number, weights))


def train(rank: int, world_size: int, code: str, port: int) -> None:
    model = shard(build(5), "shard0", world_size)
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope = {"model": model, "num_steps": 3, "train_step": step}
    exec(code.replace("8123", str(port)), scope)  # noqa: S102


def test_the_readme_examples_work() -> None:
    trainer, engine = examples()
    with children() as start:
        port = free_port()
        serving = start(serve, engine, port, talk=True)
        assert serving.recv() == "listening"
        run_ranks(train, 2, trainer, port)
        serving.conn.send("what do you serve?")
        version, weights = serving.recv()
        model = build(5)
        for _ in range(3):
            step(model)
        assert version == 3
        assert weights == cast_bytes(model)


def host(engine_code: str, code: str, ports: dict[str, str], conn: Any) -> None:
    model: Any = build(99, dtype=torch.bfloat16)
    model.generate = lambda prompt: model(torch.tensor([1, 2]))
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope: dict[str, Any] = {"model": model}
    for block in (engine_code, code):
        exec(at(block, ports), scope)  # noqa: S102
    conn.send("listening")
    while conn.recv() is not None:
        version, _ = scope["answer"]("hello")
        weights = {name: byte_array(t.detach().contiguous()).tobytes() for name, t in model.state_dict().items()}
        conn.send((version and version.number, weights))


def publish(rank: int, world_size: int, code: str, ports: dict[str, str]) -> None:
    model = shard(build(5), "shard0", world_size)
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    scope: dict[str, Any] = {"model": model, "num_steps": 3, "train_step": step, "rank": rank}
    exec(at(code, ports), scope)  # noqa: S102


def at(code: str, ports: dict[str, str]) -> str:
    return re.sub("8123|8765|9000", lambda found: ports[found[0]], code)


def test_the_readme_pull_examples_work() -> None:
    _, engine, _, trainer, rollout = blocks()
    ports = {written: str(free_port()) for written in ("8123", "8765", "9000")}
    with children() as start:
        serving = start(host, engine, rollout, ports, talk=True)
        assert serving.recv() == "listening"
        run_ranks(publish, 2, trainer, ports)
        serving.conn.send("what do you serve?")
        version, weights = serving.recv()
    model = build(5)
    for _ in range(3):
        step(model)
    assert version == 3
    assert weights == cast_bytes(model)


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
