"""What travels inside vLLM's calls, and how the client reads what vLLM says. Real servers: tests/engines."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.standins.processes import free_port
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    StateError,
    TransferAbortedError,
    UnsupportedError,
)
from weightsync.handles import mending
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.handles.vllm_api import OfflineVllmApi
from weightsync.handles.vllm_messages import (
    UNPROVABLE,
    VllmAudit,
    VllmInitMessage,
    VllmState,
    VllmUpdateMessage,
    as_info,
    error_in_text,
    error_text,
    init_message,
    other_state,
    update_message,
    version_in,
)
from weightsync.net import http_edge
from weightsync.types import (
    AbortRequest,
    AuditRequest,
    BeginRequest,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    DescribeRequest,
    EmptyWeightSyncInitInfo,
    EngineOp,
    InitRequest,
    Manifest,
    PauseRequest,
    ResumeRequest,
    TensorSpec,
    UpdateRequest,
    Version,
)
from weightsync.types.engine import CHECK_RUN

VERSION = Version(run_id="run/a", number=7)
MANIFEST = Manifest(version=VERSION, model_id="m", tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),))


def test_messages_come_back_as_they_went() -> None:
    for message in (
        VllmInitMessage(abort=AbortRequest(session="s", reason="why")),
        VllmInitMessage(expect=VllmState(version=VERSION, group="g", updating=True)),
    ):
        assert init_message(as_info(message)) == message
    for update in (
        VllmUpdateMessage(begin=BeginRequest(session="s", manifest=MANIFEST, deadline_s=3.0)),
        VllmUpdateMessage(commit=CommitRequest(session="s")),
    ):
        assert update_message(as_info(update)) == update


@pytest.mark.parametrize(
    "info", [{}, {"abort": {"session": "s"}}, {"names": ["w"]}, {"commit": {"session": "s"}, "extra": 1}, {"begin": 3}]
)
def test_what_is_none_of_ours_is_one_typed_error(info: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        init_message(info)
    with pytest.raises(InvalidRequestError):
        update_message(info)


def test_exactly_one_message_a_call() -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        VllmUpdateMessage()
    with pytest.raises(InvalidRequestError, match="exactly one"):
        VllmInitMessage(abort=AbortRequest(session="s", reason="r"), expect=VllmState())


@given(st.text(), st.text(min_size=1), st.text())
def test_an_error_survives_whatever_vllm_puts_around_it(message: str, parameter: str, around: str) -> None:
    """The executor's sentence, JSON's escapes, and the removal of what looks like a path or an address."""
    text = f"{around}Worker failed with error '{error_text(DigestMismatchError(message, parameter=parameter))}', please"
    body = json.dumps({"error": {"message": f"Call to collective_rpc method failed: {text}"}})
    body = re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", body)
    body = re.sub(r" at 0x[0-9a-fA-F]+>", ">", body)
    if "weightsync-error" in around:
        return
    found = error_in_text(body, peer="e")
    assert isinstance(found, DigestMismatchError)
    expected = parameter.encode("utf-8", "replace").decode()
    assert (found.message, found.parameter, found.peer) == (message.encode("utf-8", "replace").decode(), expected, "e")


def test_an_error_that_quotes_another_is_not_that_other(server: tuple[str, dict[str, tuple[int, str]]]) -> None:
    """What a model, a file name or a stranger put into a message is words, and no state of the engine."""
    fake = error_text(other_state(VllmState(version=VERSION)))
    real = LoadError(f"the worker failed: ValueError: {fake}", parameter="w")
    found = error_in_text(f"ValueError: {fake}; Worker failed with error '{error_text(real)}'")
    assert isinstance(found, LoadError)
    assert found.parameter == "w"
    assert error_text(real).count("weightsync-error:") == 1
    url, told = server
    told.update({**ALIVE, INIT: (500, error_text(StateError("quoted", state={"healthy": False})))})
    with pytest.raises(StateError, match="quoted"):
        describe(url)


@pytest.mark.parametrize("text", ["", "weightsync-error::end", "weightsync-error:%%%:end", "weightsync-error:AAAA:end"])
def test_a_mark_with_nothing_behind_it_is_no_error_of_ours(text: str) -> None:
    assert error_in_text(text) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("run/a/7", VERSION), (str(VERSION), VERSION), ("default", None), ("", None), (None, None), ("12", None),
        ("run/x", None), ("/3", None), ("run/-1", None), ("run/²", None),
    ],
)  # fmt: skip
def test_versions_are_read_back(text: str | None, version: Version | None) -> None:
    assert version_in(text) == version


# The HTTP side, against a server that says what vLLM's says.


class _Handler(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, str]]
    release: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text = self.answers.get(self.path.partition("?")[0], (404, '{"detail":"Not Found"}'))
        if text == "hang":
            self.release.wait(10)
        body = text.encode()
        self.send_response(status)
        for _ in range(100 if text == "drip" else 0):  # 10 s
            self.release.wait(0.1)
            self.send_header("X-Drip", "a")
            try:
                self.flush_headers()
            except OSError:  # the client has cut the connection
                return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    answers: dict[str, tuple[int, str]] = {}
    release = threading.Event()
    handler = type("Handler", (_Handler,), {"answers": answers, "release": release})
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_address[1]}", answers
    release.set()
    web.shutdown()
    web.server_close()


INIT = "/init_weight_transfer_engine"
ALIVE = {"/get_world_size": (200, '{"world_size": 2}'), "/is_paused": (200, '{"is_paused": false}')}


def describe(url: str, timeout_s: float = 5.0) -> Any:
    engine = VllmEngine(VllmHttpApi(url), engine_id="e")
    try:
        return engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=timeout_s)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({}, UnsupportedError, "VLLM_SERVER_DEV_MODE=1"),
        ({**ALIVE, INIT: (500, "Weight transfer not configured.")}, UnsupportedError, '"backend":"weightsync"'),
        ({**ALIVE, INIT: (400, "Invalid init_info for NCCLWeightTransferEngine: x")}, UnsupportedError, "another"),
        ({**ALIVE, INIT: (500, "CUDA error")}, EngineError, "CUDA error"),
        ({**ALIVE, INIT: (500, error_text(LoadError("odd")))}, LoadError, "odd"),
        ({**ALIVE, INIT: (500, error_text(StateError("x", answers="expect", state=1)))}, EngineError, "odd state"),
        ({**ALIVE, "/is_paused": (401, "{}")}, AuthError, "token"),
        ({**ALIVE, "/is_paused": (200, "<html>")}, EngineError, "no JSON"),
        ({**ALIVE, "/is_paused": (200, "[]")}, EngineError, "no JSON"),
        ({**ALIVE, "/get_world_size": (200, "{}")}, EngineError, "world_size"),
    ],
)
def test_a_server_that_can_not_be_used_says_why(
    server: tuple[str, dict[str, tuple[int, str]]], answers: dict[str, Any], kind: type[Exception], words: str
) -> None:
    url, told = server
    told.update(answers)
    with pytest.raises(kind, match=re.escape(words)) as caught:
        describe(url)
    assert caught.value.peer == "e"  # type: ignore[attr-defined]


def test_the_state_is_learnt_from_the_objection(server: tuple[str, dict[str, tuple[int, str]]]) -> None:
    url, told = server
    state = {"version": {"run_id": "r", "number": 3}, "healthy": False, "group": "g", "run_id": "r"}
    told.update({**ALIVE, INIT: (500, error_text(StateError("another", answers="expect", state=state)))})
    reply = describe(url)
    assert (reply.version, reply.serving, reply.world_size) == (Version(run_id="r", number=3), False, 2)
    assert reply.group is None, "another handle's group is not this one's"


def test_silence_and_absence_are_typed(
    server: tuple[str, dict[str, tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, told = server
    told.update({**ALIVE, INIT: (200, "hang")})
    with pytest.raises(DeadlineExceededError, match="init_weight_transfer_engine within"):
        describe(url, timeout_s=5.0)
    told.update({**ALIVE, INIT: (200, "drip")})  # each header starts a read timeout of its own
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="init_weight_transfer_engine within"):
        describe(url, timeout_s=5.0)
    assert time.monotonic() - started_s < 15
    told.update({**ALIVE, INIT: (200, " " * 1001)})
    monkeypatch.setattr(http_edge, "MAX_REPLY_BYTES", 1000)
    with pytest.raises(EngineError, match="has over"):
        describe(url)
    with pytest.raises(EngineUnreachableError, match="does a vLLM server run"):
        describe(f"http://127.0.0.1:{free_port()}")


def test_options_are_checked() -> None:
    api = VllmHttpApi("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="pause_mode is one of keep, wait, abort"):
        VllmEngine(api, pause_mode="sleep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache"):
        VllmEngine(api, kv_cache="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="http"):
        VllmHttpApi("127.0.0.1:1")


# Chunks take turns.


class Recording:
    """Answers everything well and keeps the order; one chunk can be held, or made to fail."""

    name = "recording"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.hold: dict[int, threading.Event] = {}
        self.arrived = threading.Semaphore(0)
        self.fails: int | None = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        if "update" not in info:
            return
        seq = info["update"]["seq"]
        self.seen.append(seq)
        self.arrived.release()
        if seq in self.hold:
            assert self.hold[seq].wait(timeout_s)
        if seq == self.fails:
            raise LoadError("planted")


def chunk(seq: int) -> UpdateRequest:
    return UpdateRequest(
        update=BroadcastWeightUpdateRequest(
            session="s", seq=seq, names=("w",), dtypes=("float32",), shapes=((2,),), offsets=(0,), bucket_bytes=8
        )
    )


def opened(api: Recording) -> VllmEngine:
    engine = VllmEngine(api, engine_id="e")  # type: ignore[arg-type]
    engine.call(EngineOp.BEGIN, BeginRequest(session="s", manifest=MANIFEST, deadline_s=9.0), timeout_s=5)
    return engine


def in_threads(engine: VllmEngine, seqs: list[int]) -> tuple[list[threading.Thread], dict[int, BaseException]]:
    errors: dict[int, BaseException] = {}

    def run(seq: int) -> None:
        try:
            engine.call(EngineOp.UPDATE_WEIGHTS, chunk(seq), timeout_s=5)
        except BaseException as error:
            errors[seq] = error

    threads = [threading.Thread(target=run, args=(seq,), daemon=True) for seq in seqs]
    for thread in threads:
        thread.start()
    return threads, errors


def test_a_chunk_is_sent_when_the_one_before_was_answered() -> None:
    api = Recording()
    api.hold[0] = threading.Event()
    engine = opened(api)
    threads, errors = in_threads(engine, [2, 1, 0])
    assert api.arrived.acquire(timeout=5)
    assert not api.arrived.acquire(timeout=0.2), "nothing comes while chunk 0 is not answered"
    api.hold[0].set()
    for thread in threads:
        thread.join(5)
    assert (api.seen, errors) == ([0, 1, 2], {})


def test_a_chunk_that_fails_ends_those_that_wait() -> None:
    api = Recording()
    api.hold[0], api.fails = threading.Event(), 0
    engine = opened(api)
    threads, errors = in_threads(engine, [1, 0])
    assert api.arrived.acquire(timeout=5)
    api.hold[0].set()
    for thread in threads:
        thread.join(5)
    assert isinstance(errors[0], LoadError)
    assert isinstance(errors[1], TransferAbortedError)
    assert api.seen == [0]


def test_an_abort_ends_chunks_that_wait() -> None:
    api = Recording()
    engine = opened(api)
    threads, errors = in_threads(engine, [3])
    engine.call(EngineOp.ABORT, AbortRequest(session="s", reason="enough"), timeout_s=5)
    threads[0].join(5)
    assert isinstance(errors[3], TransferAbortedError)
    with pytest.raises(TransferAbortedError, match="not open here"):
        engine.call(EngineOp.UPDATE_WEIGHTS, chunk(0), timeout_s=1)


def test_a_commit_that_holds_no_pause_is_refused() -> None:
    engine = opened(Recording())
    with pytest.raises(StateError, match="holds the pause"):
        engine.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=1)


# Whose pause it is, and who ends it.


class Engine:
    """A vLLM of one worker that is told its state; no HTTP. `busy`: its calls time out, as under a slow commit."""

    name = "engine"

    def __init__(self) -> None:
        self.state = VllmState()
        self.paused = False
        self.busy = False
        self.resets = True  # whether it can drop its cache
        self.calls: list[str] = []
        self.resumed = threading.Event()
        self.meanwhile: dict[str, Any] = {}  # what changes while it reads
        self.looks: list[VllmState] = []  # what the next ones find

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)

    def world_size(self, **_: Any) -> int:
        return 1

    def is_paused(self, **_: Any) -> bool:
        return self.paused

    def reset_prefix_cache(self, **_: Any) -> bool:
        return self.resets

    def weight_version(self, **_: Any) -> str:
        return "default"

    def pause(self, *_: Any, **__: Any) -> None:
        self.paused = True

    def resume(self, **_: Any) -> bool:
        self.paused = False
        self.resumed.set()
        return True

    def init_engine(self, info: dict[str, Any], **_: Any) -> None:
        if self.busy:
            raise DeadlineExceededError("busy")
        message = init_message(info)
        if message.init is not None:
            self.state = VllmState(group="g", run_id=message.init.run_id, writes_live=message.in_place)
        elif message.abort is not None and message.abort.session == self.state.session:
            self.state = msgspec.structs.replace(self.state, session=None)
        elif message.audit is not None:
            state = msgspec.structs.replace(self.state, **self.meanwhile)
            audit = VllmAudit(name=message.audit, version=state.version, equal=True)
            self.looks = [state, msgspec.structs.replace(state, audits=(audit,))]
        elif message.expect is not None:
            self.state = self.looks.pop(0) if self.looks else self.state
            if message.expect != self.state:
                raise other_state(self.state)

    def update(self, info: dict[str, Any], **_: Any) -> None:
        self.calls.append(next(iter(info)))
        if "begin" in info:
            self.state = msgspec.structs.replace(self.state, session=info["begin"]["session"], updating=True)
        elif "commit" in info:
            self.state = msgspec.structs.replace(self.state, session=None, healthy=True)


def joined(api: Engine, run_id: str, **options: Any) -> VllmEngine:
    handle = VllmEngine(api, engine_id=run_id, **options)  # type: ignore[arg-type]
    info = EmptyWeightSyncInitInfo(strategy="broadcast", group_name=f"g-{run_id}")
    request = InitRequest(run_id=run_id, model_id="m", rank_offset=1, info=info)
    handle.call(EngineOp.INIT, request, timeout_s=5)
    return handle


def begun(handle: VllmEngine, session: str, *, paused: bool = True) -> None:
    handle.call(EngineOp.BEGIN, BeginRequest(session=session, manifest=MANIFEST, deadline_s=9.0), timeout_s=5)
    if paused:
        handle.call(EngineOp.PAUSE, PauseRequest(session=session, timeout_s=1.0, lease_s=5.0), timeout_s=5)


def committed() -> tuple[Engine, VllmEngine]:
    """Paused; its session "s" has committed, and not resumed."""
    api = Engine()
    handle = joined(api, "run")
    begun(handle, "s")
    handle.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)
    return api, handle


def test_who_was_superseded_lifts_no_pause_of_who_took_over() -> None:
    api = Engine()
    old = joined(api, "old")
    begun(old, "s1")
    new = joined(api, "new")
    assert not api.paused
    begun(new, "s2")
    old.call(EngineOp.ABORT, AbortRequest(session="s1", reason="late"), timeout_s=5)
    with pytest.raises(StateError, match="has the engine now"):
        old.call(EngineOp.RESUME, ResumeRequest(session="s1"), timeout_s=5)
    assert api.paused
    assert "finish_update" not in api.calls
    new.call(EngineOp.ABORT, AbortRequest(session="s2", reason="enough"), timeout_s=5)
    assert not api.paused, "whose pause it is lifts it"


def test_nobody_waits_until_kept_requests_are_computed_anew() -> None:
    """vLLM does that in the step behind its resume, and answers nothing meanwhile: seconds for long ones."""
    api, handle = committed()

    def resume(**_: Any) -> None:
        api.paused, api.busy = False, True

    api.resume = resume  # type: ignore[method-assign]
    handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5)
    assert not api.paused


def test_it_goes_on_though_it_does_not_say_how_much_it_has_written() -> None:
    """And the number of the version before is not told for it."""
    api, handle = committed()
    api.state = msgspec.structs.replace(api.state, written=7)
    assert handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5).written == 7
    begun(handle, "t")
    handle.call(EngineOp.COMMIT, CommitRequest(session="t"), timeout_s=5)
    api.busy = True
    assert handle.call(EngineOp.RESUME, ResumeRequest(session="t"), timeout_s=5).written is None
    assert not api.paused


def test_a_look_that_a_commit_has_overtaken_changes_nothing_that_is_known() -> None:
    """Another thread's describe. Seen red: a changed version was not resumed, since its session "has the engine"."""
    api = Engine()
    handle = joined(api, "run")
    begun(handle, "s")
    handle._patches = True  # then the resume goes by what the workers said to the commit
    init_engine = api.init_engine

    def overtaken(info: dict[str, Any], **_: Any) -> None:
        api.init_engine = init_engine  # type: ignore[method-assign]
        told = msgspec.structs.replace(api.state, unprovable="news")
        handle.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)
        raise other_state(told)

    api.init_engine = overtaken  # type: ignore[method-assign]
    assert handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).version == VERSION
    handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5)
    assert not api.paused


