"""Bytes on the wire of a LoRA adapter's version, over the size of the file that PEFT writes of it.

Trainer and engine are two processes in a network namespace of their own, so that the loopback's own counter is what
went between them: data, HTTP, polls, TCP's headers, both ways. The row is the larger of two: a version pulled over TCP,
and one pushed by broadcast over HTTP; the median of versions after the first, which also says names and shapes. Every
version is proved by its digest at the engine.

`detail` has both ways, the first version of each, and the same against the bytes of the whole model.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync
from bench.harness import BenchArgs, Row, facts
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.load.peft import PeftAdapterLoader

ROWS = {"lora_bytes": "bytes on the wire of a LoRA adapter's version, over the size of PEFT's own file of it"}
_TARGET = 1.02
_VERSIONS = 5
_RANK = 8
_TOKEN = "of-the-benchmark"
_WAIT_S = 120.0
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def run(args: BenchArgs) -> list[Row]:
    """Measures the row in a process of its own. The model's size is fixed. Without the right to make a network
    namespace there is no row."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench.lora"], capture_output=True, text=True, timeout=900, check=False
    )
    if ended.returncode:
        print(f"lora_bytes was not measured: {ended.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return []
    taken = json.loads(ended.stdout.splitlines()[-1])
    ratio = max(taken["pull"]["ratio"], taken["push"]["ratio"])
    return [Row(row="lora_bytes", ratio=ratio, target=_TARGET, detail={**facts(args), **taken})]


def model() -> Any:
    """A decoder of eight layers with an adapter on attention and MLP."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    return peft.get_peft_model(base, peft.LoraConfig(r=_RANK, target_modules=targets))


def step(trained: Any, number: int) -> None:
    """Another version: every element differs."""
    made = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=made))


def engine_process(conn: Connection) -> None:
    """Serves the adapter: to a push over HTTP, or, where it is given a source, by pulling over TCP."""
    torch.set_num_threads(1)
    engine = EmbeddedEngine.of(PeftAdapterLoader(model()))
    server = EngineServer(engine, token=_TOKEN)
    conn.send(server.start())
    service: weightsync.Service | None = None
    while (order := conn.recv()) is not None:
        if isinstance(order, str):
            service = weightsync.serve(
                {"lora": engine}, sources=[order], token=_TOKEN, port=0, transport="tcp", mode="full"
            )
            conn.send(True)
        else:
            looked, end_s = threading.Event(), time.monotonic() + _WAIT_S
            while engine.version is None or engine.version.number < order:
                if looked.wait(0.01) or time.monotonic() > end_s:
                    break
            unprovable = {} if service is None else service.model_status("lora").unprovable
            conn.send((engine.version and engine.version.number, not unprovable))
    if service is not None:
        service.close()
    server.close()


def _measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    trained = model()
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        file_bytes = (Path(folder) / "adapter_model.safetensors").stat().st_size
    whole_bytes = sum(parameter.nbytes for name, parameter in trained.named_parameters() if "lora_" not in name)
    return {
        "file_bytes": file_bytes,
        "model_bytes": whole_bytes,
        "rank": _RANK,
        "pull": _way(trained, file_bytes, whole_bytes, _pulled),
        "push": _way(trained, file_bytes, whole_bytes, _pushed),
    }


def _way(trained: Any, file_bytes: int, whole_bytes: int, bring: Callable[..., Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    engine = context.Process(target=engine_process, args=(theirs,), daemon=True)
    engine.start()
    try:
        url = _said(mine)
        counts: list[int] = []
        with contextlib.ExitStack() as opened:
            one = bring(trained, url, mine, opened)
            for number in range(1, _VERSIONS + 1):
                step(trained, number)
                before = _wire_bytes()
                one()
                mine.send(number)
                served, proved = _said(mine)
                if served != number or not proved:
                    raise RuntimeError(f"version {number} is not served: {served}, proved {proved}")
                counts.append(_wire_bytes() - before)
            mine.send(None)
    finally:
        engine.join(10)
        engine.kill()
    steady = statistics.median(counts[1:])
    return {
        "ratio": round(steady / file_bytes, 4),
        "bytes": int(steady),
        "first_bytes": counts[0],
        "first_ratio": round(counts[0] / file_bytes, 4),
        "over_the_model": round(steady / whole_bytes, 5),
    }


def _pulled(trained: Any, url: str, engine: Connection, opened: contextlib.ExitStack) -> Callable[[], object]:
    publisher = opened.enter_context(weightsync.publish(trained, "lora", port=0, token=_TOKEN, last_wait_s=0))
    engine.send(publisher.endpoint)
    _said(engine)
    return publisher.step


def _pushed(trained: Any, url: str, engine: Connection, opened: contextlib.ExitStack) -> Callable[[], object]:
    return opened.enter_context(weightsync.push(trained, [url], model_id="lora", token=_TOKEN)).step


def _said(conn: Connection) -> Any:
    if not conn.poll(2 * _WAIT_S):
        raise RuntimeError("the engine says nothing")
    return conn.recv()


def _wire_bytes() -> int:
    """What the loopback of this namespace has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("there is no loopback")


def _own_network() -> None:
    """A network namespace of this process and its children, with a loopback alone.

    Raises:
        PermissionError: it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise PermissionError(ctypes.get_errno(), "no network namespace without the right to make one")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        fcntl.ioctl(opened, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _own_network()
    print(json.dumps(_measure()))
