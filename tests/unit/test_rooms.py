"""The house as it is drawn: rooms, and files without cycles. `test_mirror.py` has the unit test beside each module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT / "src" / "weightsync"


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(file): file for file in sorted(HOUSE.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """What a file imports when it runs, in functions too; not what it names for a type checker alone."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("weightsync"):
                whole = [f"{child.module}.{alias.name}" for alias in child.names]
                found.update(each if each in FILES else str(child.module) for each in whole)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names if alias.name in FILES)
            walk(child)

    walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
    return found - {name}


def test_no_two_files_import_each_other() -> None:
    """Also not by a way round. Seen red with an import of `host.service` in `host.member`."""
    imports = {name: imports_of(name) for name in FILES}
    free: set[str] = set()
    while now := {name for name in FILES if name not in free and imports[name] & FILES.keys() <= free}:
        free |= now
    assert not FILES.keys() - free, "these import each other, or what does"


def rooms() -> list[str]:
    return sorted(each.name for each in HOUSE.iterdir() if (each / "__init__.py").exists())


def test_the_readme_draws_the_rooms_that_are_there() -> None:
    """Seen red with a room left out of the picture, and with a line for one that is not there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = re.search(r"```\nsrc/weightsync/\n(.*?)\n(?! )", text, re.DOTALL)
    assert drawn is not None
    assert sorted(re.findall(r"^  (\w+)/ ", drawn.group(1), re.MULTILINE)) == rooms()


def test_no_file_is_long() -> None:
    """Who has more to say splits it. Seen red with `host.puller` at 520 lines."""
    assert not {name: lines for name, file in FILES.items() if (lines := len(file.read_text().splitlines())) > 450}