def test_a_pause_of_who_took_over_behind_the_commit_is_not_lifted() -> None:
    api, handle = committed()
    api.state = VllmState(run_id="other", group="h", session="t", healthy=True)
    with pytest.raises(StateError, match="has the engine now"):
        handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5)
    assert api.paused


def test_in_place_sends_nothing_without_its_pause() -> None:
    api = Engine()
    handle = joined(api, "run", in_place=True)
    begun(handle, "s")
    api.paused = False  # somebody's resume
    with pytest.raises(StateError, match="somebody ended the pause"):
        handle.call(EngineOp.UPDATE_WEIGHTS, chunk(0), timeout_s=5)
    assert "update" not in api.calls


def test_a_handle_that_asked_for_another_way_of_loading_joins_again() -> None:
    api = Engine()
    handle = joined(api, "run")
    api.state = msgspec.structs.replace(api.state, writes_live=True)
    with pytest.raises(StateError, match="join again") as caught:
        begun(handle, "s", paused=False)
    assert caught.value.state_left == "nothing was changed"
    assert api.calls == []
    assert handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).writes_live, "the worker's word"


def aborted_while_busy(handle: VllmEngine, api: Engine, session: str) -> None:
    """A session's abort, to which the server does not answer in time: its pause stays."""
    begun(handle, session)
    api.busy = True
    with pytest.raises(DeadlineExceededError):
        handle.call(EngineOp.ABORT, AbortRequest(session=session, reason="slow"), timeout_s=5)


