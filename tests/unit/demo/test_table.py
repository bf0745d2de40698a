from __future__ import annotations

import io

import pytest
from rich.console import Console

from weightsync.demo.summary import StepRow
from weightsync.demo.table import StepTable, digest_text, header, line, one_line


def row(version: int = 3, digests_equal: bool | None = True, sample: str = "return self\n") -> StepRow:
    return StepRow(
        version=version,
        trainer_loss=2.5,
        engine_loss=2.501,
        total_bytes=4_850_000,
        phases_s={"extract": 0.021, "pack": 0.0034, "transfer": 0.1},
        paused_s=0.0042,
        digests_equal=digests_equal,
        sample=sample,
        sync_s=0.2,
    )


def shown(*rows: StepRow, terminal: bool, width: int = 140) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=width, height=40, color_system=None, legacy_windows=False
    )
    table = StepTable(console)
    table.status("training step 1")
    for one in rows:
        table.add(one)
    return out.getvalue()


def test_without_a_terminal_each_row_is_one_line() -> None:
    lines = shown(row(1), row(2, digests_equal=False), terminal=False, width=60).splitlines()
    assert lines[0] == "training step 1"
    del lines[1]  # what the columns mean
    assert lines[1] == header()
    assert lines[2:] == [line(row(1)).plain, line(row(2, digests_equal=False)).plain]
    assert "\x1b" not in "".join(lines)
    assert lines[2].split()[:5] == ["1", "2.500", "2.501", "0.0010", "4.8"]
    assert " 21 " in lines[2]
    assert " 3.4 " in lines[2]
    assert " - " in lines[2]  # no load was recorded
    # Values end where their headings end.
    for heading, value in (("version", "1"), ("trainer loss", "2.500"), ("extract ms", "21"), ("paused ms", "4.2")):
        end = lines[1].index(heading) + len(heading)
        assert lines[2][:end].endswith(f" {value}")


@pytest.mark.parametrize(("width", "has_phases"), [(180, True), (170, True), (169, False), (90, False)])
def test_a_narrow_terminal_shows_the_sync_in_place_of_its_phases(width: int, has_phases: bool) -> None:
    text = shown(row(1), row(2, digests_equal=None), terminal=True, width=width)
    last = text[text.rindex("trainer loss") :]
    assert ("extract" in last) is has_phases
    assert ("sync" in last) is not has_phases
    for word in ("2.500", "2.501", "0.0010", "4.8", "yes", "unprovable"):
        assert word in last
    assert len(max(last.splitlines(), key=len)) <= width


def test_the_answer_is_a_word_not_only_a_colour() -> None:
    assert [digest_text(answer).plain for answer in (True, False, None)] == ["yes", "NO", "unprovable"]
    assert len({str(digest_text(answer).style) for answer in (True, False, None)}) == 3


def test_a_sample_cannot_move_the_cursor_or_be_markup() -> None:
    assert one_line("a\nb\tc\x1b[2J\x00\ufffd") == "a⏎b→c\\x1b[2J\\x00\ufffd"
    text = shown(row(sample="[red]x[/red] \x1b[2J"), terminal=True)
    assert "[red]x[/red] \\x1b[2J" in text
    assert "\x1b[2J" not in text
