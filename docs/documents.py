"""The table of `docs/documents.md`: each name of the five documents, where it is here, and which test proves it.

The rows lie in `docs/documents/N.toml`, one file a document. What is wrong with them is said by `problems`: a section
without rows, a row that neither has a place and a test nor says why it differs, a place that does not resolve, a test
that is not there. Run by itself it prints that.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weightsync import _config_foreign as foreign
from weightsync import config as schema

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "documents"
HOUSE = ROOT / "src" / "weightsync"
_LONGEST = 300
_ROW = ("name", "where", "test", "differs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One name of a document.

    Attributes:
        section: the heading that it stands under.
        name: as the document has it.
        where: places here, in the forms of `_problem_of_place`.
        test: nodes of pytest.
        differs: why it is another thing here; empty where it is not.
    """

    section: str
    name: str
    where: tuple[str, ...]
    test: tuple[str, ...]
    differs: str


def files() -> list[Path]:
    """One file a document."""
    return sorted(FOLDER.glob("*.toml"))


def tables() -> str:
    """All documents, each with its heading and its table."""
    parts = []
    for file in files():
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        lines = [f"## {file.stem}. {said['title']}", "", str(said["about"]), ""]
        lines += ["| section | name | where it is | proved by | differs |", "| --- | --- | --- | --- | --- |"]
        last = None
        for row in rows(said):
            section = "" if row.section == last else row.section
            last = row.section
            cells = (section, row.name, _code(row.where), _code(row.test), row.differs)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rows(said: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one file, in its order."""
    for section in said["section"]:
        for row in section.get("row", ()):
            yield Row(
                section=str(section["title"]),
                name=str(row.get("name", "")),
                where=_several(row.get("where", ())),
                test=_several(row.get("test", ())),
                differs=str(row.get("differs", "")),
            )


def problems() -> Iterator[str]:
    """What is wrong with the data files."""
    for file in files():
        try:
            said = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            yield f"{file.name}: {error}"
            continue
        yield from (f"{file.name}: {what}" for what in _problems_of(said))


def _problems_of(said: Mapping[str, Any]) -> Iterator[str]:
    if unknown := said.keys() - {"title", "sections", "about", "section"}:
        yield f"unknown keys {sorted(unknown)}"
    sections = said.get("section", ())
    if len(sections) != said.get("sections"):
        yield f"the document has {said.get('sections')} headings, {len(sections)} stand here"
    for section in sections:
        title = section.get("title", "")
        if not title or section.keys() - {"title", "row"}:
            yield f"a section has a title and rows alone: {title!r}"
        if not section.get("row"):
            yield f"{title!r} has no row"
        for row in section.get("row", ()):
            if row.keys() - set(_ROW):
                yield f"{title!r} has a row with the keys {sorted(row.keys() - set(_ROW))}"
        names = [row.get("name") for row in section.get("row", ())]
        yield from (f"{title!r} has {name} twice" for name in {name for name in names if names.count(name) > 1})
    for row in rows({"section": sections}):
        yield from (f"{row.section!r}, {row.name}: {what}" for what in _problems_of_row(row))


def _problems_of_row(row: Row) -> Iterator[str]:
    if not row.name:
        yield "it has no name"
    if not (row.where and row.test) and not row.differs:
        yield "it has a place and a test, or it says why it differs"
    if "" in (*row.where, *row.test):
        yield "a place or a test is empty"
    if len(row.differs) > _LONGEST or "\n" in row.differs:
        yield f"differs is one line of at most {_LONGEST} characters"
    yield from (what for place in row.where if (what := _problem_of_place(place)))
    yield from (f"there is no test {node}" for node in row.test if not _is_test(node))


@functools.cache
def _problem_of_place(place: str) -> str | None:
    """Why a place does not resolve; None where it does.

    An import path `weightsync.a:Name.attribute(argument)`, or `key:`, `route:`, `file:` and what they name.
    """
    kind, _, rest = place.partition(":")
    if kind == "file":
        return None if (ROOT / rest).exists() else f"there is no file {rest}"
    if kind == "key":
        return None if _is_key(rest) else f"the configuration has no key {rest}"
    if kind == "route":
        path = rest.rpartition(" ")[2]
        there = any(f'"{path}' in text or f"{path} " in text for text in _sources())
        return None if there else f"nothing in src/ speaks of {path}"
    try:
        return _problem_of_path(kind, rest)
    except ImportError as error:
        return f"{place} can't be imported: {error}"


def _problem_of_path(module: str, rest: str) -> str | None:
    there: Any = importlib.import_module(module)
    path, _, argument = rest.removesuffix(")").partition("(")
    parts = path.split(".") if path else []
    for index, part in enumerate(parts):
        if not hasattr(there, part):
            if index == len(parts) - 1 and part in _fields(there):
                return None
            return f"{module} has no {path}"
        there = getattr(there, part)
    if argument and argument not in inspect.signature(there).parameters:
        return f"{module}:{path} has no argument {argument}"
    return None


def _fields(kind: Any) -> set[str]:
    """Attributes that a class declares, and those that its constructor sets."""
    if not isinstance(kind, type):
        return set()
    if issubclass(kind, BaseModel):
        return set(kind.model_fields)
    found = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    for base in kind.__mro__[:-1]:
        if base.__module__.startswith("weightsync"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            found |= {
                node.attr
                for node in targets
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
            }
    return found


def _is_key(key: str) -> bool:
    path = tuple(key.split("."))
    if path[0] in foreign.OWN_ROOTS:
        path = path[1:]
    if path in foreign.FOREIGN_KEYS:
        return True
    section: type[BaseModel] = schema.WeightSyncConfig
    if len(path) == 2 and path[0] in schema.SECTIONS:
        section, path = schema.SECTIONS[path[0]], path[1:]
    return len(path) == 1 and path[0] in section.model_fields


def _is_test(node: str) -> bool:
    path, *names = node.split("::")
    return bool(names) and (ROOT / path).is_file() and tuple(names) in _tests_of(path)


@functools.cache
def _tests_of(path: str) -> frozenset[tuple[str, ...]]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found: set[tuple[str, ...]] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {
                (node.name, one.name) for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add((node.name,))
    return frozenset(names for names in found if names[-1].startswith("test_"))


@functools.cache
def _sources() -> tuple[str, ...]:
    return tuple(file.read_text(encoding="utf-8") for file in sorted(HOUSE.rglob("*.py")))


def _several(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]


def _code(several: tuple[str, ...]) -> str:
    return "<br>".join(f"`{one}`" for one in several)


if __name__ == "__main__":
    wrong = list(problems())
    print("\n".join(wrong) if wrong else "documents: every row resolves")
    sys.exit(1 if wrong else 0)