def test_a_pause_that_the_abort_could_not_end_is_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a slow commit. And not by a handle that was superseded meanwhile."""
    monkeypatch.setattr(mending, "_FIRST_S", 0.05)
    api = Engine()
    handle = joined(api, "run")
    aborted_while_busy(handle, api, "s")
    assert api.paused
    api.busy = False
    assert api.resumed.wait(5)
    assert not api.paused

    others = set(threading.enumerate())
    aborted_while_busy(handle, api, "t")
    started = set(threading.enumerate()) - others
    mends = [thread for thread in started if thread.name == "weightsync-mend-run"]
    api.resumed.clear()
    api.state = VllmState(run_id="other", group="h")
    api.busy = False
    for thread in mends:
        thread.join(5)
        assert not thread.is_alive(), "it has found that the engine is somebody else's"
    assert mends
    assert api.paused


def test_a_handle_that_is_closed_ends_its_pause_first(caplog: pytest.LogCaptureFixture) -> None:
    """As where the error of a failed step ends the block. Seen red: closing stopped what was to end it, before its
    first try, and vLLM answered nobody any more."""
    api = Engine()
    handle = joined(api, "run")
    aborted_while_busy(handle, api, "s")
    api.busy = False
    handle.close()
    assert not api.paused

    api = Engine()
    handle = joined(api, "run")
    aborted_while_busy(handle, api, "s")
    handle.close()
    assert api.paused
    assert "engine run may stand still: a pause of ours was not ended: busy" in caplog.text
    others = set(threading.enumerate())
    with pytest.raises(DeadlineExceededError):  # one that was under way meanwhile
        handle.call(EngineOp.ABORT, AbortRequest(session="s", reason="late"), timeout_s=5)
    assert set(threading.enumerate()) <= others, "nobody tries again by a client that is closed"


def test_a_check_ends_nobodys_pause() -> None:
    """Seen red: `weightsync check` told a vLLM to go on that its owner had paused."""
    api = Engine()
    api.paused = True
    joined(api, f"{CHECK_RUN}-1")
    assert api.paused
    joined(api, "run")
    assert not api.paused, "a trainer ends a pause that a dead one has left"


def test_a_proof_of_the_version_before_is_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it stood beside the new version's digest where vLLM did not say in time what it serves."""
    api, handle = committed()
    api.state = msgspec.structs.replace(api.state, proved=True)
    handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5)
    begun(handle, "t")
    api.state = msgspec.structs.replace(api.state, proved=False)
    handle.call(EngineOp.COMMIT, CommitRequest(session="t"), timeout_s=5)
    monkeypatch.setattr(handle, "_look", lambda *_, **__: raises(DeadlineExceededError("busy")))
    reply = handle.call(EngineOp.RESUME, ResumeRequest(session="t"), timeout_s=5)
    assert (reply.digests_equal, reply.unprovable) == (None, UNPROVABLE)


def raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("said", "is_awake", "asked"),
    [
        ((200, '{"status": "awake"}'), True, []),
        ((200, '{"status": "sleeping"}'), False, []),
        ((200, ""), True, ["/resume"]),
        ((404, "{}"), True, ["/resume"]),
    ],
)
def test_a_vllm_that_sleeps_is_not_told_to_go_on(
    server: tuple[str, dict[str, tuple[int, str]]], said: tuple[int, str], is_awake: bool, asked: list[str]
) -> None:
    """Its memory is not there. Seen red: /resume scheduled requests all the same. Releases that don't say whether they
    sleep have that alone."""
    url, told = server
    told["/wake_up"] = said
    if asked:
        told["/resume"] = (200, "{}")
    with contextlib.closing(VllmHttpApi(url)) as api:
        assert api.resume(timeout_s=5) is is_awake


def test_the_next_pause_waits_for_the_end_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the resume of the earlier one lifted it."""
    monkeypatch.setattr(mending, "_FIRST_S", 0.05)
    api = Engine()
    handle = joined(api, "run")
    aborted_while_busy(handle, api, "s")
    resumes, pauses, pause = threading.Event(), threading.Event(), api.pause
    mends: list[threading.Thread] = []

    def slow_resume(**_: Any) -> None:
        mends.append(threading.current_thread())
        resumes.set()
        pauses.wait(0.3)
        api.paused = False

    def early_pause(*args: Any, **options: Any) -> None:
        pause(*args, **options)
        pauses.set()

    api.resume, api.pause = slow_resume, early_pause  # type: ignore[method-assign]
    api.busy = False
    assert resumes.wait(5)
    begun(handle, "t")
    mends[0].join(5)
    assert api.paused
    handle.call(EngineOp.COMMIT, CommitRequest(session="t"), timeout_s=5)


def test_a_pause_that_comes_behind_the_resume_of_its_abort_is_ended() -> None:
    """Seen red: the abort had told vLLM to go on before it stood still, and it stayed paused for good."""
    api = Engine()
    handle = joined(api, "run")
    begun(handle, "s", paused=False)
    pause = api.pause

    def late_pause(*args: Any, **options: Any) -> None:
        handle.call(EngineOp.ABORT, AbortRequest(session="s", reason="enough"), timeout_s=5)
        assert api.resumed.is_set()
        pause(*args, **options)

    api.pause = late_pause  # type: ignore[method-assign]
    with pytest.raises(TransferAbortedError, match="was aborted"):
        handle.call(EngineOp.PAUSE, PauseRequest(session="s", timeout_s=1.0, lease_s=5.0), timeout_s=5)
    assert not api.paused
    api.pause = pause  # type: ignore[method-assign]
    begun(handle, "t")
    assert api.paused


def test_a_pause_that_fails_does_not_let_go_on_with_the_cache_of_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds vLLM paused for a cache that an earlier commit could not drop, and fails for the same reason. Seen red:
    vLLM was told to go on, on the new weights with keys and values of the old ones."""
    monkeypatch.setattr(mending, "_FIRST_S", 60.0)
    api = Engine()
    handle = joined(api, "run")
    begun(handle, "s")
    api.resets = False
    for op, request in (
        (EngineOp.COMMIT, CommitRequest(session="s")),
        (EngineOp.ABORT, AbortRequest(session="s", reason="its cache")),
    ):
        with pytest.raises(EngineError, match="could not drop its prefix cache"):
            handle.call(op, request, timeout_s=5)

    def fails(*_: Any, **__: Any) -> None:
        raise EngineError("500")

    api.pause = fails  # type: ignore[method-assign]
    begun(handle, "t", paused=False)
    api.resumed.clear()
    with pytest.raises(EngineError, match="500"):
        handle.call(EngineOp.PAUSE, PauseRequest(session="t", timeout_s=1.0, lease_s=5.0), timeout_s=5)
    assert not api.resumed.is_set()
    assert api.paused
    api.resets = True
    handle.call(EngineOp.ABORT, AbortRequest(session="t", reason="no pause"), timeout_s=5)
    assert not api.paused


