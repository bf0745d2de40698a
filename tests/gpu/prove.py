"""What `run.sh` runs: each part in a process of its own, a line a row as it comes, JSON at the end.

A part that fails, hangs or dies costs its own rows and no others. The exit status is 0 where every part proved what it
is for; ratios are reported and judge nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEEDED = (
    "torch", "numpy", "numba", "xxhash", "zstandard", "msgspec", "pydantic", "pydantic_core", "annotated_types",
    "typing_inspection", "yaml", "starlette", "anyio", "uvicorn", "h11", "click", "httpx", "httpcore",
    "prometheus_client", "rich", "typer", "zmq",
)  # fmt: skip
"""What the library imports, and what that imports: wheels come one by one here."""
DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq"}
PARTS = {
    "device": "this machine, and what a copy on the device and over the bus takes",
    "ipc": "cuda_ipc and packed_cuda_ipc between two processes: every bit, and the rate",
    "push": "a whole push from a model on the device into an engine on the device, digests proved",
    "extract": "extraction and packing of a model's tensors, after what its streams have queued",
    "offload": "offload into pinned shared memory, and what receivers get of it",
    "digest": "the shard-independent digest of tensors on the device",
    "changes": "the search for changes on the device: of a push, and of an agent's delta",
    "patch": "a patch of 1 % of the elements written in place, and undone",
    "fsdp": "FSDP2 with its shards offloaded to the host, one rank and two, pushed into an engine on the device",
}


def main() -> int:
    """Runs all parts, or one."""
    options = arguments()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(DISTRIBUTIONS.get(name, name).replace("_", "-") for name in missing)
        print(f"missing: {names}", file=sys.stderr)
        print(
            "on a machine with a network, in the checkout: python3 -m pip download --only-binary=:all: --no-deps "
            f"--python-version {sys.version_info.major}.{sys.version_info.minor} -d wheels {names}", file=sys.stderr
        )  # fmt: skip
        return 2
    if options.part is not None:
        return run_one(options)
    if options.device != "cpu" and not cuda_is_there():
        print("torch sees no GPU here; --device cpu is the dry run", file=sys.stderr)
        return 2
    began = time.monotonic()
    report: dict[str, Any] = {
        "device": options.device, "dry_run": options.device == "cpu", "mib": options.mib, "width": options.width,
        "parts": {}, "rows": [],
    }  # fmt: skip
    for part, what in PARTS.items():
        if options.only and part not in options.only:
            continue
        left_s = options.limit_s - (time.monotonic() - began)
        print(f"{part}: {what}", flush=True)
        found = in_a_process(part, options, min(left_s, options.part_limit_s))
        report["parts"][part] = {key: value for key, value in found.items() if key != "rows"}
        report["rows"] += found["rows"]
        for row in found["rows"]:
            print(f"  {row['row']:<28} {row['ratio']:8.3f}  {row['detail'].get('yardstick', '')}", flush=True)
        print(f"  {'proved' if found['ok'] else 'FAILED: ' + found['error']} ({found['seconds']:.0f} s)", flush=True)
    report["seconds"] = round(time.monotonic() - began, 1)
    Path(options.out).write_text(json.dumps(report, indent=2) + "\n")
    failed = [part for part, found in report["parts"].items() if not found["ok"]]
    print(
        f"{len(report['parts']) - len(failed)} parts proved, {len(failed)} failed, {report['seconds']} s: {options.out}"
    )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run (default: %(default)s)")
    parser.add_argument("--out", default="gpu-results.json", help="where the JSON goes (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--mib", type=int, help="size of the models (default: 4096 on a GPU, 4 in a dry run)")
    parser.add_argument("--width", type=int, help="of their square layers (default: 4096 on a GPU, 256 in a dry run)")
    parser.add_argument("--limit-s", type=float, default=460.0, help="of all parts (default: %(default)s)")
    parser.add_argument("--part-limit-s", type=float, default=120.0, help="of one part (default: %(default)s)")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.mib = options.mib or (4 if options.device == "cpu" else 4096)
    options.width = options.width or (256 if options.device == "cpu" else 4096)
    return options


def cuda_is_there() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def in_a_process(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Runs a part and says what became of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "tests.gpu.prove", "--part", part, "--device", options.device]
        command += ["--mib", str(options.mib), "--width", str(options.width), "--out", str(out)]
        if limit_s <= 0:
            return {"ok": False, "error": "no time was left for it", "seconds": 0.0, "rows": []}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, said = process.communicate(timeout=limit_s)
            error = said.strip()[-2000:] if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            error = f"it was not done after {limit_s:.0f} s"
        rows = json.loads(out.read_text()) if out.exists() else []
    seconds = round(time.monotonic() - began, 1)
    return {"ok": not error and process.returncode == 0, "error": error, "seconds": seconds, "rows": rows}


def run_one(options: argparse.Namespace) -> int:
    """One part, in this process."""
    from tests.gpu import parts_device, parts_fsdp, parts_ipc
    from tests.gpu.timing import Bench

    bench = Bench(options.device, num_bytes=options.mib << 20, width=options.width)
    (function,) = {
        getattr(each, f"prove_{options.part}") for each in (parts_device, parts_fsdp, parts_ipc)
        if hasattr(each, f"prove_{options.part}")
    }  # fmt: skip
    try:
        function(bench)
    finally:
        Path(options.out).write_text(json.dumps(bench.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
