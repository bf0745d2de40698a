"""Every HTTP face under requests of any kind: each answer fits, nothing grows, the log stays short, and it answers on.

The short form sends some hundreds a face, the long one thousands.
"""

from __future__ import annotations

import json
import logging.handlers
import sys

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.multiproc.fuzz_http import FACES, TOKEN, Answer, Case, ask, case_of, cases, face
from tests.standins.processes import children
from weightsync.errors import _KINDS

BATCH = 40
SHORT, LONG = 4, 32
"""Batches; with and without a token, four faces: 1,280 and 10,240 cases."""
GROWTH_BYTES = 64 << 20
ANSWERED_S = 0.3
"""What waits longer was asked to: `wait_s` is one of the fields that are bent."""


def lines() -> list[logging.LogRecord]:
    """Every line that a server of this process writes from now on."""
    handler = logging.handlers.BufferingHandler(sys.maxsize)
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).addHandler(handler)
    return handler.buffer


def check(case: Case, answer: Answer) -> None:
    """An error is typed JSON with a status that fits; none is the server's own confusion."""
    assert answer.status == 0 or 200 <= answer.status < 300 or 400 <= answer.status < 600, (case, answer)
    if answer.status >= 400 and not case.head.startswith(b"HEAD "):
        told = json.loads(answer.body)
        assert told["error"] in _KINDS, (case, answer)
        assert "this server failed" not in told["message"], (case, answer)
        assert TOKEN not in told["message"], (case, answer)


def in_own_process(kind: str, token: str | None, num_batches: int, *, timeout_s: float) -> None:
    """What other tests' threads take and free of a process, and what they log, is none of the server's."""
    with children() as start:
        start(bombard, kind, token, num_batches, name=kind).result(timeout_s)


def bombard(kind: str, token: str | None, num_batches: int) -> None:
    """Sends it all to one face."""
    process, written = psutil.Process(), lines()
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
    assert len(written) < 20, [record.getMessage()[:200] for record in written[:30]]


@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "tokenless"])
@pytest.mark.parametrize("kind", FACES)
def test_requests_of_any_kind(kind: str, token: str | None) -> None:
    in_own_process(kind, token, SHORT, timeout_s=250)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "tokenless"])
@pytest.mark.parametrize("kind", FACES)
def test_thousands_of_requests_of_any_kind(kind: str, token: str | None) -> None:
    in_own_process(kind, token, LONG, timeout_s=850)
