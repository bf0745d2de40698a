"""A model of 100,000 small tensors, as a mixture of experts has: what a tensor costs, however small it is.

`offload_100k`: one rank's `WeightManager.offload` of an `nn.Module` with 100,000 parameters, and of the same parameters
as named tensors, the slower of both, over a loop of `copy_` over the same tensors into tensors that are there already.
Segments and plans are there; `detail` has the first call, before they are.

`proof_100k`: seconds of the agent's proof of one version: each tensor's digest, blocks' checksums, the shard sum.

`pull_100k`: seconds from the request to the version loaded and proved in an embedded engine (`ModuleWeightLoader`),
over TCP; `detail` has the same on one host without a copy, and the first version, which brings the layout.

`manifest_100k`: bytes a tensor of what an agent answers to a request for a version whose layout the receiver holds.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.harness import BenchArgs, Row, facts
from weightsync.clients.agent import MAX_PUBLICATION_BYTES, AgentClient
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host.engine_update import EngineUpdate
from weightsync.host.puller import Puller
from weightsync.load.module import ModuleWeightLoader
from weightsync.net.messages import decode, encode
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.layout import GrantMessage
from weightsync.types.transfer_messages import FinishRequest, RegisterRequest, TransferRequest, Transport

ROWS = {
    "offload_100k": "one rank's offload of 100,000 small tensors, over a loop of copy_",
    "proof_100k": "the agent's proof of a version of 100,000 small tensors, in seconds",
    "pull_100k": "request to loaded and proved, 100,000 small tensors over TCP, in seconds",
    "manifest_100k": "what is said of a version of 100,000 tensors after the first, in bytes a tensor",
}
_TARGETS = {"offload_100k": 2.0, "proof_100k": 2.0, "pull_100k": 5.0, "manifest_100k": 40.0}
_NUM_LAYERS, _NUM_EXPERTS = 50, 666
_TIMEOUT_S = 300.0


class _Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, _Linear(32, 32, bias=False, dtype=torch.bfloat16))


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = _Linear(32, _NUM_EXPERTS, bias=False, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(32, bias=False, dtype=torch.bfloat16)
        self.experts = torch.nn.ModuleList(_Expert() for _ in range(_NUM_EXPERTS))


class _Linear(torch.nn.Linear):
    def reset_parameters(self) -> None:
        """Random numbers for each of 100,000 take longer than what is measured."""
        torch.nn.init.constant_(self.weight, 0.5)


def giant() -> torch.nn.Module:
    """50 layers of 666 experts: 100,000 parameters."""
    return torch.nn.ModuleList(_Layer() for _ in range(_NUM_LAYERS))


def run(args: BenchArgs) -> list[Row]:
    """Measures the rows that are wanted. `--gib` says nothing here."""
    model = giant()
    named = dict(model.named_parameters())
    rows: list[Row] = []
    with WeightManager("giant", timeout_s=_TIMEOUT_S) as manager:
        versions = iter(range(1, 10_000))

        def offload(weights: Any) -> tuple[float, float]:
            """Seconds, and the process's seconds of CPU."""
            with torch.no_grad():
                next(iter(named.values())).add_(1.0)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            report = manager.offload(weights(), next(versions))
            took = time.perf_counter() - begin, time.process_time() - begin_cpu
            assert report.published, report.why
            return took

        def publish(weights: Any) -> tuple[float, float, float]:
            """As `offload`, and the seconds until the version can be had."""
            took = offload(weights)
            begin = time.perf_counter()
            manager.wait_published(manager_version(manager), timeout_s=_TIMEOUT_S)
            return *took, time.perf_counter() - begin

        first = publish(lambda: model)
        publish(lambda: model)
        publish(lambda: model)  # every segment is there now
        manager.recorder.drain()
        by_kind: dict[str, list[tuple[float, float, float]]] = {"module": [], "named": []}
        loops: list[float] = []
        targets = [torch.empty_like(tensor) for tensor in named.values()]
        first_named = publish(named.items)
        for _ in range(args.repeats):
            loops.append(_loop_s(targets, list(named.values())))
            by_kind["named"].append(publish(named.items))
        publish(lambda: model)
        for _ in range(args.repeats):
            loops.append(_loop_s(targets, list(named.values())))
            by_kind["module"].append(publish(lambda: model))
        del targets
        loop_s = statistics.median(loops)
        offload_s = {kind: statistics.median(took[0] for took in all_took) for kind, all_took in by_kind.items()}
        if "offload_100k" in args.rows:
            rows.append(
                _row(
                    "offload_100k", max(offload_s.values()) / loop_s, args,
                    {
                        "num_tensors": len(named), "loop_s": round(loop_s, 4),
                        "seconds": {kind: round(took, 4) for kind, took in offload_s.items()},
                        "cpu_s": {
                            kind: round(statistics.median(took[1] for took in all_took), 4)
                            for kind, all_took in by_kind.items()
                        },
                        "first_s": round(first[0], 3), "first_published_after_s": round(first[2], 3),
                        "first_named_s": round(first_named[0], 3),
                    },
                )
            )  # fmt: skip
        if "proof_100k" in args.rows:
            proofs = [phase.end_s - phase.start_s for phase in manager.recorder.drain() if phase.name == "prove"]
            published = [took[2] for all_took in by_kind.values() for took in all_took]
            rows.append(
                _row(
                    "proof_100k", statistics.median(proofs), args,
                    {"num_proofs": len(proofs), "published_after_s": round(statistics.median(published), 3)},
                )
            )  # fmt: skip
        if {"pull_100k", "manifest_100k"} & args.rows:
            rows += _pull(manager, model, lambda: publish(lambda: model), args)
    return rows