def test_a_late_pause_of_who_was_superseded_is_left_to_who_took_over() -> None:
    """It may be the other one's pause by then."""
    api = Engine()
    old = joined(api, "old")
    begun(old, "s1", paused=False)
    pause = api.pause

    def late_pause(*args: Any, **options: Any) -> None:
        api.pause = pause  # type: ignore[method-assign]
        old.call(EngineOp.ABORT, AbortRequest(session="s1", reason="enough"), timeout_s=5)
        begun(joined(api, "new"), "s2")
        pause(*args, **options)

    api.pause = late_pause  # type: ignore[method-assign]
    with pytest.raises(TransferAbortedError, match="was aborted"):
        old.call(EngineOp.PAUSE, PauseRequest(session="s1", timeout_s=1.0, lease_s=5.0), timeout_s=5)
    assert api.paused


def test_a_pause_that_can_not_wait_for_the_end_of_an_earlier_one_is_its_own_abort_s_to_end() -> None:
    """Its trainer was told that it is paused, perhaps."""
    api = Engine()
    handle = joined(api, "run")
    begun(handle, "s", paused=False)
    api.paused = True
    with handle._mending._ending, pytest.raises(DeadlineExceededError, match="was not ended in"):
        handle.call(EngineOp.PAUSE, PauseRequest(session="s", timeout_s=0.1, lease_s=5.0), timeout_s=5)
    handle.call(EngineOp.ABORT, AbortRequest(session="s", reason="no pause"), timeout_s=5)
    assert not api.paused
    with handle._mending._ending, pytest.raises(DeadlineExceededError, match="was not ended in"):
        handle.call(EngineOp.BEGIN, BeginRequest(session="t", manifest=MANIFEST, deadline_s=5.0), timeout_s=0.1)
    begun(handle, "t")


