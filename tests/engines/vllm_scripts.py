"""What tests run in an interpreter of its own; `vllm_support.run_script` starts it and reads the last line."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.engines.vllm_support import (
    ORACLE_FILE,
    RESULT,
    build_model,
    llm_logprobs,
    llm_next_token,
    llm_options,
    train_step,
)


def oracle(prompts: list[list[int]], long_prompt: list[int], tp: int) -> None:
    """Says in `ORACLE_FILE` of each checkpoint that a line of standard input names what a fresh engine answers."""
    from pathlib import Path

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # starts in a quarter of the time
    from vllm import LLM

    collect: Any = lambda *_: 0  # noqa: E731
    gc.collect = collect  # vLLM asks for three an engine, 0.4 s each; what stays of an engine is small
    for line in sys.stdin:
        checkpoint = Path(line.rstrip("\n"))
        llm = LLM(**llm_options(checkpoint, tp))
        told = {"prompts": llm_logprobs(llm, prompts), "next": llm_next_token(llm, long_prompt)}
        llm.llm_engine.engine_core.shutdown()
        fresh = checkpoint / f"{ORACLE_FILE}.new"
        fresh.write_text(json.dumps(told), encoding="utf-8")
        fresh.rename(checkpoint / ORACLE_FILE)


def offline(checkpoints: list[str], folder: str, tp: int) -> dict[str, Any]:
    """An offline `LLM`, and a trainer beside it in the same process. The model's output layer is its embedding.

    The engine starts from the checkpoint of step 1, so what it says at first is a fresh engine's answer. Then step 2 is
    synced and step 1 again, with failures in between that hit one worker alone.
    """
    from pathlib import Path

    import torch
    from vllm import LLM

    from tests.engines.vllm_faults import arm, armed
    from tests.multiproc.spine import error_facts
    from weightsync.errors import WeightSyncError
    from weightsync.extract.module import ModuleWeightExtractor
    from weightsync.handles.vllm import OfflineVllmApi, VllmEngine
    from weightsync.trainer.push import PushSync

    llm = LLM(**llm_options(checkpoints[1], tp, weight_transfer_config={"backend": "weightsync"}))
    torch.set_num_threads(1)
    told: dict[str, Any] = {"fresh": llm_logprobs(llm), "faults": []}
    model, version = build_model(tied=True), 0
    extractor: Any = ModuleWeightExtractor(model, chunk_bytes=20_000)
    extract, api = extractor.extract_weights, OfflineVllmApi(llm)
    push = PushSync(
        extractor,
        VllmEngine(api, engine_id="vllm"),
        dtype="bfloat16",
        transfer_timeout_s=20.0,
        join_timeout_s=15.0,
        pause_timeout_s=5.0,
    )

    def sync(steps: int) -> dict[str, Any]:
        nonlocal version
        version += 1
        model.load_state_dict(build_model(tied=True).state_dict())
        for step in range(1, steps + 1):
            train_step(model, step)
        try:
            report = push.sync_weights(version)
        except WeightSyncError as error:
            return error_facts(error)
        return {"type": "ok", "version": str(report.version), "weight_version": llm.get_weight_version()}

    push.initialize()
    told["first"] = sync(2)
    told["other"] = llm_logprobs(llm)
    told["second"] = sync(1)
    told["same"] = llm_logprobs(llm)
    for worker in range(tp):
        for fault in ({"at": "load", "chunk": 3}, {"at": "receive", "do": "corrupt"}, {"at": "commit"}):
            arm(Path(folder), {"do": "raise", "worker": worker, **fault})
            failed = sync(2)
            fired = not armed(Path(folder))
            told["faults"].append({"fault": fault, "worker": worker, "fired": fired, "failed": failed, "next": sync(1)})
    told["strangers"] = []
    for call in (
        lambda: llm.init_weight_transfer_engine({"init_info": {"master_address": "192.0.2.1", "world_size": 2}}),
        lambda: (llm.start_weight_update(), llm.finish_weight_update()),
    ):
        strange: dict[str, str] = {}

        def meddled(dtype: Any, call: Callable[[], Any] = call, strange: dict[str, str] = strange) -> Any:
            for number, chunk in enumerate(extract(dtype)):
                if number == 3:
                    try:
                        with api.lock:
                            call()
                        strange["told"] = "ok"
                    except Exception as error:
                        strange["told"] = str(error)
                yield chunk

        extractor.extract_weights = meddled
        during = sync(2)
        extractor.extract_weights = extract
        told["strangers"].append({**strange, "during": during, "after": [sync(2), sync(1)]})
    told["last"] = llm_logprobs(llm)
    llm.llm_engine.engine_core.shutdown()
    return told


def documents(checkpoint: str) -> dict[str, Any]:
    """The interface design's actors: a trainer, and an engine whose worker is a real vLLM's, in this process.

    The engine starts from the checkpoint of step 2, so what it says at first is a fresh engine's answer.
    """
    import asyncio
    from types import SimpleNamespace

    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from tests.documents.kit import config
    from tests.documents.test_document_1 import Inference
    from weightsync.adapters.compat.skyrl import (
        BroadcastTransferStrategy,
        FSDPWeightExtractor,
        InferenceEngineClient,
        VLLMWeightLoader,
    )

    llm = LLM(**llm_options(checkpoint))
    torch.set_num_threads(1)
    told: dict[str, Any] = {"fresh": llm_logprobs(llm), "synced": []}
    engine = SimpleNamespace(worker=llm.llm_engine.model_executor.driver_worker.worker)
    actor = Inference(engine, lambda wrapped: VLLMWeightLoader(wrapped.model))
    model = build_model()

    async def job() -> None:
        client, strategy = InferenceEngineClient([actor]), BroadcastTransferStrategy()
        sync_info = await strategy.create_sync_info(config(), client)
        sender = await strategy.create_sender(config(), client, sync_info)
        await actor.initialize_weight_sync(strategy, config(), sync_info, 1)
        for step in (1, 2):
            train_step(model, step)
            chunks = FSDPWeightExtractor(config()).extract_weights(model, torch.bfloat16)
            await sender.send_chunks(chunks, client)
            llm.reset_prefix_cache()
            told["synced"].append(llm_logprobs(llm))
        await sender.close()

    asyncio.run(job())
    llm.llm_engine.engine_core.shutdown()
    return told


def families(folder: str) -> None:
    """See `vllm_families.families`."""
    from tests.engines import vllm_families

    vllm_families.families(folder)


SCRIPTS: dict[str, Callable[..., Any]] = {
    "oracle": oracle,
    "offline": offline,
    "documents": documents,
    "families": families,
}


def main() -> None:
    """Runs one script and leaves at once: engines that are torn down at exit can hang."""
    result = SCRIPTS[sys.argv[1]](*json.loads(sys.argv[2]))
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