def manager_version(manager: WeightManager) -> int:
    """Number of the version that was offloaded last."""
    return manager._newest


def _loop_s(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    return time.perf_counter() - begin


def _pull(manager: WeightManager, model: torch.nn.Module, publish: Any, args: BenchArgs) -> Iterator[Row]:
    engines = {kind: copy.deepcopy(model) for kind in (Transport.TCP, Transport.SHM)}
    found: dict[Transport, list[tuple[float, float]]] = {}
    for kind, engine_model in engines.items():
        puller = Puller(manager.endpoint, "giant", mode="full", receiver_id=f"giant-{kind}", transport=kind)
        engine = EngineUpdate(EmbeddedEngine.of(ModuleWeightLoader(engine_model), engine_id=f"giant-{kind}"), "giant")
        found[kind] = []
        for _ in range(args.repeats + 1):
            publish()
            begin = time.perf_counter()
            with puller.pull(deadline=Deadline(_TIMEOUT_S)) as pulled:
                pulled_s = time.perf_counter() - begin
                report = engine.load(pulled, deadline=Deadline(_TIMEOUT_S))
            found[kind].append((time.perf_counter() - begin, pulled_s))
            assert report.unprovable is None, report
        puller.close()
        for one, other in zip(model.parameters(), engine_model.parameters(), strict=True):
            assert torch.equal(one, other)
    seconds = {kind: statistics.median(took for took, _ in all_took[1:]) for kind, all_took in found.items()}
    if "pull_100k" in args.rows:
        yield _row(
            "pull_100k", seconds[Transport.TCP], args,
            {
                "seconds": {kind: round(took, 3) for kind, took in seconds.items()},
                "pulled_s": {
                    kind: round(statistics.median(pulled_s for _, pulled_s in all_took[1:]), 3)
                    for kind, all_took in found.items()
                },
                "first_s": {kind: round(all_took[0][0], 3) for kind, all_took in found.items()},
            },
        )  # fmt: skip
    if "manifest_100k" in args.rows:
        num_tensors = sum(1 for _ in model.parameters())
        first_bytes, bytes_after = _said_bytes(manager)
        yield _row(
            "manifest_100k", bytes_after / num_tensors, args,
            {"first_bytes_a_tensor": round(first_bytes / num_tensors, 1), "num_tensors": num_tensors},
        )  # fmt: skip


def _said_bytes(manager: WeightManager) -> tuple[int, int]:
    """Bytes of two answers to a request for the newest version: to one who holds no layout, and to one who does."""
    client = AgentClient(manager.endpoint)
    client.register(RegisterRequest(receiver_id="counts"))
    sizes: list[int] = []
    held: tuple[str, ...] = ()
    for _ in range(2):
        asked = TransferRequest(receiver_id="counts", model_id="giant", layouts=held)
        body = client.answer(
            "POST", "/request_transfer", content=encode(asked), deadline=Deadline(60.0),
            limit_bytes=MAX_PUBLICATION_BYTES,
        ).body  # fmt: skip
        sizes.append(len(body))
        said = decode(body, GrantMessage, what="a grant")
        assert said.head is not None
        held = (said.head.layout,)
        client.finish_transfer(FinishRequest(transfer_id=said.transfer_id, ok=False))
    client.close()
    return sizes[0], sizes[1]


def _row(name: str, ratio: float, args: BenchArgs, detail: dict[str, Any]) -> Row:
    return Row(row=name, ratio=ratio, target=_TARGETS[name], detail={**facts(args), **detail})
