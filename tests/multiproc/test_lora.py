"""Adapters between processes: a trainer of PEFT, hosts that pull or are pushed to, kills, trainers of several
ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import weightsync
from tests.multiproc.pull_kit import shm_of, wait_until
from tests.multiproc.spine import TOKEN
from tests.multiproc.trainers import deepspeed_engine
from tests.standins.lora import adapter_parameters, base_model, logits, peft_model, step
from tests.standins.processes import Child, RankPool, children, free_port, preload, run_ranks
from weightsync.codec import whole
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.load.merged import MergedAdapterLoader
from weightsync.load.peft import PeftAdapterLoader
from weightsync.peft_model import adapter_tensors
from weightsync.tensors import byte_array
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Version
from weightsync.verbs.lora import digest_over_ranks

preload("peft", "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2")
MAKE: dict[str, Any] = {"kind": "qwen2", "rank": 64, "use_rslora": True, "alpha_pattern": {".*q_proj": 3}}
SMALL: dict[str, Any] = {"kind": "llama", "rank": 8}
_LONG_S = 60.0


def bits_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: byte_array(tensor.detach().contiguous()).tobytes() for name, tensor in tensors.items()}


def trainer_main(port: int, run_id: str, conn: Any) -> None:
    torch.set_num_threads(1)
    model = peft_model(**MAKE)
    with weightsync.publish(model, "lora", port=port, token=TOKEN, run_id=run_id, last_wait_s=0) as publisher:
        conn.send(publisher.endpoint)
        while (number := conn.recv()) is not None:
            step(model, number)
            assert publisher.step().published
            conn.send(logits(model))
    conn.send(shm_of(os.getpid()))


def host_main(sources: list[str], kind: str, conn: Any) -> None:
    """A service with the adapter in place, merged, or on another base; over TCP, as from another host."""
    torch.set_num_threads(1)
    model = base_model(MAKE["kind"]) if kind == "merged" else peft_model(**MAKE, seed=8 if kind == "wrong" else 7)
    loader = MergedAdapterLoader(model) if kind == "merged" else PeftAdapterLoader(model)
    options: dict[str, Any] = {"transport": "tcp", "port": 0, "token": TOKEN}
    with weightsync.serve({"lora": loader}, sources=sources, **options) as service:
        conn.send(service.url)
        while conn.recv() is not None:
            with service.generation("lora") as version:
                status = service.model_status("lora")
                conn.send((version, logits(model), status))


def asked(host: Child) -> Any:
    host.conn.send("what do you serve?")
    return host.recv()


def stepped(trainer: Child, number: int) -> torch.Tensor:
    trainer.conn.send(number)
    return trainer.recv()  # type: ignore[no-any-return]


def serves(host: Child, run_id: str, number: int) -> Any:
    version, found, status = asked(host)
    if version is None or (version.run_id, version.number) != (run_id, number):
        return None
    return (found, status) if (status.run_id, status.version) == (run_id, number) else None  # said after the commit


def test_hosts_serve_what_peft_computes_and_a_killed_trainer_comes_back() -> None:
    """In place to the bit, merged within the rounding of another order of sums; 1,000 times nearer than the version
    before. The wrong base takes nothing and says why."""
    port = free_port()
    source = [f"http://127.0.0.1:{port}"]
    with children() as start:
        trainer = start(trainer_main, port, "one", talk=True, name="trainer")
        hosts = {kind: start(host_main, source, kind, talk=True, name=kind) for kind in ("place", "merged", "wrong")}
        for child in (trainer, *hosts.values()):
            child.recv()
        before = torch.zeros(())
        for run_id, number in (("one", 1), ("one", 2), ("two", 1)):
            if run_id == "two":
                trainer.kill()
                trainer = start(trainer_main, port, "two", talk=True, name="trainer again")
                trainer.recv()
            trained = stepped(trainer, 10 * number + len(run_id) + ord(run_id[0]))
            for kind in ("place", "merged"):
                found, status = wait_until(
                    lambda kind=kind, who=(run_id, number): serves(hosts[kind], *who),
                    f"{kind} {run_id}/{number}",
                    _LONG_S,
                )
                off = (found - trained).abs().max()
                assert off == 0 if kind == "place" else off < 1e-3 * (before - trained).abs().max()
                assert (status.artifact, status.errors) == ("lora", {})
                assert status.received_bytes <= 1.02 * status.total_bytes
                assert bool(status.unprovable) == (kind == "merged")
            before = trained
        version, _, status = asked(hosts["wrong"])
        assert version is None
        refused = wait_until(lambda: asked(hosts["wrong"])[2].errors, "the wrong base's refusal", _LONG_S)
        assert any("trained on base wsd2:" in why for why in refused.values()), status
        trainer.conn.send(None)
        assert trainer.recv() == []


def engine_main(port: int, conn: Any) -> None:
    """An engine behind HTTP, of a PEFT model."""
    torch.set_num_threads(1)
    model = peft_model(**SMALL)
    engine = EmbeddedEngine.of(PeftAdapterLoader(model))
    conn.send(EngineServer(engine, port=port, token=TOKEN).start())
    while conn.recv() is not None:
        with engine.generation() as version:
            conn.send((version and version.number, bits_of(adapter_tensors(model, "default"))))
    os._exit(0)


def test_an_engine_that_dies_in_a_push_gets_the_next_version() -> None:
    port = free_port()
    model = peft_model(**SMALL)
    with children() as start:
        engine = start(engine_main, port, talk=True, name="engine")
        url = engine.recv()
        with weightsync.push(model, [url], token=TOKEN, model_id="lora") as push:
            step(model, 1)
            report = push.step()
            assert report is not None
            assert report.digests_equal
            assert report.sent_bytes == report.total_bytes == sum(t.nbytes for _, t in adapter_parameters(model))
            engine.kill()
            with contextlib.suppress(weightsync.WeightSyncError):
                push.step()
            engine = start(engine_main, port, talk=True, name="engine again")
            engine.recv()
            step(model, 2)

            def pushed() -> bool:
                with contextlib.suppress(weightsync.WeightSyncError):
                    return push.step() is not None
                return False

            wait_until(pushed, "a push into the new engine", _LONG_S)
            engine.conn.send("what do you serve?")
            _, found = engine.recv()
            assert found == bits_of(adapter_tensors(model, "default"))
            engine.conn.send(None)


# --- several training ranks ---


def sharded(rank: int, backend: str) -> Any:
    model = peft_model(**SMALL)
    if backend == "deepspeed":
        return deepspeed_engine(model, rank, stage=3, stage3_param_persistence_threshold=20)
    from torch.distributed.fsdp import fully_shard

    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def change(model: Any, number: int) -> None:
    """Sets the adapter: by DeepSpeed's own context where it has it."""
    if not hasattr(model, "module"):
        step(model, number)
        return
    import deepspeed

    for index, (_, parameter) in enumerate(adapter_parameters(model.module)):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            made = torch.Generator().manual_seed(1000 * number + index)
            parameter.data.copy_(0.2 * torch.randn(tuple(parameter.shape), generator=made))


