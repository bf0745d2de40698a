"""Checks that the documentation is true of the tree it lies in; `--write` renews the generated tables.

What is checked in README, CONTRIBUTING, CHANGELOG, docs/ and design/: relative links and their anchors
resolve; fenced python blocks compile, and what they import from weightsync exists; generated tables are
what the code says now.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weightsync import _config_foreign as foreign
from weightsync import config as schema
from weightsync.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_QUOTE = "'"
_TABLE = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Prints what is wrong; 0 where nothing is."""
    wrong: list[str] = []
    for page in pages(ROOT):
        if "--write" in arguments:
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        wrong += [f"{page.relative_to(ROOT)}: {what}" for what in problems(page)]
    print("\n".join(wrong) if wrong else "docs: links resolve, examples compile, tables are current")
    return 1 if wrong else 0


def pages(root: Path) -> list[Path]:
    """Every page of the documentation."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("design/**/*.md")])


def problems(page: Path) -> Iterator[str]:
    """What is wrong with one page."""
    text = page.read_text(encoding="utf-8")
    for target in _LINK.findall(_FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = page.parent / path if path else page
        if not there.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and there.suffix == ".md" and anchor not in _anchors(there):
            yield f"the link {target} names no heading of that page"
    for placeholder in re.findall(r"\b(?:R_[A-Z]+|RESULTS_DATE)\b", text):
        yield f"the placeholder {placeholder} was never filled in"
    for language, block in _FENCE.findall(text):
        if language == "python":
            yield from _python_problems(block)
    for _, name, found, _ in _TABLE.findall(text):
        if name not in TABLES:
            yield f"no table is called {name}; choices are {', '.join(TABLES)}"
        elif found != TABLES[name]():
            yield f"the table {name} is out of date: run python docs/check.py --write"


def with_tables(text: str) -> str:
    """A page with its generated tables renewed."""
    return _TABLE.sub(
        lambda found: found[1] + (TABLES[found[2]]() if found[2] in TABLES else found[3]) + found[4], text
    )


def keys_table(prefix: str, section: type[BaseModel]) -> str:
    """The keys of a section with values, defaults and meanings."""
    rows = []
    for key, field in section.model_fields.items():
        if key in schema.SECTIONS:
            continue
        choices = ", ".join(f"`{choice.strip(_QUOTE)}`" for choice in schema.choices_of(field.annotation))
        words = schema.must_be(key, field.annotation)
        values = f"globs, each with one of {choices}" if key == "dtype_overrides" else choices
        rows.append(
            (f"`{prefix}{key}`", values if _is_choice(field) else words, _default(field), str(field.description))
        )
    return _markdown(("key", "values", "default", "meaning"), rows)


def strategy_table() -> str:
    """What `select_strategy` answers for every combination."""
    rows = []
    for backend, colocated, use_cuda_ipc in itertools.product(
        ("gloo", "nccl", "cuda_ipc"), (False, True), (False, True)
    ):
        common = {"backend": backend, "colocated": colocated, "use_cuda_ipc": use_cuda_ipc}
        answers = [
            _answer(common),
            _both(_answer({**common, "pack_weights": True}), _answer({**common, "training_backend": "megatron"})),
            *(_answer({**common, "strategy": name}) for name in ("broadcast", "cuda_ipc", "packed_cuda_ipc")),
        ]
        rows.append((f"`{backend}`", _yes(colocated), _yes(use_cuda_ipc), *answers))
    named = (f"named `{name}`" for name in ("broadcast", "cuda_ipc", "packed_cuda_ipc"))
    packed = "nothing named, `pack_weights` or `megatron`"
    return _markdown(("backend", "colocated", "use_cuda_ipc", "nothing named", packed, *named), rows)


def foreign_table() -> str:
    """The names of other frameworks and what they set."""
    notes = {
        "use_flashrl": "groups by module; without effect where `trainer.training_backend` is `megatron`",
        "weight_transfer_threshold_cuda_ipc_GB": f"a GB is {foreign.BYTES_A_GB} bytes",
        "training_backend": "`fsdp2` is taken for `fsdp`",
    }
    rows = [
        (f"`{'.'.join(theirs)}`", f"`{'.'.join(ours)}`", notes.get(theirs[-1], ""))
        for theirs, ours in foreign.FOREIGN_KEYS.items()
    ]
    return _markdown(("their key", "our key", "note"), rows)


TABLES = {
    "controller-keys": lambda: keys_table("", schema.WeightSyncConfig),
    "transfer-keys": lambda: keys_table("transfer.", schema.TransferConfig),
    "extract-keys": lambda: keys_table("extract.", schema.ExtractConfig),
    "fleet-keys": lambda: keys_table("fleet.", schema.FleetConfig),
    "inference-service-keys": lambda: keys_table("inference_service.", schema.InferenceServiceConfig),
    "foreign-keys": foreign_table,
    "strategies": strategy_table,
}


def _is_choice(field: FieldInfo) -> bool:
    return bool(set(schema.choices_of(field.annotation)) - {"null"})


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default == {}:
        return "empty"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{yaml.safe_dump(default).splitlines()[0]}`"


def _answer(transfer: dict[str, object]) -> str:
    try:
        return f"`{schema.select_strategy(schema.WeightSyncConfig.load({'transfer': transfer}))}`"
    except ConfigError:
        return "refused"


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _python_problems(block: str) -> Iterator[str]:
    try:
        tree = compile(block, "example", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        yield f"an example does not compile: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "weightsync":
            for alias in node.names:
                try:
                    getattr(importlib.import_module(str(node.module)), alias.name)
                except (ImportError, AttributeError) as error:
                    yield f"an example imports what is not there: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
