"""Checks that the documentation is true of the tree it lies in; `--write` renews the generated tables.

What is checked in README, CONTRIBUTING, CHANGELOG, docs/ and design/: relative links and their anchors
resolve; fenced python blocks compile, and what they import from weightsync exists; tests that are named exist;
generated tables are what the code says now. In docs/, modules, names and keys of the library that are written of exist,
a page ends within two screens, and a column "it says" quotes texts that are in the code. Every row of docs/documents/
resolves (`documents.py`). Releases that the constraints name were run (`releases.py`).
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import releases
from tables import TABLES

import documents
from weightsync import _config_foreign as foreign
from weightsync import config as schema

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "src" / "weightsync"
MOST_LINES = 130
README_LINES = 150
_LONG = {
    "control-states.md": "drawn by the code",
    "delta-format.md": "a format",
    "extending-transport.md": "one example",
}
_ROOMS = {each.stem for each in HOUSE.iterdir() if not each.name.startswith("_")}
_KEYS = {
    *(f"{name}.{key}" for name in schema.SECTIONS for key in schema.SECTIONS[name].model_fields),
    *(".".join(key[:2]) for key in foreign.FOREIGN_KEYS),
    "engine.generation",  # objects of snippets
    "engine.update_named_weights",  # and of a document
    "fleet.controller",
    "fleet.token",
    "generator.weight_sync_backnd",  # what a misspelling looks like
    "net.http",  # a logger
}
_SECTIONS = {*schema.SECTIONS, *foreign.FOREIGN_ROOTS} - _ROOMS
_DOTTED = re.compile(r"`(?:weightsync\.)?([a-z_]+(?:\.\w+)+)(?:\([^`]*)?`")
_KEY = re.compile(r"`([a-z_]+)\.(\w+)`")
_IN_FILE = re.compile(r"`([a-z_]+/[\w/]+\.py)(?::(\w[\w.]*))?`")
_UNTRUE = {
    r"every tensor (?:is|was) proved before it is (?:loaded|served)": "some engines prove nothing",
    r"before every engine has proved|when all engines have proved": "some are unprovable: say what each engine answers",
    r"proves? (?:all )?(?:that|what) (?:the|every|each) engines? serves?": "say which engine proves what",
}
"""Claims of proofs that hold for some engines alone."""
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_TEST = re.compile(r"`((?:[\w/]*/)?test_\w+\.py)(?:::(\w+))?`|`\.\.\.::(\w+)`")
_SAYS = re.compile(r"^\| it says \|.*\n\|[ |-]+\n((?:\|.*\n)+)", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)
_TABLE = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Prints what is wrong; 0 where nothing is."""
    wrong: list[str] = []
    for page in pages(ROOT):
        if "--write" in arguments:
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        wrong += [f"{page.relative_to(ROOT)}: {what}" for what in problems(page)]
    wrong += [f"docs/documents/{what}" for what in documents.problems()]
    wrong += [f"docs/versions.json: {what}" for what in releases.problems()]
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
    for claim, why in _UNTRUE.items():
        for found in re.findall(claim, re.sub(r"\s+", " ", text), re.IGNORECASE):
            yield f"it says {found!r}, which is untrue: {why}"
    for placeholder in re.findall(r"\b(?:R_[A-Z]+|RESULTS_DATE)\b", text):
        yield f"the placeholder {placeholder} was never filled in"
    for language, block in _FENCE.findall(text):
        if language == "python":
            yield from _python_problems(block)
    yield from _test_problems(text)
    if page == ROOT / "README.md" and text.count("\n") > README_LINES:
        yield f"it has {text.count(chr(10))} lines; {README_LINES} are what a newcomer reads"
    if page.parent == ROOT / "docs":
        yield from _name_problems(_FENCE.sub("", text))
        yield from _quote_problems(text)
        if page.name != "README.md" and not re.search(r"\A# .+\n\nYou ", text):
            yield 'the page begins with what its reader wants to do: "You want to ..."'
        if page.name not in _LONG and _num_lines(text) > MOST_LINES:
            yield f"the page has {_num_lines(text)} lines; two screens are {MOST_LINES}: split it by what readers want"
    for _, name, found, _ in _TABLE.findall(text):
        if name not in TABLES:
            yield f"no table is called {name}; choices are {', '.join(TABLES)}"
        elif found != TABLES[name]():
            yield f"the table {name} is out of date: run python docs/check.py --write"