def test_a_trainer_that_ends_leaves_the_ending_of_its_pause_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: its goodbye ended what was to end the pause, and made the run nobody's: vLLM stayed paused."""
    monkeypatch.setattr(mending, "_FIRST_S", 0.2)
    api = Engine()
    handle = joined(api, "run")
    aborted_while_busy(handle, api, "s")
    api.busy = False
    handle.call(EngineOp.ABORT, AbortRequest(session="g-run", reason="its trainer has ended"), timeout_s=5)
    assert api.resumed.wait(5)
    assert not api.paused


def test_a_session_is_aborted_though_the_end_of_an_earlier_pause_was_never_heard_of() -> None:
    """Seen red: it stayed open in vLLM until its own deadline, and each sync until then was refused for it."""
    api, handle = committed()

    def resume(**_: Any) -> None:
        api.paused = False
        raise DeadlineExceededError("the answer is lost")

    api.resume = resume  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        handle.call(EngineOp.RESUME, ResumeRequest(session="s"), timeout_s=5)
    info = EmptyWeightSyncInitInfo(strategy="broadcast", group_name="another")
    handle.call(EngineOp.INIT, InitRequest(run_id="run", model_id="m", rank_offset=1, info=info), timeout_s=5)
    begun(handle, "t", paused=False)
    handle.call(EngineOp.ABORT, AbortRequest(session="t", reason="a chunk failed"), timeout_s=5)
    assert api.state.session is None
    begun(handle, "u")


