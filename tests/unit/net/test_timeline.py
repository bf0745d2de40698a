"""`/timeline` of a face: its newest phases, its clock, and no more than an answer holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightsync.clients.timeline import TimelineClient
from weightsync.errors import AuthError
from weightsync.net import timeline
from weightsync.net.server import Api, ServerSettings, ServerThread
from weightsync.observe import Recorder
from weightsync.types import PhaseRecord
from weightsync.types.timeline import Timeline

TOKEN = "a-token-for-tests-only"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(timeline, "MAX_RECORDS", 3)
    recorder = Recorder("a", max_bytes=5 * 250)
    for number in range(7):
        recorder.add(PhaseRecord(name=str(number), start_s=number, end_s=number, track="a"))
    app = Api("a face")
    own = PhaseRecord(name="own", start_s=0.0, end_s=1.0, track="b")
    timeline.add_timeline(app, recorder, lambda: Timeline(kind="agent", name="m", now_s=5.0, phases=(own,)))
    server = ServerThread(app, ServerSettings(token=TOKEN))
    yield server.start()
    server.close()


def test_the_newest_are_told_and_the_rest_is_counted(url: str) -> None:
    client = TimelineClient(url, token=TOKEN)
    said = client.timeline()
    client.close()
    assert [phase.name for phase in said.phases] == ["own", "4", "5", "6"]
    assert said.num_dropped == 2 + 2, "forgotten, and left out"


def test_the_clock_alone(url: str) -> None:
    client = TimelineClient(url, token=TOKEN)
    said = client.clock()
    client.close()
    assert (said.now_s, said.phases) == (5.0, ())


def test_nobody_without_the_token(url: str) -> None:
    client = TimelineClient(url)
    with pytest.raises(AuthError):
        client.timeline()
    client.close()
