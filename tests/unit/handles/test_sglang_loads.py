"""SGLang's ways from this host's memory: a failure leaves the old version or a pause; a pickle goes when told.

The server keeps SGLang's rules and holds bytes; what loads it is what a rollout service has.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import pickletools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.standins.sglang_server import Failure, SGLangServer
from tests.unit.engine.patch_kit import MODEL_ID, manifest_of
from tests.unit.handles.sglang_kit import NAMES, SHAPE, weights, write_checkpoint
from tests.unit.load.test_sglang import Model
from tests.unit.load.test_sglang import weights as model_weights
from weightsync.engine import sglang as loader
from weightsync.errors import EngineError, InvalidRequestError, ManifestMismatchError, UnsupportedError, WeightSyncError
from weightsync.handles.sglang import LOADING, SGLangEngine
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.sglang_loads import MappedLoad
from weightsync.handles.sglang_messages import LOADER, WorkerStep, pickled_pair
from weightsync.host.engine_update import EngineUpdate, LoadReport
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import Segment
from weightsync.memory.folder import PREFIX, folder
from weightsync.net.messages import decode
from weightsync.plan.safetensors import plan_layout
from weightsync.testing.contracts import bytes_of
from weightsync.types import (
    AbortRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    Manifest,
    TensorSpec,
    Version,
)
from weightsync.types.transfer_messages import Transport

RUN = "run"


class Staging:
    """Staged versions in shared memory, as a puller leaves them."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def staged(
        self, number: int, content: dict[str, bytes] | None = None, *, manifest: Manifest | None = None, lacks: str = ""
    ) -> StagedVersion:
        """Of the kit's bytes, or of these; the file has one tensor of the manifest under another name."""
        content = weights(number) if content is None else content
        manifest = manifest or Manifest(
            version=Version(run_id=RUN, number=number), model_id=MODEL_ID,
            tensors=[TensorSpec(name=name, dtype="bfloat16", shape=SHAPE) for name in NAMES],
        )  # fmt: skip
        named = {spec.name: "another" if spec.name == lacks else spec.name for spec in manifest.tensors}
        content = {named[name]: each for name, each in content.items()}
        layout = plan_layout([msgspec.structs.replace(spec, name=named[spec.name]) for spec in manifest.tensors])
        segment = Segment(layout.total_bytes)
        self._segments.append(segment)
        header = layout.header(manifest.version, MODEL_ID)
        segment.memory[: len(header)] = header
        for part in layout.parts:
            segment.memory[part.offset : part.offset + part.nbytes] = content[part.name]
        places = {part.name: part.offset for part in layout.parts}
        offsets = {name: places[there] for name, there in named.items()}
        return StagedVersion(
            manifest=manifest, segment=segment.name, offsets=offsets, transport=Transport.TCP, num_attempts=1,
            release=lambda: None,
        )  # fmt: skip

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


class Host:
    """A server, and what brings staged versions to it."""

    def __init__(self, server: SGLangServer, staging: Staging, **handle: Any) -> None:
        self.server = server
        self.staging = staging
        self.engine = SGLangEngine(SGLangApi(server.url), engine_id="sglang", **handle)
        self.update = EngineUpdate(self.engine, MODEL_ID, pause_timeout_s=5.0)

    def load(self, staged: StagedVersion) -> LoadReport:
        return self.update.load(staged, deadline=Deadline(20))

    def held(self) -> dict[str, bytes]:
        return {name: each.tobytes() for name, each in self.server.weights.items()}

    def state(self) -> tuple[str | None, str, bool]:
        return self.server.paused, self.server.weight_version, self.server.updating


@pytest.fixture
def staging() -> Iterator[Staging]:
    with contextlib.closing(Staging()) as staging:
        yield staging


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    server = SGLangServer(write_checkpoint(tmp_path, 0))
    server.start()
    with contextlib.closing(server):
        yield server


@pytest.fixture
def host_of(server: SGLangServer, staging: Staging) -> Iterator[Callable[..., Host]]:
    with contextlib.ExitStack() as stack:

        def make(**handle: Any) -> Host:
            host = Host(server, staging, **handle)
            stack.callback(host.engine.close)
            return host

        yield make


