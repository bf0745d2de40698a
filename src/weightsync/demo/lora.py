"""`weightsync demo --lora`: trains an adapter here, and an engine in another process serves each version of it.

The base goes once, as a model of its own; every version of the adapter is bound to it. The loss of what the engine
serves is the trainer's own, version after version.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import torch
from rich.console import Console

import weightsync
from weightsync.clients.host import RolloutClient
from weightsync.demo.data import PROMPT, ByteText
from weightsync.demo.lora_engine import ADAPTER_ID, BASE_ID, adapted
from weightsync.demo.model import TrainLoop, build_model, held_out_loss, model_size, save_byte_tokenizer
from weightsync.demo.processes import Processes
from weightsync.demo.sglang_engine import SERVED
from weightsync.demo.trainer import DemoOptions
from weightsync.extract.peft import base_extractor
from weightsync.types.service import NotifyRequest, RegisterSenderRequest

_SERVERS = {"vllm": "weightsync.demo.lora_vllm", "sglang": "weightsync.demo.lora_sglang"}
_LOSS_GAP = 1e-5
"""Both compute the same sums of the same bytes; the order of sums is one machine's."""
_VLLM_GAP = 0.02
"""vLLM sums in bfloat16 in another order than PEFT; SGLang on a CPU in float32."""


def run_lora(options: DemoOptions) -> list[str]:
    """Runs the demo to its end.

    Returns:
        Problems, in words; empty where the engine has proved every version of base and adapter and served it.

    Raises:
        MissingDependencyError: the engine is not installed. Nothing was started.
        WeightSyncError: a process failed or the time ran out. No process is left behind.
    """
    if options.engine in _SERVERS:
        SERVED[options.engine].server.check()
    out = Console(highlight=False, soft_wrap=True, markup=False)
    torch.set_num_threads(1)
    text, size = ByteText(), model_size(options.size)
    with Processes(step_timeout_s=options.step_timeout_s, say=out.print) as processes:
        if options.engine == "embedded":
            processes.start("engine-0", "weightsync.demo.lora_engine", size=options.size, rank=options.rank)
        base = build_model(options.size)
        base_loop = TrainLoop(base, text, size, rank=0)
        for step in range(2):
            base_loop.step(step)
        for parameter in base.parameters():  # an adapter's base is what its engine computes with
            parameter.data = parameter.data.to(torch.bfloat16)
        if options.engine in _SERVERS:
            folder = processes.folder / "base"
            base.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
            save_byte_tokenizer(folder)
            out.print(f"starting a server of {SERVED[options.engine].server.name} on the base (about a minute)")
            processes.start("engine-0", _SERVERS[options.engine], size=options.size, model=folder)
        model = adapted(base, options.rank)
        held_out = text.held_out(row_length=size.row_length)
        _, message = processes.next("the engine")
        with contextlib.ExitStack() as opened:
            kind = _Pull if options.engine in _SERVERS or options.path == "pull" else _Push
            move = kind(model, message, processes.token, options, opened)
            loop, rows, problems = TrainLoop(model, text, size, rank=0), [], []
            out.print(f"{'version':>7} {'trainer':>8} {'engine':>8} {'adapter':>9} {'sync':>7} {'paused':>7}  proof")
            for step in range(options.steps):
                loop.step(step)
                row = move.adapter(step + 1)
                row["trainer_loss"] = held_out_loss(model, held_out)
                stdin = processes.running["engine-0"].stdin
                assert stdin is not None
                stdin.write(f"{step + 1}\n")
                stdin.flush()
                _, report = processes.next("the engine's report")
                row |= {"engine_loss": report["loss"], "version": report["version"], "sample": report["sample"]}
                rows.append(row)
                problems += _wrong(row, report, step + 1, gap=_LOSS_GAP if options.engine == "embedded" else _VLLM_GAP)
                out.print(_line(row))
        out.print(f"one base, {move.base_bytes / 1e6:.2f} MB; served on {report['base']}")
        if options.json is not None:
            options.json.write_bytes(msgspec.json.encode({"rows": rows, "problems": problems}))
    out.print("every version was proved and served" if not problems else "\n".join(problems))
    return problems


