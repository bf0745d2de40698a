"""How long does a running vLLM stand still for a delta, and how long for its own reload? Row `live_pause`.

An offline vLLM on the CPU, with a bf16 Qwen3 of random weights in `SIZES`, linear weights left as they were loaded (as
on a GPU; the CPU build packs them by default). Everything runs in one process for each size, in turns:

  delta    changed elements in `DENSITIES`, to and fro, as a pull leaves them, by `EngineUpdate` over `VllmEngine`. The
           pause is what its phases say: from the call that pauses vLLM to the end of the one that resumes it.
  full     the same for a whole version of which every element differs; it is copied to where it is live.
  same     the same for a whole version that is live already: what of a pause does not depend on the change.
  reload   vLLM's own `reload_weights`, from a checkpoint in /dev/shm.
  patches  vLLM's own `load_checkpoint_weight_patches`, of the same elements.

The row is the delta's pause at 1 % of the largest model, over vLLM's reload of it. `detail` has all of them. vLLM
starts three times: some three minutes. `python -m bench.live_pause --plot docs/live-pause.png` draws it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.harness import RESULTS, BenchArgs, Memcpy, Row, facts
from bench.staged import StagedVersions

if importlib.util.find_spec("vllm") is None:
    raise ImportError("vLLM is not installed: make engines")

ROWS = {"live_pause": "pause of a vLLM with at least 300 M parameters for a 1 % delta, over vLLM's own reload"}
SIZES = (5, 11, 22)
"""Layers, of 13.6 M parameters each; 16.8 M besides."""
DENSITIES = (0.001, 0.01, 0.1)
_TARGET = 0.05
_ROW_DENSITY = 0.01
_TIMEOUT_S = 120.0
_VOCAB, _HIDDEN = 8192, 1024


def run(args: BenchArgs) -> list[Row]:
    """Measures the row; `--gib` does not matter."""
    found = [_in_child(num_layers, args.repeats) for num_layers in SIZES]
    largest = found[-1]
    pause = largest["delta_s"][str(_ROW_DENSITY)]
    return [
        Row(
            row="live_pause", ratio=pause / largest["reload_s"], target=_TARGET, detail={**facts(args), "models": found}
        )
    ]


def _in_child(num_layers: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weightsync-bench-") as folder:
        answer = Path(folder) / "answer.json"
        subprocess.run(
            (sys.executable, "-m", "bench.live_pause", "--measure", str(num_layers), str(repeats), folder),
            env={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "HF_HUB_OFFLINE": "1",
                "TORCH_COMPILE_DISABLE": "1",
            },
            check=True,
            stdout=sys.stderr,
        )
        told: dict[str, Any] = json.loads(answer.read_text())
        return told


def _measure(num_layers: int, repeats: int, folder: Path) -> dict[str, Any]:
    from vllm import LLM
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from weightsync.handles.vllm import OfflineVllmApi, VllmEngine
    from weightsync.host.engine_update import EngineUpdate
    from weightsync.types import Deadline

    _leave_unpacked()
    weights = _save_model(folder, num_layers)
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=256,
        weight_transfer_config={"backend": "weightsync"},
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    engine = EngineUpdate(VllmEngine(OfflineVllmApi(llm), engine_id="vllm"), "bench")
    flat = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
    memcpy = Memcpy(flat)
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Any) -> None:
        begin = time.perf_counter()
        function()
        times.setdefault(name, []).append(time.perf_counter() - begin)

    with StagedVersions(weights, DENSITIES) as versions:
        for turn in range(repeats + 1):
            if turn == 1:
                times.clear()
            timed("memcpy", memcpy)
            for name, version in (("full", versions.negated()), ("full", versions.whole()), ("same", versions.whole())):
                report = engine.load(version, deadline=Deadline(_TIMEOUT_S))
                assert report.unprovable is None, report.unprovable
                times.setdefault(name, []).append(report.paused_s)
            for density in DENSITIES:
                for back in (False, True):
                    report = engine.load(versions.changed(density, back=back), deadline=Deadline(_TIMEOUT_S))
                    assert report.patched
                    times.setdefault(f"delta {density}", []).append(report.paused_s)
            timed("reload", runner.reload_weights)
        for turn in range(repeats + 1):  # behind the deltas: the engine holds weights then that nobody published
            for density in DENSITIES:
                for back in (False, True):
                    patches = [
                        CheckpointWeightPatch(
                            name=name, shape=tuple(weights[name].shape), dtype=torch.bfloat16, values=values,
                            indices=where,
                        )
                        for name, where, values in versions.elements(density, back=back)
                    ]  # fmt: skip
                    if not turn:
                        load_checkpoint_weight_patches(runner.get_model(), patches)
                        continue
                    timed(f"patches {density}", lambda p=patches: load_checkpoint_weight_patches(runner.get_model(), p))
    seconds = {name: round(statistics.median(values), 5) for name, values in times.items()}
    return {
        "num_parameters": flat.numel(),
        "num_tensors": len(weights),
        "memcpy_s": seconds["memcpy"],
        "full_s": seconds["full"],
        "same_s": seconds["same"],
        "reload_s": seconds["reload"],
        "delta_s": {str(density): seconds[f"delta {density}"] for density in DENSITIES},
        "patches_s": {str(density): seconds[f"patches {density}"] for density in DENSITIES},
    }


def _leave_unpacked() -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    ops: Any = _custom_ops
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def _save_model(folder: Path, num_layers: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, intermediate_size=3 * _HIDDEN, num_hidden_layers=num_layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    torch.manual_seed(0)
    weights = {
        name: (torch.randn(each.shape, dtype=torch.bfloat16) * 0.02 + (each.dim() == 1))
        for name, each in model.named_parameters()
    }
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def _plot(path: Path, source: Path) -> None:
    """Draws what was measured: pause over changed elements, a line for each model; reloads beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["row"]: row for row in json.loads(source.read_text())}
    figure, axes = pyplot.subplots(figsize=(8.5, 4))
    for index, model in enumerate(rows["live_pause"]["detail"]["models"]):
        label, color = f"{model['num_parameters'] / 1e6:.0f} M", f"C{index}"
        for key, style, name in (("delta_s", "o-", "delta"), ("patches_s", "x:", "vLLM's patches")):
            changed = [float(density) * model["num_parameters"] for density in model[key]]
            axes.plot(changed, list(model[key].values()), style, color=color, label=f"{label}: {name}")
        axes.axhline(model["reload_s"], color=color, linestyle="--", linewidth=0.8, label=f"{label}: vLLM's reload")
    axes.set(xscale="log", yscale="log", xlabel="changed elements", ylabel="seconds")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=3, metavar=("LAYERS", "REPEATS", "FOLDER"), help="what `bench` calls")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw what was measured")
    parser.add_argument("--source", type=Path, default=RESULTS / "latest.json", help="what to draw")
    given = parser.parse_args()
    if given.measure:
        layers, repeats, folder = given.measure
        told = _measure(int(layers), int(repeats), Path(folder))
        (Path(folder) / "answer.json").write_text(json.dumps(told))
    elif given.plot:
        _plot(given.plot, given.source)


if __name__ == "__main__":
    _main()