def private_folders() -> list[str]:
    return [name for name in os.listdir(folder()) if name.startswith(f"{PREFIX}ipc-{os.getpid()}-")]


def test_the_staged_file_is_read_where_it_lies(host_of: Callable[..., Host], staging: Staging) -> None:
    host = host_of()
    before = private_folders()
    for number in (1, 2):
        host.server.calls.clear()
        report = host.load(staging.staged(number))
        assert (host.held(), host.state()) == (weights(number), (None, f"{RUN}/{number}", False))
        assert report.unprovable is not None
        assert report.checksum is not None
    (disk,) = [call.body for call in host.server.calls if call.path == "/update_weights_from_disk"]
    assert (disk["load_format"], disk["flush_cache"], disk["weight_version"]) == ("safetensors", True, None)
    assert host.server.called("/begin_weight_update", "/update_weights_from_tensor") == []
    host.engine.close()
    assert private_folders() == before, "nothing is left in shared memory"


@pytest.mark.parametrize(("how", "after"), [("error", False), ("refused", False), ("drop", True)])
def test_a_load_that_fails_leaves_it_paused(
    host_of: Callable[..., Host], staging: Staging, how: Failure, after: bool
) -> None:
    """Nobody can say which weights it has; the next load that succeeds heals it. Seen red with `touched` set late."""
    host = host_of()
    host.load(staging.staged(1))
    host.server.fail("/update_weights_from_disk", how, after=after)
    with pytest.raises(WeightSyncError):
        host.load(staging.staged(2))
    assert host.state() == ("retract", LOADING, False)
    assert not host.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).serving
    host.load(staging.staged(3))
    assert (host.held(), host.state()) == (weights(3), (None, f"{RUN}/3", False))


def test_a_file_without_all_tensors_is_not_loaded(host_of: Callable[..., Host], staging: Staging) -> None:
    """SGLang would pass over what is not there, and serve a mixture."""
    host = host_of()
    host.load(staging.staged(1))
    with pytest.raises(ManifestMismatchError, match="has not this tensor"):
        host.load(staging.staged(2, lacks=NAMES[1]))
    assert (host.held(), host.state()) == (weights(1), (None, f"{RUN}/1", False))
    host.load(staging.staged(3))
    assert host.held() == weights(3)


def test_an_abort_behind_the_commit_leaves_the_new_version(host_of: Callable[..., Host], staging: Staging) -> None:
    """Its weights are whole: what failed is that it was told to go on. Seen red with `touched` left set."""
    host = host_of()
    host.load(staging.staged(1))
    host.server.fail("/continue_generation", "error")
    with pytest.raises(EngineError, match="injected"):
        host.load(staging.staged(2))
    assert (host.held(), host.state()) == (weights(2), (None, f"{RUN}/2", False))


def test_a_bracket_that_a_dead_trainer_left_is_closed(host_of: Callable[..., Host], staging: Staging) -> None:
    host = host_of()
    host.server.updating = True
    host.load(staging.staged(1))
    assert host.state() == (None, f"{RUN}/1", False)


class Restarts:
    """The server is killed and started again by its supervisor, just before a step reaches it."""

    def __init__(self, host: Host, before: EngineOp) -> None:
        self.start = dict(host.server.weights), host.server.model_path
        self._host, self._before, self._call = host, before, host.engine.call
        host.engine.call = self._seen  # type: ignore[method-assign]

    def _seen(self, op: EngineOp, request: Any, *, timeout_s: float) -> EngineReply:
        if op is self._before:
            self._host.engine.call = self._call  # type: ignore[method-assign]
            server = self._host.server
            server.weights, server.model_path = dict(self.start[0]), self.start[1]
            server.paused, server.weight_version, server.updating = None, "default", False
        return self._call(op, request, timeout_s=timeout_s)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_server_that_restarts_before_the_commit_is_not_called_the_new_version(
    host_of: Callable[..., Host], staging: Staging, checksums: bool
) -> None:
    """It holds what it was started with. Seen red with a commit that looks only behind the name."""
    host = host_of(checksums=checksums)
    host.load(staging.staged(1))
    Restarts(host, EngineOp.COMMIT)
    with pytest.raises(EngineError, match="restarted in the middle"):
        host.load(staging.staged(2))
    assert (host.state(), host.held()) == ((None, "default", False), weights(1))
    assert host.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).version is None
    host.load(staging.staged(3))
    assert (host.held(), host.state()) == (weights(3), (None, f"{RUN}/3", False))


