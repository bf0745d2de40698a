"""`weightsync status` of whatever answers: a rollout service, an agent, an engine; and of what is none of ours."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from tests.unit.cli.test_status import run
from tests.unit.control import statuses
from tests.unit.control.statuses import StatusServer
from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.cli import faces
from weightsync.cli.faces import engine_facts
from weightsync.engine.server import EngineServer
from weightsync.handles.two_kinds import VllmServerEngine
from weightsync.handles.vllm_messages import VllmState
from weightsync.net.messages import decode, encode
from weightsync.net.server import Api, ServerThread
from weightsync.observe import now_s
from weightsync.types import EngineReply, EngineRequest, Version
from weightsync.types.progress import TransferProgress
from weightsync.types.service import LeaseStatus, ModelStatus, ServiceStatus
from weightsync.types.transfer_messages import AgentVersion, EndedTransfer, EndedTransfers, ReceiverInfo, Receivers


@contextlib.contextmanager
def answering(title: str, **answers: Any) -> Iterator[str]:
    """A face that answers each path with one message."""
    app = Api(title)
    for name, message in answers.items():
        body = encode(message)
        app.answer("GET", f"/{name}", lambda body=body: Response(body, media_type="application/json"))
    server = ServerThread(app)
    try:
        yield server.start()
    finally:
        server.close()


SERVED = ModelStatus(
    run_id="run", version=3, sender="http://trainer:8765", engines={"vllm-0": "run/3"}, pull_s=0.1, load_s=0.04,
    paused_s=0.082, received_bytes=400_000, total_bytes=33_000_000, num_deltas=1,
)  # fmt: skip


def service(**models: ModelStatus) -> contextlib.AbstractContextManager[str]:
    return answering("weightsync rollout service", status=ServiceStatus(models=models))


def test_a_service_says_what_it_serves_and_how_it_came() -> None:
    with service(actor=SERVED) as url:
        code, text, error = run(url)
        raw = run(url, "--json")[1]
    assert (code, error) == (0, "")
    assert text.startswith("actor serves run/3 (v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved)\n")
    assert "vllm-0 run/3" in text
    assert decode(raw.encode(), ServiceStatus, what="it").models == {"actor": SERVED}


def test_what_no_engine_serves_is_not_said_to_be_served() -> None:
    """Seen red: "actor serves run/3; vllm-0 failed"."""
    errors = {"vllm-0": "ManifestMismatchError: others"}
    with service(
        actor=msgspec.structs.replace(SERVED, engines={"vllm-0": None}, errors=errors, state="waiting")
    ) as url:
        code, text, _ = run(url)
    assert code == 1
    assert "actor serves nothing now; its last was run/3; vllm-0 failed (ManifestMismatchError: others)" in text
    assert "serves run/3" not in text


def test_no_version_yet_is_said_once() -> None:
    """Seen red: "actor: no version yet (no version yet)", of one that was fetched and not loaded."""
    with service(actor=ModelStatus(engines={"actor-0": None}, pull_s=0.1)) as url:
        code, text, _ = run(url)
    assert code == 0
    assert text.startswith("actor: no version yet\n"), text


def test_a_controller_of_another_release_is_named_as_one() -> None:
    """Seen red: it was "no engine", and "nor does a weightsync controller run there"."""
    newer = {**msgspec.to_builtins(statuses.nothing_yet()), "what_is_new": 1}
    with answering("weightsync controller", status=newer) as url:
        code, _, error = run(url)
    assert code == 3
    assert re.search("status of a controller.*`what_is_new`.*ask by the controller's own release", error)
    assert "no engine" not in error


AGENT = AgentVersion(model_id="actor", run_id="run", version=3)
MORE = {"what_is_new": 1}


@pytest.mark.parametrize(
    ("whose", "answers"),
    [
        ("service", {"status": {**msgspec.to_builtins(ServiceStatus(models={"actor": SERVED})), **MORE}}),
        ("agent", {"get_version": {**msgspec.to_builtins(AGENT), **MORE}}),
        (
            "agent",
            {
                "get_version": AGENT,
                "get_transfers": {**msgspec.to_builtins(EndedTransfers(ended=(), newest=0)), **MORE},
            },
        ),
    ],
)
def test_a_service_or_an_agent_of_another_release_is_named_as_one(whose: str, answers: dict[str, Any]) -> None:
    """A host while the library is upgraded. Seen red: nothing of weightsync was said to run there."""
    with answering(f"weightsync {whose}", **answers) as url:
        code, _, error = run(url)
    assert code == 3
    assert re.search(f"of an? {whose} does.*`what_is_new`.*ask by the {whose}'s own release", error), error
    assert not re.search("no engine|nor does", error), error


def test_a_path_that_is_too_long_is_said_to_be() -> None:
    """Copied from a browser, say. Seen red: nothing of weightsync was said to run there."""
    with service(actor=SERVED) as url:
        code, _, error = run(f"{url}/status")
    assert code == 3
    said = f"there is no GET /status/status here, this is a weightsync rollout service: leave its path out, {url}"
    assert said in error
    assert "nor does" not in error


def test_a_part_of_ours_that_fails_is_not_said_to_be_gone() -> None:
    """Its log says why. Seen red: nothing of weightsync was said to run there."""

    def fails() -> None:
        raise RuntimeError("of the inside")

    for title, path in (("weightsync rollout service", "/status"), ("weightsync agent", "/get_version")):
        app = Api(title)
        app.answer("GET", path, fails)
        with contextlib.closing(ServerThread(app)) as server:
            code, _, error = run(server.start())
        assert (code, "this server failed at this request, status 500; its log says why" in error) == (3, True), error
        assert "nor does" not in error


def test_a_lease_that_is_over_is_wrong_once_something_was_served() -> None:
    why = LeaseStatus(left_s=0.0, why_none="the controller is gone")
    for model, lease, expected, said in (
        (SERVED, why, 1, "Its engines answer nobody (the controller is gone)"),
        (ModelStatus(), why, 0, "Its engines answer nobody (the controller is gone)"),
        (SERVED, LeaseStatus(left_s=12.0), 0, "Its engines may answer for 12 s without another word"),
    ):
        with answering("it", status=ServiceStatus(models={"actor": model}, lease=lease)) as url:
            code, text, _ = run(url)
        assert (code, said in text) == (expected, True), text
    refused = LeaseStatus(left_s=0.0, why_none="it has no model 'actr'", failed=True)
    with answering(
        "it", status=ServiceStatus(models={"actr": ModelStatus()}, controller="http://c:1", lease=refused)
    ) as url:
        assert run(url)[0] == 1, "it does not come right by itself"


def test_an_engine_that_is_gone_is_wrong_though_nothing_failed() -> None:
    """Seen red: "actor serves run/3 (..., proved)", and 0, where its only engine had been killed."""
    for engines, expected in (({"vllm-0": "run/3", "vllm-1": None}, 1), ({"vllm-0": "run/3"}, 0)):
        with service(actor=msgspec.structs.replace(SERVED, engines=engines)) as url:
            code, text, _ = run(url)
        assert (code, "actor is not served by vllm-1 now" in text) == (expected, bool(expected)), text
    loading = msgspec.structs.replace(SERVED, engines={"vllm-0": None}, state="loading", since_s=now_s())
    with service(actor=loading) as url:
        assert run(url)[0] == 0


def test_a_trainer_that_has_ended_is_nothing_wrong() -> None:
    with service(actor=msgspec.structs.replace(SERVED, ended=("http://trainer:8765",))) as url:
        code, text, _ = run(url)
    assert (code, "the trainer at http://trainer:8765 has ended" in text) == (0, True)


def test_a_long_transfer_says_how_far_it_is() -> None:
    moved = TransferProgress(done_bytes=4_000_000_000, total_bytes=16_000_000_000, seconds=8.0)
    pulling = ModelStatus(state="pulling", since_s=now_s() - 8.0, wanted_run_id="run", wanted=4, progress=moved)
    with service(actor=pulling) as url:
        code, text, _ = run(url)
    assert code == 0
    told = r"actor: pulling version 4 \([89]\.\d s so far; 4000 of 16000 MB \(25 %\), 500 MB/s, 24 s to go\)"
    assert re.search(told, text)


def test_what_failed_is_said_first_and_is_1() -> None:
    failed = ModelStatus(run_id="run", version=3, errors={"pull": "DigestMismatchError: other bytes came"})
    with service(verifier=SERVED, actor=failed) as url:
        code, text, _ = run(url)
    assert code == 1
    assert text.startswith("actor serves run/3; pull failed (DigestMismatchError: other bytes came)\n")


def test_an_agent_says_what_it_publishes_and_who_fetched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s = now_s()
    monkeypatch.setattr(faces, "now_s", lambda: asked_s)
    now = AgentVersion(model_id="actor", run_id="run", version=3, model_digest="wsd2:ab", coming_run_id="run", coming=4)
    ended = EndedTransfers(
        ended=(EndedTransfer(number=1, run_id="run", version=3, receiver_id="host-0", ok=True),), newest=1
    )
    host = ReceiverInfo(
        receiver_id="host-0", version="run/3", num_transfers=1, num_failed=2, received_bytes=4_200_000,
        bytes_per_s=21e6, since_s=asked_s - 60, seen_s=asked_s,
    )  # fmt: skip
    book = Receivers(receivers=(host,), num_registered=7)
    can = {"deltas": [{"base": 2, "version": 3}]}
    with answering(
        "weightsync agent", get_version=now, get_transfers=ended, receivers=book, get_capabilities=can
    ) as url:
        code, text, error = run(url)
        raw = json.loads(run(url, "--json")[1])
    assert (code, error) == (0, "")
    assert text.startswith("Proving actor run/4\nPublishes actor run/3 (1 transfers since the agent started)\n")
    for word in ("wsd2:ab", "2 -> 3", "host-0", "all of it", "Receivers, 7 in all", "4.2 MB", "21.0 MB/s", "60 s"):
        assert word in text
    assert raw["version"]["version"] == 3


class Engine:
    """Says of itself what the test wants."""

    engine_id = "engine-0"

    def __init__(self, **facts: Any) -> None:
        self._reply = EngineReply(engine_id="engine-0", world_size=2, writes_live=False, **facts)

    def call(self, op: object, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        return self._reply


VERSION = Version(run_id="run", number=3)


@pytest.mark.parametrize(
    ("facts", "code", "says"),
    [
        ({"serving": True, "version": VERSION}, 0, "engine server, 2 workers, takes whole tensors, serves run/3"),
        ({"serving": True, "artifacts": ("lora",)}, 0, "takes whole tensors of adapters, serves no"),
        ({"serving": True, "artifacts": ("lora", "model")}, 0, "takes whole tensors, and adapters, serves no"),
        ({"serving": False, "version": None}, 0, "serves no version yet, paused or refusing"),
        ({"serving": False, "version": None, "unhealthy": "an audit found other bytes"}, 1, "an audit found other"),
    ],
)
def test_an_engine(facts: dict[str, Any], code: int, says: str) -> None:
    server = EngineServer(Engine(**facts))  # type: ignore[arg-type]
    url = server.start()
    try:
        for each in (url, f"weightsync+{url}"):
            found, text, error = run(each)
            assert (found, error) == (code, ""), each
            assert says in text
    finally:
        server.close()


def test_a_vllm_server_is_not_said_to_take_adapters_whatever_its_options() -> None:
    """Seen red: "takes whole tensors of model and lora", of one without --enable-lora too."""
    handle = VllmServerEngine("http://127.0.0.1:9")
    reply = EngineReply(engine_id=handle.engine_id, serving=True, version=VERSION, artifacts=("model", "lora"))
    (fact,) = engine_facts(handle, reply)
    handle.close()
    assert "takes whole tensors, and adapters where it was started with LoRA, serves run/3" in fact.text


class Resumed(VllmStandIn):
    """Goes on after it was looked at once."""

    async def _is_paused(self) -> dict[str, Any]:
        told = await super()._is_paused()
        self.paused = None
        return told


class Synced(VllmStandIn):
    """Has another version at each look, and is in the middle of a sync each time."""

    async def _is_paused(self) -> dict[str, Any]:
        assert self.state is not None
        before = self.state.version
        assert before is not None
        after = Version(run_id=before.run_id, number=before.number + 1)
        self.state = msgspec.structs.replace(self.state, version=after)
        return await super()._is_paused()


@pytest.mark.parametrize(
    ("kind", "state", "code"),
    [
        (VllmStandIn, VllmState(version=VERSION), 1),
        (VllmStandIn, VllmState(), 1),
        (VllmStandIn, VllmState(version=VERSION, session="open"), 0),
        (Resumed, VllmState(version=VERSION), 0),
        (Synced, VllmState(version=VERSION), 0),
    ],
)
def test_a_vllm_that_nobody_will_resume_is_wrong_and_the_pause_of_a_sync_is_not(
    kind: type[VllmStandIn], state: VllmState, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: "paused or refusing", and 0, where its trainer had been killed between pause and resume."""
    monkeypatch.setattr(faces, "_PAUSE_S", 0.01)
    server = kind(write_checkpoint(tmp_path, 0), state=state)
    server.paused = "keep"
    with contextlib.closing(server):
        url = server.start()
        found, text, error = run(f"vllm+{url}")
    text = " ".join(text.split())
    assert (found, error) == (code, ""), text
    told = text.startswith("It is paused, no version is being loaded, and nothing ends that")
    assert (told, f"curl -X POST {url}/resume" in text, "The next push resumes it" in text) == (bool(code),) * 3, text


def test_what_is_none_of_ours_is_3_and_a_wrong_url_2() -> None:
    with answering("somebody else's server", health={}) as url:
        code, _, error = run(url)
    assert code == 3
    assert "nor does a weightsync controller" in error
    assert "`weightsync status" not in error, "that was asked"
    assert error.count(url) == 1
    code, _, error = run("vlm+http://127.0.0.1:9")
    assert code == 2
    assert "did you mean vllm+http" in error


def test_a_long_transfer_of_a_fleet() -> None:
    with StatusServer(statuses.moving()) as server:
        text = run(server.url)[1]
    assert "inst-1 has 4000 of 16000 MB (25 %), 500 MB/s, 24 s to go (the slowest of 2)" in text
    assert "actor 12000 of 16000 MB (75 %)" in text