def local_bits(model: Any) -> dict[str, bytes]:
    """What this rank holds of every parameter."""
    held = {name: getattr(p, "ds_tensor", p) for name, p in model.named_parameters()}
    return bits_of({name: t.to_local() if hasattr(t, "to_local") else t for name, t in held.items()})


def publish_from_ranks(rank: int, world_size: int, backend: str, port: int) -> dict[str, Any]:
    model = sharded(rank, backend)
    truth, here, plain = peft_model(**SMALL), peft_model(**SMALL), base_model(SMALL["kind"])
    seen: dict[str, Any] = {}
    with weightsync.push(model, here if rank == 0 else None, model_id="lora") as push:
        for number in (1, 2):
            change(model, number)
            step(truth, number)
            before = local_bits(model)
            report = push.step()
            assert local_bits(model) == before
        if rank == 0:
            assert report is not None
            seen["pushed"] = torch.equal(logits(here), logits(truth)) and report.digests_equal
    before = local_bits(model)
    with weightsync.push(model, plain if rank == 0 else None, merge=True, dtype="keep") as push:
        push.step()
    seen["untouched"] = local_bits(model) == before
    if rank == 0:
        want = peft_model(**SMALL)
        step(want, 2)
        want = want.merge_and_unload().state_dict()
        seen["merged"] = all(torch.equal(tensor, want[name]) for name, tensor in plain.state_dict().items())
    with contextlib.ExitStack() as opened:
        publisher = opened.enter_context(weightsync.publish(model, "lora", port=port, last_wait_s=20))
        if rank == 0:
            service = weightsync.serve({"lora": here}, sources=[publisher.endpoint], port=0)
            opened.enter_context(service)
        change(model, 3)
        step(truth, 3)
        seen["path"] = publisher.step().path
        if rank == 0:
            wait_until(lambda: service.model_status("lora").version == 1, "version 1", _LONG_S)
            seen["pulled"] = torch.equal(logits(here), logits(truth))
    return seen


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_sharded_trainers_publish_push_and_merge(backend: str) -> None:
    with children() as start:
        first, second = RankPool(start, 2).run(publish_from_ranks, backend, free_port(), timeout_s=150)
    path = "gather" if backend == "deepspeed" else "shards"
    assert first == {"pushed": True, "untouched": True, "merged": True, "path": path, "pulled": True}
    assert second == {"untouched": True, "path": path}