def test_a_server_that_restarts_before_an_abort_is_not_called_the_former_version(
    host_of: Callable[..., Host], staging: Staging
) -> None:
    """Nothing was loaded, so the pause would end under the former name. Seen red without the look in the abort."""
    host = host_of()
    host.load(staging.staged(1))
    Restarts(host, EngineOp.ABORT)
    with pytest.raises(ManifestMismatchError):
        host.load(staging.staged(2, lacks=NAMES[1]))
    assert host.state() == (None, "default", False)
    assert host.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).version is None
    host.load(staging.staged(3))
    assert (host.held(), host.state()) == (weights(3), (None, f"{RUN}/3", False))


def test_weights_that_change_between_stage_and_commit_are_no_version(
    host_of: Callable[..., Host], staging: Staging
) -> None:
    """By a name alone they are the same. Seen red without the second checksum."""
    host = host_of()
    call = host.engine.call

    def spoils(op: EngineOp, request: Any, *, timeout_s: float) -> EngineReply:
        if op is EngineOp.COMMIT:
            host.server.weights = {**host.server.weights, NAMES[0]: host.server.weights[NAMES[1]]}
        return call(op, request, timeout_s=timeout_s)

    host.engine.call = spoils  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="checksum is another"):
        host.load(staging.staged(1))
    assert host.state() == ("retract", LOADING, False)
    host.engine.call = call  # type: ignore[method-assign]
    host.load(staging.staged(2))
    assert (host.held(), host.state()) == (weights(2), (None, f"{RUN}/2", False))


# --- by our loader in SGLang's workers ---


def test_a_server_without_our_loader_is_not_sent_a_pickle(host_of: Callable[..., Host], staging: Staging) -> None:
    """It would end: SGLang's worker raises at a loader that it does not know."""
    host = host_of(load_by="tensor")
    with pytest.raises(UnsupportedError, match=f"--custom-weight-loader {LOADER}"):
        host.load(staging.staged(1))
    assert host.server.called("/pause_generation", "/update_weights_from_tensor") == []


def test_an_init_that_fails_leaves_no_folder(host_of: Callable[..., Host], staging: Staging) -> None:
    """Seen red: it stayed, as long as somebody looked at the error."""
    host, before = host_of(load_by="tensor"), private_folders()
    host.server.loaders = [LOADER]
    look = host.engine._look

    def fails(deadline: Deadline) -> Any:
        if private_folders() != before:
            raise EngineError("injected")
        return look(deadline)

    host.engine._look = fails  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="injected"):
        host.load(staging.staged(1))
    assert private_folders() == before


def test_workers_elsewhere_leave_no_answer(host_of: Callable[..., Host], staging: Staging) -> None:
    host = host_of(load_by="tensor")
    host.server.loaders = [LOADER]
    with pytest.raises(EngineError, match="left no answer"):
        host.load(staging.staged(1))
    assert (host.held(), host.state()) == (weights(0), (None, "default", False))


class Worker:
    """One of SGLang's workers: it unpickles, and hands on to our loader."""

    def __init__(self) -> None:
        self.model = Model()

    def take(self, texts: Sequence[str]) -> None:
        (text,) = texts
        loader.load_weights(self.model, pickle.loads(base64.b64decode(text)))  # noqa: S301


def staged_model(staging: Staging, number: int) -> StagedVersion:
    tensors = model_weights(number)
    manifest = manifest_of(tensors, number)
    content = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    return staging.staged(number, content, manifest=manifest)