def _name_problems(text: str) -> Iterator[str]:
    """What is written of and is not there: modules and names (`net.guard.Guard`, `load/module.py:name`), keys."""
    for dotted in _DOTTED.findall(text):
        parts = dotted.split(".")
        if parts[0] in _ROOMS and parts[-1] != "py" and ".".join(parts[:2]) not in _KEYS and not _is_there(parts):
            yield f"the library has no {dotted}"
    for section, key in _KEY.findall(text):
        if section in _SECTIONS and f"{section}.{key}" not in _KEYS:
            yield f"no configuration has the key {section}.{key}"
    for path, name in _IN_FILE.findall(text):
        if path.split("/")[0] in _ROOMS and not _is_there([*path.removesuffix(".py").split("/"), *name.split(".")]):
            yield f"the library has no {name or 'such file'} in {path}"


def _quote_problems(text: str) -> Iterator[str]:
    """What a column "it says" quotes, and the library does not print; `…` stands for what is filled in."""
    for rows in _SAYS.findall(text):
        for row in rows.splitlines():
            for quote in re.findall(r"`([^`]+)`", row.split("|")[1]):
                if not re.search(".*?".join(map(re.escape, quote.split("…"))), _said()):
                    yield f"the library does not say {quote!r}"


@functools.cache
def _said() -> str:
    """The texts in the library's code, without docstrings, and the names of its errors: a line each."""
    found = []
    for file in HOUSE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                found.append(node.value)
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                found.append(node.name)
    return "\n".join(" ".join(each.splitlines()) for each in found)


def _is_there(parts: list[str]) -> bool:
    at = HOUSE
    for number, part in enumerate(parts):
        if (at / part).is_dir():
            at = at / part
            continue
        file, names = at / f"{part}.py", parts[number + 1 :]
        if not file.exists():
            file, names = at / "__init__.py", parts[number:]
        text = file.read_text(encoding="utf-8")
        return all(re.search(rf"\b{name}\b", text) for name in names if name)
    return True


def _test_problems(text: str) -> Iterator[str]:
    """Tests that are named and are not there; `...::name` is one of the file that was named before."""
    files = {str(file.relative_to(ROOT)): file for file in ROOT.glob("tests/**/test_*.py")}
    named: list[Path] = []
    for file, name, further in _TEST.findall(text):
        if file:
            named = [there for path, there in files.items() if f"/{path}".endswith(f"/{file}")]
            if not named:
                yield f"there is no test file {file}"
        wanted = name or further
        if wanted and named and not any(f"def {wanted}(" in there.read_text(encoding="utf-8") for there in named):
            yield f"there is no test {wanted} in {named[0].relative_to(ROOT)}"


def _num_lines(text: str) -> int:
    """Lines that a reader sees and somebody has written."""
    return _COMMENT.sub("", _TABLE.sub("", text)).count("\n")


def with_tables(text: str) -> str:
    """A page with its generated tables renewed."""
    return _TABLE.sub(
        lambda found: found[1] + (TABLES[found[2]]() if found[2] in TABLES else found[3]) + found[4], text
    )


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
                    theirs = (getattr(error, "name", None) or "weightsync").partition(".")[0]
                    if isinstance(error, ModuleNotFoundError) and theirs != "weightsync":
                        continue  # a framework that is not installed here; whoever runs the example has it
                    yield f"an example imports what is not there: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