class _Push:
    """The trainer brings both into the engine."""

    def __init__(
        self, model: Any, message: dict[str, Any], token: str, options: DemoOptions, opened: contextlib.ExitStack
    ) -> None:
        def pushed(weights: Any, model_id: str, **settings: Any) -> Any:
            return opened.enter_context(
                weightsync.push(weights, message["urls"][model_id], model_id=model_id, token=token, **settings)
            )

        first = base_extractor(model)
        self.base_bytes = first.metadata().total_bytes
        pushed(first, BASE_ID, dtype="keep").step()
        self._adapter = pushed(model, ADAPTER_ID)

    def adapter(self, number: int) -> dict[str, Any]:
        report = self._adapter.step(number)
        return {
            "bytes": report.sent_bytes, "sync_s": report.seconds, "paused_s": report.paused_s,
            "proved": bool(report.digests_equal),
        }  # fmt: skip


class _Pull:
    """The trainer publishes both, and the engine's service fetches them. A server's base is the checkpoint that it was
    started with: its adapter is bound to the digest of that, and is published alone."""

    def __init__(
        self, model: Any, message: dict[str, Any], token: str, options: DemoOptions, opened: contextlib.ExitStack
    ) -> None:
        first = base_extractor(model)
        self.base_bytes = first.metadata().total_bytes
        self._timeout_s = options.step_timeout_s
        self._client = opened.enter_context(contextlib.closing(RolloutClient(message["service_url"], token=token)))

        def published(weights: Any, model_id: str, **settings: Any) -> Any:
            publisher = opened.enter_context(
                weightsync.publish(weights, model_id, port=0, token=token, last_wait_s=0, **settings)
            )
            self._client.register_sender(RegisterSenderRequest(model_id=model_id, sender_endpoint=publisher.endpoint))
            return publisher

        if options.engine in _SERVERS:
            self._adapter = published(model, ADAPTER_ID, canary=list(PROMPT.encode()))
        else:
            base = published(first, BASE_ID, dtype="keep")
            self._adapter = published(model, ADAPTER_ID, base=base)
            self._follow(BASE_ID, base)

    def adapter(self, number: int) -> dict[str, Any]:
        began_s = time.monotonic()
        status = self._follow(ADAPTER_ID, self._adapter)
        return {
            "bytes": status.total_bytes, "sync_s": time.monotonic() - began_s, "paused_s": status.paused_s or 0.0,
            "proved": not status.unprovable,
        }  # fmt: skip

    def _follow(self, model_id: str, publisher: Any) -> Any:
        report = publisher.step()
        request = NotifyRequest(
            model_id=model_id, version=report.version.number, run_id=report.version.run_id,
            sender_endpoint=publisher.endpoint, wait_s=self._timeout_s,
        )  # fmt: skip
        return self._client.notify_version(request, timeout_s=self._timeout_s + 10.0)


def _wrong(row: dict[str, Any], report: dict[str, Any], number: int, *, gap: float) -> list[str]:
    found = []
    if report["version"] != number:
        found.append(f"version {number}: the engine serves {report['version']}")
    if not row["proved"]:
        found.append(f"version {number}: not proved")
    if abs(row["trainer_loss"] - row["engine_loss"]) > gap:
        found.append(f"version {number}: losses are {row['trainer_loss']:.6f} and {row['engine_loss']:.6f}")
    if report["num_refused"]:
        found.append(f"version {number}: {report['num_refused']} generations were refused")
    return found


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['version']:>7} {row['trainer_loss']:>8.4f} {row['engine_loss']:>8.4f} {row['bytes'] / 1e3:>6.1f} kB "
        f"{1e3 * row['sync_s']:>4.0f} ms {1e3 * row['paused_s']:>4.0f} ms  {'equal' if row['proved'] else 'none'}"
    )