def test_a_worker_stages_proves_and_commits(host_of: Callable[..., Host], staging: Staging) -> None:
    """One worker proves every live byte; what fails before the commit is not seen by anybody."""
    host, worker = host_of(load_by="tensor"), Worker()
    host.server.loaders, host.server.take = [LOADER], worker.take
    report = host.load(staged_model(staging, 1))
    assert report.unprovable is None
    live = {name: bytes_of(tensor) for name, tensor in worker.model.state_dict().items()}
    worker.model.fails_at = "norm.weight"
    with pytest.raises(WeightSyncError, match="injected"):
        host.load(staged_model(staging, 2))
    assert host.state() == ("retract", LOADING, False), "the model's own loader failed half-way"
    worker.model.fails_at = None
    host.load(staged_model(staging, 3))
    assert host.state() == (None, f"{RUN}/3", False)
    other = staged_model(staging, 4)
    with pytest.raises(WeightSyncError):
        host.load(spoilt(other, staging))
    assert host.state() == (None, f"{RUN}/3", False), "the bytes were not those of the digests"
    host.load(staged_model(staging, 1 + 4))
    assert live != {name: bytes_of(tensor) for name, tensor in worker.model.state_dict().items()}


def test_an_abort_that_fails_in_a_worker_still_ends_the_pause(
    host_of: Callable[..., Host], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: nothing was loaded. Seen red with two kinds of errors suppressed."""
    host, worker = host_of(load_by="tensor"), Worker()
    host.server.loaders, host.server.take = [LOADER], worker.take
    host.load(staged_model(staging, 1))
    step = MappedLoad._step

    def fails(self: MappedLoad, op: EngineOp, *args: Any, **options: Any) -> Any:
        if op is EngineOp.ABORT:
            raise InvalidRequestError("injected")
        return step(self, op, *args, **options)

    monkeypatch.setattr(MappedLoad, "_step", fails)
    bad = spoilt(staged_model(staging, 2), staging)
    with pytest.raises(WeightSyncError):
        host.load(bad)
    assert host.state() == (None, f"{RUN}/1", False)


def test_a_chunk_under_way_reads_its_own_answer_though_an_abort_comes(
    host_of: Callable[..., Host], staging: Staging
) -> None:
    """Seen red: it looked for the answer to the abort's step, and its worker "left no answer"."""
    host, worker = host_of(load_by="tensor"), Worker()
    host.server.loaders, host.server.take = [LOADER], worker.take
    host.load(staged_model(staging, 1))

    def take(texts: Sequence[str]) -> None:
        worker.take(texts)
        ((_, told),) = pickle.loads(base64.b64decode(texts[0]))  # noqa: S301
        if decode(told.numpy().tobytes(), WorkerStep, what="a step").op is EngineOp.UPDATE_WEIGHTS:
            request = AbortRequest(session=str(host.engine._paused_by), reason="enough")
            host.engine.call(EngineOp.ABORT, request, timeout_s=5)

    host.server.take = take
    with pytest.raises(WeightSyncError, match="was aborted"):
        host.load(staged_model(staging, 2))
    assert host.state() == (None, f"{RUN}/1", False)


def spoilt(staged: StagedVersion, staging: Staging) -> StagedVersion:
    """The same with one byte of another value."""
    segment = next(each for each in staging._segments if each.name == staged.segment)
    place = staged.offsets["norm.weight"]
    segment.memory[place] ^= 1
    return staged


def test_what_is_pickled_can_do_nothing_else() -> None:
    """One list, one pair, one call of `torch.ByteTensor`."""
    data = bytes(range(256))
    text = base64.b64decode(pickled_pair("weightsync", data))
    ops = [(op.name, arg) for op, arg, _ in pickletools.genops(text)]
    assert [arg for name, arg in ops if name in ("GLOBAL", "STACK_GLOBAL", "INST")] == ["torch ByteTensor"]
    assert sum(name in ("REDUCE", "BUILD", "OBJ", "NEWOBJ") for name, _ in ops) == 1
    ((name, tensor),) = pickle.loads(text)  # noqa: S301
    assert (name, tensor.numpy().tobytes()) == ("weightsync", data)
    more = base64.b64decode(pickled_pair("weightsync", data * 1024))
    assert len(list(pickletools.genops(more))) == len(ops), "no step for each byte"