@pytest.mark.parametrize(
    ("before", "meanwhile", "refused"),
    [
        ({}, {}, False),  # it has served nothing yet
        ({}, {"run_id": "b"}, True),
        ({"run_id": "a", "version": VERSION}, {"run_id": None}, False),  # its trainer ended
        ({"run_id": "a", "version": VERSION}, {"run_id": "b"}, True),
        ({"run_id": "a", "version": VERSION}, {"run_id": None, "version": None}, True),  # it was started again
        ({"version": VERSION}, {"version": None}, True),
    ],
)
def test_what_may_change_while_live_weights_are_read(
    before: dict[str, Any], meanwhile: dict[str, Any], refused: bool
) -> None:
    """Seen red: a vLLM that had served nothing yet "was started again"."""
    api = Engine()
    api.state, api.meanwhile = VllmState(**before), meanwhile
    handle = VllmEngine(api, engine_id="run")  # type: ignore[arg-type]
    if refused:
        with pytest.raises(StateError, match="ask again"):
            handle.call(EngineOp.AUDIT, AuditRequest(), timeout_s=5)
    else:
        assert handle.call(EngineOp.AUDIT, AuditRequest(), timeout_s=5).digests_equal


@pytest.mark.parametrize("call", ["start_update", "reset_prefix_cache"])
def test_an_llm_of_this_process_that_is_too_old(call: str) -> None:
    """Seen red: an AttributeError, without the release to take."""
    api = OfflineVllmApi(object())
    with pytest.raises(UnsupportedError, match=r"this vLLM has no .*, take "):
        getattr(api, call)(timeout_s=5)
