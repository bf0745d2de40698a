"""Every snippet of README and of the pages in docs/ runs as it stands, or its page says beside it why it can't here.

A python block runs in a process and a folder of its own. What it takes for granted, a model or a URL, is made by a
comment before it, and what is done with it stands in one behind it; readers see neither:

    <!-- before                <!-- after                  <!-- not run: it needs ... -->
    model = ...                assert result == 3          <!-- run by: tests/multiproc/test_readme.py -->
    -->                        -->

A yaml block is a configuration. In blocks for a shell each `weightsync` command exists and has its options.
README's python blocks are run by `test_readme.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.multiproc.spine import TOKEN
from tests.standins.processes import children, preload
from weightsync import WeightSyncConfig
from weightsync.cli import app

preload(
    "peft",
    "transformers.models.llama.modeling_llama",
    "weightsync.control.build",
    "weightsync.control.server",
    "weightsync.load.module",
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"((?:<!-- (?:before\n|not run: |run by: )(?:(?!-->).)*-->\n+)*)"
    r"^```(\w*)\n(.*?)^```$\n*(<!-- after\n(?:(?!-->).)*-->)?",
    re.MULTILINE | re.DOTALL,
)
SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snippet:
    """A block of a page with its comments."""

    page: str
    line: int
    language: str
    code: str
    before: str
    after: str
    excuse: str
    run_by: str


def snippets() -> Iterator[Snippet]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            comments = dict(re.findall(r"<!-- (before|not run|run by):?\s(.*?)\s*-->", found[1], re.DOTALL))
            yield Snippet(
                page=str(page.relative_to(ROOT)), line=text.count("\n", 0, found.start(3)), language=found[2],
                code=found[3], before=comments.get("before", ""), excuse=comments.get("not run", ""),
                run_by=comments.get("run by", ""), after=(found[4] or "")[len("<!-- after") : -len("-->")],
            )  # fmt: skip


ALL = list(snippets())


def of(*languages: str) -> list[Snippet]:
    return [each for each in ALL if each.language in languages]


TO_RUN = [each for each in of("python") if each.page != "README.md" and not each.excuse + each.run_by]


def name(snippet: Snippet) -> str:
    return f"{snippet.page}:{snippet.line}"


def block(page: str, number: int = 0) -> str:
    """The code of another python block, for a comment that builds on it."""
    return [each.code for each in of("python") if each.page == f"docs/{page}"][number]


def run(snippet: Snippet, folder: str) -> None:
    os.chdir(folder)
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    module = types.ModuleType("snippet")
    sys.modules["snippet"] = module
    module.__dict__["block"] = block
    for part in (snippet.before, snippet.code, snippet.after):
        exec(compile(part, name(snippet), "exec"), module.__dict__)  # noqa: S102


@pytest.mark.parametrize("snippet", TO_RUN, ids=name)
def test_a_python_block_runs(snippet: Snippet, tmp_path: Path) -> None:
    """Seen red with a wrong argument in a block, and with a wrong assertion behind one."""
    with children() as start:
        start(run, snippet, str(tmp_path), name=name(snippet)).result(SECONDS)


@pytest.mark.parametrize("snippet", [each for each in of("yaml") if not each.excuse + each.run_by], ids=name)
def test_a_yaml_block_is_a_configuration(snippet: Snippet) -> None:
    WeightSyncConfig.load(yaml.safe_load(snippet.code))


def commands(code: str) -> Iterator[list[str]]:
    """The words behind `weightsync` in each line of a shell."""
    for line in code.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for at, word in enumerate(words):
            if word == "weightsync" or word.endswith("/bin/weightsync"):
                rest = words[at + 1 :]
                ends = [rest.index(end) for end in ("|", ">", "&", "&&", ";") if end in rest]
                yield rest[: min(ends, default=len(rest))]


@pytest.mark.parametrize(
    ("page", "words"),
    [(name(each), words) for each in of("", "sh", "bash") for words in commands(each.code)],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_a_command_exists_with_its_options(page: str, words: list[str]) -> None:
    """Seen red with an option that there is not."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    command.make_parser(command.context_class(command, info_name=words[0])).parse_args(list(words[1:]))


def test_what_is_not_run_says_why_or_who_runs_it() -> None:
    for snippet in ALL:
        if snippet.run_by:
            tests = re.findall(r"tests/[\w/]+\.py", snippet.run_by)
            assert tests, f"{name(snippet)}: `run by` names no test"
            assert all((ROOT / test).exists() for test in tests), f"{name(snippet)}: {tests}"
        assert not (snippet.excuse and snippet.run_by), name(snippet)
        assert not snippet.excuse or len(snippet.excuse) > 15, f"{name(snippet)}: why?"
