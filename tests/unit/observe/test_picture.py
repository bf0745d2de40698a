from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync.errors import MissingDependencyError
from weightsync.observe import write_timeline_png
from weightsync.observe.palette import WAIT, label, styles
from weightsync.types import PhaseRecord

pytest.importorskip("matplotlib")


def record(name: str, start_s: float, end_s: float, track: str) -> PhaseRecord:
    return PhaseRecord(name=name, start_s=start_s, end_s=end_s, track=track)


RECORDS = [
    record("train", 100.0, 101.0, "trainer/rank-0"),
    record("wait engines", 101.0, 101.3, "trainer/rank-0"),
    record("transfer", 101.0, 101.2, "engine-0"),
    record("load", 101.1, 101.3, "engine-0"),
    record("pause", 101.3, 101.31, "engine-0"),
    record("resume", 101.32, 101.33, "engine-0"),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    return figures


def test_bars_waits_and_pauses_are_where_they_belong(tmp_path: Path, drawn: list[Any]) -> None:
    path = write_timeline_png(RECORDS, tmp_path / "t.png", focus_s=(101.0, 101.4), marks=[(101.33, "v1")])
    assert path.read_bytes().startswith(b"\x89PNG")
    whole, focus = drawn[0].axes
    assert [tick.get_text() for tick in whole.get_yticklabels()] == ["trainer/rank-0", "engine-0"]
    assert whole.get_xlim()[0] == 0
    assert focus.get_xlim() == (0, pytest.approx(400))
    boxes = [bar.get_paths()[0].get_extents() for bar in whole.collections]
    assert len(boxes) == len(RECORDS)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart = box.x1 <= other.x0 + 1e-6 or other.x1 <= box.x0 + 1e-6 or box.y1 <= other.y0 or other.y1 <= box.y0
            assert apart, "two bars cover each other"
    assert {bar.get_hatch() for bar in whole.collections} == {None, "", WAIT.hatch, ".."} - {None}
    texts = {text.get_text() for text in focus.texts}
    assert "wait for engines 300 ms" in texts
    assert "v1" in texts
    legend = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert {"train", "transfer", "load", "waiting", "generation paused"} <= legend
    assert "wait engines" not in legend


def test_no_records_make_a_picture_that_says_so(tmp_path: Path, drawn: list[Any]) -> None:
    write_timeline_png([], tmp_path / "t.png")
    assert "nothing was recorded" in {text.get_text() for text in drawn[0].axes[0].texts}


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # it can't be imported
    with pytest.raises(MissingDependencyError, match=r"pip install 'weightsync\[demo\]'"):
        write_timeline_png(RECORDS, tmp_path / "t.png")


def test_every_phase_looks_different_and_waits_alike() -> None:
    names = [
        "load",
        "digest",
        "abort",
        "extract",
        "pack",
        "transfer",
        "verify",
        "commit",
        "pause",
        "resume",
        "train",
        "generate",
        "aa",
        "bb",
    ]
    looks = styles([*names, "wait engines", "wait rank 0"])
    own = [(looks[name].color, looks[name].hatch) for name in names]
    assert len(set(own)) == len(own)
    assert looks["wait engines"] == looks["wait rank 0"] == WAIT
    assert label("wait engines") == "wait for engines"
    assert label("wait for engines") == "wait for engines"
    assert label("waiter") == "waiter"


def test_observe_needs_neither_torch_nor_the_optional_packages() -> None:
    code = (
        "import sys, weightsync.observe as o; o.Recorder('t'); o.chrome_trace([]);"
        "print([m for m in ('torch', 'matplotlib', 'prometheus_client', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