class _Gathering(FSDPWeightExtractor):
    """As if a placement had no local form."""

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return False


def _one_can_not_sum_the_base(rank: int, world_size: int) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]))
    ranks, said, seen = TrainingRanks(timeout_s=10), [], []
    of_shards = digest_over_ranks(FSDPWeightExtractor(model), None, ranks, timeout_s=10)

    def no_room(*args: Any, **options: Any) -> Any:
        seen.append(1)
        if rank == 0 and len(seen) == 2:
            raise MemoryError("no room for the digest")
        return real(*args, **options)

    real, whole.shard_sums = whole.shard_sums, no_room
    for _ in range(2):
        try:
            digest = digest_over_ranks(_Gathering(model, chunk_bytes=100), None, ranks, timeout_s=10)
            said.append("the shards' digest" if digest == of_shards else digest)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    ranks.close()
    return said


def test_a_rank_that_can_not_sum_the_gathered_base_tells_all_ranks() -> None:
    """Seen red: it left, and the others waited for it in a collective of the trainer's own group."""
    first, second = run_ranks(_one_can_not_sum_the_base, 2, timeout_s=60)
    for failed, digest in (first, second):
        assert failed.startswith("ExtractError: the base's digest can't be computed: MemoryError: no room")
        assert digest == "the shards' digest"
    assert "told by training rank 0" in second[0]


class _Base:
    """A publisher of a base, which has published on rank 0 alone."""

    def __init__(self, rank: int) -> None:
        self.version = Version(run_id="base", number=1) if rank == 0 else None
        self.model_id = "base"


def _one_can_not_step(rank: int, world_size: int) -> list[str]:
    model, said = peft_model(**SMALL), []

    def no_memory(*_: object) -> None:
        raise MemoryError("no room for the forward pass")

    with weightsync.publish(model, "lora", token=TOKEN, port=0, last_wait_s=0, canary=[1, 2, 3]) as publisher:
        hook = model.register_forward_pre_hook(no_memory) if rank == 1 else None
        for _ in range(2):
            try:
                said.append(f"version {publisher.step().version.number}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            if hook is not None:
                hook.remove()
    with weightsync.push(model, peft_model(**SMALL) if rank == 0 else None, base=_Base(rank)) as push:
        try:
            push.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_rank_that_can_not_ask_its_model_or_has_no_base_tells_all_ranks() -> None:
    """Seen red: it left the step, untyped, and the others waited for it and took it for one that is gone."""
    for canary, version, base in run_ranks(_one_can_not_step, 2):
        assert canary.startswith("ExtractError: the canary's forward pass failed: MemoryError: no room")
        assert version == "version 1"
        assert base.startswith("ConfigError: the base's publisher has published nothing yet")


def test_a_pulled_adapter_is_a_folder_that_peft_loads(tmp_path: Path) -> None:
    """By the command, with its configuration beside it."""
    from typer.testing import CliRunner

    from weightsync.cli import app

    model = peft_model(**SMALL)
    with weightsync.publish(model, "lora", port=0, last_wait_s=0) as publisher:
        publisher.step()
        told = CliRunner().invoke(app, ["pull", publisher.endpoint, "--out", str(tmp_path)])
        assert told.exit_code == 0, told.output
        shown = CliRunner().invoke(app, ["inspect", publisher.endpoint])
        assert "artifact: lora" in shown.output, shown.output
        assert "adapter: rank 8" in shown.output
        assert "base: base wsd2:" in shown.output
    found = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert "adapter: rank 8" in found.output, found.output
    again = peft.PeftModel.from_pretrained(base_model(SMALL["kind"]), str(tmp_path)).eval()
    assert torch.equal(logits(again), logits(model))
