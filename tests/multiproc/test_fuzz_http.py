"""Every HTTP face under requests of any kind: each answer fits, nothing grows, the log stays short, and it answers on.

The short form sends some hundreds a face, the long one thousands.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.multiproc.fuzz_http import FACES, TOKEN, Answer, Case, ask, case_of, cases, face
from weightsync.errors import _KINDS
from weightsync.net import log as log_module

BATCH = 40
SHORT, LONG = 4, 32
"""Batches; with and without a token, four faces: 1,280 and 10,240 cases."""
GROWTH_BYTES = 64 << 20
ANSWERED_S = 0.3
"""What waits longer was asked to: `wait_s` is one of the fields that are bent."""


class Lines(logging.Handler):
    """Every line that a server of this process writes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    handler = Lines()
    log_module.logger.filters[0]._told.clear()  # type: ignore[union-attr]  # what other tests made it say
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access")]
    for each in loggers:
        each.addHandler(handler)
    yield handler.records
    for each in loggers:
        each.removeHandler(handler)


def check(case: Case, answer: Answer) -> None:
    """An error is typed JSON with a status that fits; none is the server's own confusion."""
    assert answer.status == 0 or 200 <= answer.status < 300 or 400 <= answer.status < 600, (case, answer)
    if answer.status >= 400 and not case.head.startswith(b"HEAD "):
        told = json.loads(answer.body)
        assert told["error"] in _KINDS, (case, answer)
        assert "this server failed" not in told["message"], (case, answer)
        assert TOKEN not in told["message"], (case, answer)


def bombard(kind: str, token: str | None, lines: list[logging.LogRecord], *, num_batches: int) -> None:
    """Sends it all to one face."""
    process = psutil.Process()
    answered = 0

    with face(kind, token) as url:
        parsed = httpx.URL(url)
        assert parsed.port is not None
        address = (parsed.host, parsed.port)

        @settings(
            max_examples=num_batches, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            derandomize=num_batches == SHORT,
            phases=(Phase.generate, Phase.shrink) if num_batches > SHORT else (Phase.generate,),
        )  # fmt: skip
        @given(batch=cases(FACES[kind], token, num=BATCH))
        def send(batch: list[Case]) -> None:
            nonlocal answered
            for case in batch:
                answer = ask(address, case, timeout_s=ANSWERED_S)
                answered += answer.status != 0
                check(case, answer)

        with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            assert http.get("/healthz").status_code == 200
            for seed in range(BATCH):  # so that what is loaded once is there
                case = case_of(FACES[kind], token, seed)
                check(case, ask(address, case, timeout_s=ANSWERED_S))
            before_bytes = process.memory_info().rss
            send()
            assert http.get("/healthz").json() == {"status": "ok"}
        assert process.memory_info().rss - before_bytes < GROWTH_BYTES
    assert answered > num_batches * BATCH // 2, "most are whole requests"
    assert len(lines) < 20, [record.getMessage()[:200] for record in lines[:30]]


@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "tokenless"])
@pytest.mark.parametrize("kind", FACES)
def test_requests_of_any_kind(kind: str, token: str | None, lines: list[logging.LogRecord]) -> None:
    bombard(kind, token, lines, num_batches=SHORT)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "tokenless"])
@pytest.mark.parametrize("kind", FACES)
def test_thousands_of_requests_of_any_kind(kind: str, token: str | None, lines: list[logging.LogRecord]) -> None:
    bombard(kind, token, lines, num_batches=LONG)
