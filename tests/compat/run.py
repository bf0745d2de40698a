"""`make compat`: our tests against releases of vLLM, SGLang, TRL and verl, each in an environment of its own.

    python -m tests.compat.run [WHAT | WHAT==RELEASE ...]      vllm==0.28.0 sglang ...; without any: all there is
    python -m tests.compat.run --here [WHAT ...]               the releases in the environments that the Makefile makes

An environment is made under FOLDER, used, and removed again: each has 2 to 3 GB. What was seen is written into
`docs/versions.json` behind each release, so that a run that is ended has lost nothing; `docs/check.py` makes the tables
of it, and asks for a result of each release that the constraints name.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compat.kinds import KINDS, ROOT, Kind, install

RESULTS = ROOT / "docs" / "versions.json"
FOLDER = ROOT / ".venv-compat"
TESTS_S = 1500
_REASON_CHARS = 160


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"one of {', '.join(KINDS)}, or one release of it")
    parser.add_argument("--here", action="store_true", help="in the environments that are there; nothing is installed")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    asked = parser.parse_args()
    for name, release in wanted(asked.what, here=asked.here):
        found = tried(name, release, here=asked.here, keep=asked.keep)
        note(name, release, found)
        print(name, release, json.dumps(found), flush=True)  # noqa: T201


def wanted(words: Sequence[str], *, here: bool) -> list[tuple[str, str]]:
    """What is run, in turn."""
    found: list[tuple[str, str]] = []
    for word in words or tuple(KINDS):
        name, _, release = word.partition("==")
        if name not in KINDS:
            raise SystemExit(f"{name} is none of {', '.join(KINDS)}")
        kind = KINDS[name]
        if here:
            releases: Sequence[str] = list(versions_in(_python(ROOT / kind.own_environment), [kind.package]).values())
        else:
            releases = [release] if release else kind.releases
        found += [(name, each) for each in releases]
    return found


def note(name: str, release: str, found: dict[str, Any]) -> None:
    """Into the file of results."""
    seen = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    seen.setdefault(name, {})[release] = found
    RESULTS.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def tried(name: str, release: str, *, here: bool, keep: bool) -> dict[str, Any]:
    """What was seen of one release."""
    kind, began_s = KINDS[name], time.monotonic()
    folder = ROOT / kind.own_environment if here else FOLDER / f"{name}-{release}"
    try:
        if not here and (why := install(name, release, folder)) is not None:
            return {"installed": False, "why": _short(why)}
        results = _results(kind, _python(folder))
        return {
            "installed": True, "results": results, "seconds": round(time.monotonic() - began_s),
            "python": ".".join(map(str, sys.version_info[:2])), "with": versions_in(_python(folder), kind.beside),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }  # fmt: skip
    finally:
        if not here and not keep:
            shutil.rmtree(folder, ignore_errors=True)


def versions_in(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages in an environment."""
    asked = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {tuple(packages)!r}}}))"
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(told)
    return found


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _results(kind: Kind, python: Path) -> dict[str, str]:
    """ "passed" or why not, by what is tried. One server is started for all of it."""
    runs = python if kind.variable is None else Path(sys.executable)
    command = [str(runs), "-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-m", kind.marks]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "400"}
    if kind.variable is not None:
        env[kind.variable] = str(python)
    try:
        done = subprocess.run(
            [*command, *kind.tests.values()], cwd=ROOT, env=env, capture_output=True, text=True, timeout=TESTS_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return dict.fromkeys(kind.tests, f"not done in {TESTS_S} s")
    told = re.findall(r"^(PASSED|FAILED|ERROR) (\S+?)(?:\[[^ ]*\])?(?: - (.*))?$", done.stdout, re.MULTILINE)
    found: dict[str, str] = {}
    for what, test in kind.tests.items():
        mine = [(mark, why) for mark, name, why in told if name == test]
        wrong = [why for mark, why in mine if mark != "PASSED"]
        no_word = _skipped(done.stdout) or _short(done.stdout[-400:] or done.stderr)
        found[what] = _short(wrong[0]) if wrong else "passed" if mine else no_word
    return found


def _skipped(output: str) -> str | None:
    """Why a test was skipped, where one was: pytest says it by the file alone."""
    found = re.search(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)$", output, re.MULTILINE)
    return f"skipped: {found[1]}"[:_REASON_CHARS] if found else None


def _short(text: str) -> str:
    """One line of it, that stands in a table."""
    line = next((each for each in reversed(text.strip().splitlines()) if each.strip()), "no word of why")
    return line.strip().replace("|", "/").replace(str(ROOT), "")[:_REASON_CHARS]


if __name__ == "__main__":
    main()
