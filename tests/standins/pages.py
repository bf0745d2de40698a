"""The examples of docs/, for tests that build on them; `tests/multiproc/test_snippets.py` runs each as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def example(page: str) -> dict[str, Any]:
    """What the first python block of a page defines, by name."""
    found = re.search(r"^```python\n(.*?)^```$", (_DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    module: dict[str, Any] = {}
    exec(compile(found[1], page, "exec"), module)  # noqa: S102
    return module
