"""verl's own test of its checkpoint engines, with our backend's name put in.

Run in verl's environment as `python tests/adapters/verl_own_job.py CHECKOUT FOLDER`, where CHECKOUT is verl's source.
Of its test nothing is changed but what asks for a GPU and for a model of 8 billion parameters: pools of CPUs, a tiny
model in FOLDER, `weightsync` where it says `nccl`. It writes "done" at its end.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODULE, PLATFORM = "weightsync.adapters.verl", "verl_cpu"
HERE = str(Path(__file__).parent)
NUM_RANKS, NUM_WORKERS = 2, 2


def save_model(folder: Path) -> None:
    """A checkpoint that verl's workers load."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{index}": index for index in range(512)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    made.eos_token = made.pad_token = made.unk_token = "w0"
    made.save_pretrained(folder)


def run(checkout: Path, folder: Path) -> None:
    """verl's test, from its file."""
    sys.path.insert(0, str(checkout))
    from tests.checkpoint_engine import test_correctness_on_gpu as theirs
    from tests.checkpoint_engine import test_utils as its_workers

    engine_config = its_workers.FSDPEngineConfig
    pool, config, init = theirs.RayResourcePool, theirs.CheckpointEngineConfig, ray.init

    def config_of(*, backend: str, engine_kwargs: dict[str, Any], **options: Any) -> Any:
        assert backend == "nccl"
        assert set(engine_kwargs) == {"nccl"}
        ours = {"weightsync": {"host": "127.0.0.1"}}
        return config(backend="weightsync", custom_backend_module=MODULE, engine_kwargs=ours, **options)

    def init_ray(**_: Any) -> Any:
        paths = os.pathsep.join(filter(None, [str(checkout), HERE, os.environ.get("PYTHONPATH")]))
        variables = {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_MODULES": PLATFORM}
        return init(num_cpus=16, include_dashboard=False, runtime_env={"env_vars": variables})

    theirs.CheckpointEngineConfig = config_of
    theirs.RayResourcePool = functools.partial(pool, use_gpu=False)
    theirs.HFModelConfig = functools.partial(theirs.HFModelConfig, override_config={"attn_implementation": "eager"})
    theirs.ray.init = init_ray
    its_workers.FSDPEngineConfig = lambda **options: engine_config(**{**options, "strategy": "fsdp2"})
    test = theirs.test_nccl_checkpoint_engine
    options: dict[str, Any] = {"num_trainer": NUM_RANKS, "num_rollout": NUM_WORKERS, "model_path": str(folder)}
    options |= {name: False for name in ("rebuild_group", "multi_sender") if name in inspect.signature(test).parameters}
    test(num_gpus_per_node=NUM_RANKS + NUM_WORKERS, **options)


if __name__ == "__main__":
    importlib.import_module(PLATFORM)
    where = Path(sys.argv[2])
    save_model(where)
    run(Path(sys.argv[1]).resolve(), where)
    sys.stdout.write("done\n")
