"""Contract suites: what every implementation of an interface has to keep, as tests to inherit.

    class TestMyLoader(WeightLoaderContract):
        def make_loader(self) -> WeightLoader: ...
        def make_weights(self, seed: int) -> dict[str, torch.Tensor]: ...

Each suite is an abstract class with one or two hooks that build the implementation. A suite speaks to it through
the interface alone, waits for events and never for time to pass, and ends within seconds.

One long file: three suites that share nothing but a few lines, each to be read beside its interface.
"""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from weightsync.clients.fanout import EngineFanout, in_thread
from weightsync.errors import (
    DeadlineExceededError,
    GroupJoinError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    NoEnginesError,
    StateError,
    SyncFailedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.load.base import WeightLoader
from weightsync.tensors import byte_array, spec_of
from weightsync.testing.loader_patches import LoaderPatchCases
from weightsync.transfer.base import (
    ChunkSharer,
    SharedChunk,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    init_requests,
)
from weightsync.types import (
    AbortRequest,
    BeginRequest,
    Box,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    CudaIpcWeightUpdateRequest,
    Deadline,
    EmptyWeightSyncInitInfo,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    Full,
    InferenceEngineClient,
    InitRequest,
    Manifest,
    Patch,
    PauseRequest,
    ResumeRequest,
    SharedMemoryHandle,
    StageRequest,
    TensorSpec,
    UpdateRequest,
    Version,
    WeightChunk,
    WeightSyncInitInfo,
)

LONG_S = 10.0
"""A deadline that no healthy implementation meets."""


def manifest_of(weights: Mapping[str, torch.Tensor], number: int = 1, **changes: Any) -> Manifest:
    """The manifest of whole tensors, in their order."""
    fields: dict[str, Any] = {
        "version": Version(run_id="contract", number=number),
        "model_id": "default",
        "tensors": tuple(spec_of(name, tensor) for name, tensor in weights.items()),
    }
    return Manifest(**{**fields, **changes})


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in their logical order, whatever its strides."""
    return byte_array(tensor.detach().contiguous()).tobytes()


class WeightLoaderContract(LoaderPatchCases):
    """What every `WeightLoader` keeps: the bracket, and that nothing half-loaded is ever taken for whole."""

    @abc.abstractmethod
    def make_loader(self) -> WeightLoader:
        """A new loader of a new model; models of one class start with equal weights."""

    @abc.abstractmethod
    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Every tensor that the loader takes, at least two of them, in stream order by manifest name; other seeds
        give other bytes in every tensor that is not empty."""

    def live(self, loader: WeightLoader) -> dict[str, bytes]:
        """What the engine computes with now. Override it where `live_tensors` can't tell."""
        return {held.spec.name: bytes_of(held.tensor) for held in loader.live_tensors()}

    def load(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor], *, chunks: int = 2) -> None:
        """Loads all of `weights` in so many chunks."""
        items = list(weights.items())
        size = -(-len(items) // chunks)
        for start in range(0, len(items), size):
            loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in items[start : start + size])

    def sync(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor], number: int) -> None:
        """One whole bracket."""
        manifest = manifest_of(weights, number)
        loader.begin(manifest)
        self.load(loader, weights)
        loader.verify()
        loader.commit(manifest.version)

    def check_live(self, loader: WeightLoader, weights: Mapping[str, torch.Tensor]) -> None:
        """The live bytes are those of `weights`, under any of a tied tensor's names."""
        live = self.live(loader)
        for name, tensor in weights.items():
            assert live[name] == bytes_of(tensor), name

    def check_unchanged(self, loader: WeightLoader, before: Mapping[str, bytes]) -> None:
        """Serves exactly what it served before."""
        live = self.live(loader)
        assert loader.healthy
        assert all(before[name] == data for name, data in live.items() if name in before)

    def test_every_commit_serves_exactly_what_was_loaded(self) -> None:
        """Several in a row: buffers that alternate must not mix up their turns."""
        loader = self.make_loader()
        assert loader.healthy
        for number in (1, 2, 3, 4):
            weights = self.make_weights(number)
            self.sync(loader, weights, number)
            assert loader.healthy
            self.check_live(loader, weights)

    def test_the_same_version_can_be_loaded_again(self) -> None:
        """A retry after a lost answer."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        self.sync(loader, weights, 1)
        self.check_live(loader, weights)

    def test_the_updates_memory_is_free_when_load_weights_returns(self) -> None:
        """The transport overwrites its bucket at once."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        for name, tensor in weights.items():
            borrowed = tensor.detach().clone()
            loader.load_weights([Full(name=name, tensor=borrowed)])
            if borrowed.numel():
                borrowed.view(torch.uint8).fill_(0xEE) if borrowed.dim() else borrowed.zero_()
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_updates_are_taken_lazily_and_an_error_of_their_source_ends_the_chunk(self) -> None:
        """The decoder proves bytes while the loader pulls."""
        loader, weights = self.make_loader(), self.make_weights(2)

        def stream() -> Iterator[Full]:
            name = next(iter(weights))
            yield Full(name=name, tensor=weights[name])
            raise LoadError("the decoder failed")

        loader.begin(manifest_of(weights))
        with pytest.raises(LoadError, match="the decoder failed"):
            loader.load_weights(stream())
        loader.abort("as told")
        self.sync(loader, weights, 2)
        self.check_live(loader, weights)

    @pytest.mark.parametrize("fault", ["shape", "dtype", "missing", "extra", "part"])
    def test_a_manifest_that_does_not_fit_changes_nothing(self, fault: str) -> None:
        """Refused at begin, by name, and the next begin works."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before = self.live(loader)
        specs = list(manifest_of(weights).tensors)
        odd = next(spec for spec in specs if spec.shape and spec.nbytes)
        at = specs.index(odd)
        match fault:
            case "shape":
                specs[at] = TensorSpec(name=odd.name, dtype=odd.dtype, shape=(*odd.shape, 2))
            case "dtype":
                specs[at] = TensorSpec(
                    name=odd.name, dtype="float64" if odd.dtype != "float64" else "float32", shape=odd.shape
                )
            case "missing":
                del specs[at]
            case "extra":
                odd = TensorSpec(name="nobody.has.this", dtype="uint8", shape=(1,))
                specs.append(odd)
            case "part":
                half = (odd.shape[0] // 2, *odd.shape[1:])
                box = Box(offset=(0,) * len(half), shape=half)
                specs[at] = TensorSpec(name=odd.name, dtype=odd.dtype, shape=odd.shape, box=box)
        with pytest.raises(ManifestMismatchError) as caught:
            loader.begin(manifest_of(weights, 2, tensors=tuple(specs)))
        # What the manifest lacks has no name in it: the loader says its own.
        assert caught.value.parameter == odd.name or (fault == "missing" and caught.value.parameter)
        self.check_unchanged(loader, before)
        self.sync(loader, self.make_weights(3), 3)
        self.check_live(loader, self.make_weights(3))

    def test_one_bracket_at_a_time(self) -> None:
        """A second begin disturbs nothing."""
        loader, weights = self.make_loader(), self.make_weights(1)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        with pytest.raises(StateError):
            loader.begin(manifest_of(weights, 2))
        self.load(loader, weights)
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_nothing_works_outside_a_bracket(self) -> None:
        """Neither before a begin, nor after a commit, nor after an abort."""
        loader, weights = self.make_loader(), self.make_weights(1)
        version = manifest_of(weights).version

        def refused() -> None:
            before = self.live(loader)
            steps: list[Callable[[], None]] = [
                lambda: self.load(loader, weights),
                loader.verify,
                lambda: loader.commit(version),
            ]
            for step in steps:
                with pytest.raises(StateError):
                    step()
            assert self.live(loader) == before

        refused()
        self.sync(loader, weights, 1)
        refused()
        loader.begin(manifest_of(weights, 2))
        loader.abort("as told")
        refused()

    def test_what_is_not_complete_is_not_verified_and_not_committed(self) -> None:
        """One tensor short."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        last = list(weights)[-1]
        loader.begin(manifest)
        self.load(loader, {name: tensor for name, tensor in weights.items() if name != last})
        with pytest.raises(ManifestMismatchError) as caught:
            loader.verify()
        assert caught.value.parameter == last
        with pytest.raises(StateError):
            loader.commit(manifest.version)
        loader.abort("as told")

    def test_what_is_not_verified_is_not_committed(self) -> None:
        """Everything came, nobody looked."""
        loader, weights = self.make_loader(), self.make_weights(2)
        manifest = manifest_of(weights)
        loader.begin(manifest)
        self.load(loader, weights)
        with pytest.raises(StateError):
            loader.commit(manifest.version)
        loader.verify()
        loader.commit(manifest.version)
        self.check_live(loader, weights)

    def test_only_the_version_that_was_loaded_is_committed(self) -> None:
        """Neither another number nor another run."""
        loader, weights = self.make_loader(), self.make_weights(2)
        loader.begin(manifest_of(weights, 2))
        self.load(loader, weights)
        loader.verify()
        for other in (Version(run_id="contract", number=3), Version(run_id="other", number=2)):
            with pytest.raises(StateError):
                loader.commit(other)
        loader.abort("as told")

    @pytest.mark.parametrize("fault", ["unknown", "twice", "shape", "dtype", "patch"])
    def test_an_update_that_does_not_fit_is_refused_by_name(self, fault: str) -> None:
        """The caller aborts; the next bracket works."""
        loader, weights = self.make_loader(), self.make_weights(2)
        loader.begin(manifest_of(weights))
        name, tensor = next((name, tensor) for name, tensor in weights.items() if tensor.dim() and tensor.numel())
        update: Any = Full(name=name, tensor=tensor)
        match fault:
            case "unknown":
                update = Full(name="nobody.has.this", tensor=tensor)
            case "twice":
                loader.load_weights([update])
            case "shape":
                update = Full(name=name, tensor=tensor.unsqueeze(0))
            case "dtype":
                update = Full(name=name, tensor=tensor.view(torch.uint8))
                if tensor.dtype == torch.uint8:
                    update = Full(name=name, tensor=tensor.view(torch.int8))
            case "patch":
                update = Patch(name=name, positions=torch.tensor([0]), values=tensor.reshape(-1)[:1])
        with pytest.raises((ManifestMismatchError, UnsupportedError)) as caught:
            loader.load_weights([update])
        assert caught.value.parameter == update.name
        loader.abort("as told")
        self.sync(loader, self.make_weights(3), 3)
        self.check_live(loader, self.make_weights(3))

    @pytest.mark.parametrize("when", ["begun", "one chunk", "loaded", "verified"])
    def test_an_abort_serves_the_old_weights_or_nothing(self, when: str) -> None:
        """And the next bracket serves the new ones, whole."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before, new = self.live(loader), self.make_weights(2)
        loader.begin(manifest_of(new, 2))
        if when == "one chunk":
            name = next(name for name, tensor in new.items() if tensor.numel())
            loader.load_weights([Full(name=name, tensor=new[name])])
        elif when != "begun":
            self.load(loader, new)
        if when == "verified":
            loader.verify()
        for _ in range(2):
            loader.abort("as told")
        if loader.healthy:
            assert self.live(loader) == before, "healthy means: exactly the old weights"
        else:
            assert loader.writes_live, "only who writes over live weights can lose them"
            assert when != "begun"
        self.sync(loader, self.make_weights(3), 3)
        assert loader.healthy
        self.check_live(loader, self.make_weights(3))

    def test_abort_without_a_bracket_is_harmless(self) -> None:
        """Before the first and after a commit."""
        loader, weights = self.make_loader(), self.make_weights(1)
        loader.abort("nothing to abort")
        self.sync(loader, weights, 1)
        loader.abort("too late")
        self.check_live(loader, weights)
        assert loader.healthy

    def test_while_loading_the_live_weights_are_whole_or_not_called_healthy(self) -> None:
        """`healthy` is what an engine asks before it serves: it must not be True over half-written weights."""
        loader, weights = self.make_loader(), self.make_weights(1)
        self.sync(loader, weights, 1)
        before, new = self.live(loader), self.make_weights(2)
        loader.begin(manifest_of(new, 2))
        assert loader.healthy, "nothing was written yet"
        self.load(loader, dict(list(new.items())[: len(new) // 2]), chunks=1)
        if loader.healthy:
            assert self.live(loader) == before
        else:
            assert loader.writes_live
        loader.abort("as told")

    def test_live_tensors_are_what_commit_will_serve(self) -> None:
        """Old before verify (where loading is beside the live weights), new from verify on."""
        loader, old, new = self.make_loader(), self.make_weights(1), self.make_weights(2)
        self.sync(loader, old, 1)
        loader.begin(manifest_of(new, 2))
        self.load(loader, new)
        if not loader.writes_live:
            self.check_live(loader, old)
        loader.verify()
        with contextlib.suppress(UnsupportedError):
            proved = {held.spec.name: held for held in loader.live_tensors()}
            for name, tensor in new.items():
                assert bytes_of(proved[name].tensor) == bytes_of(tensor)
                assert proved[name].spec.shape == tuple(tensor.shape)
        loader.commit(Version(run_id="contract", number=2))
        self.check_live(loader, new)


class ScriptedEngine:
    """An `EngineHandle` that does what a test says, and remembers what it was asked.

    Args:
        engine_id: its id.
        world_size: what it reports.
        fails: errors by step.
        waits: events by step; the step is answered when the event is set, or never.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        world_size: int = 1,
        fails: Mapping[EngineOp, Exception] | None = None,
        waits: Mapping[EngineOp, threading.Event] | None = None,
    ) -> None:
        self._engine_id = engine_id
        self.world_size = world_size
        self.fails = dict(fails or {})
        self.waits = dict(waits or {})
        self.asked: list[tuple[EngineOp, EngineRequest]] = []
        self.entered = {op: threading.Event() for op in EngineOp}

    @property
    def engine_id(self) -> str:
        """See `EngineHandle`."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """See `EngineHandle`."""
        self.asked.append((op, request))
        self.entered[op].set()
        if op in self.waits and not self.waits[op].wait(max(timeout_s, LONG_S)):
            raise DeadlineExceededError("the test never let this step go on")
        if op in self.fails:
            raise self.fails[op]
        return EngineReply(engine_id=self._engine_id, world_size=self.world_size)


_SESSION = "a session"
_MANIFEST = Manifest(
    version=Version(run_id="contract", number=1),
    model_id="default",
    tensors=(TensorSpec(name="w", dtype="uint8", shape=(4,)),),
)
_Blocking = Callable[[InferenceEngineClient, float], object]
_BLOCKING: dict[EngineOp, _Blocking] = {
    EngineOp.DESCRIBE: lambda client, s: client.get_world_sizes(timeout_s=s),
    EngineOp.BEGIN: lambda client, s: client.begin(
        BeginRequest(session=_SESSION, manifest=_MANIFEST, deadline_s=LONG_S), timeout_s=s
    ),
    EngineOp.STAGE: lambda client, s: client.stage(StageRequest(session=_SESSION, manifest=_MANIFEST), timeout_s=s),
    EngineOp.PAUSE: lambda client, s: client.pause(
        PauseRequest(session=_SESSION, timeout_s=LONG_S, lease_s=LONG_S), timeout_s=s
    ),
    EngineOp.RESUME: lambda client, s: client.resume(ResumeRequest(session=_SESSION), timeout_s=s),
    EngineOp.UPDATE_WEIGHTS: lambda client, s: client.update_weights(_update(), timeout_s=s).result(s),
}
_FAIL_FAST = sorted(_BLOCKING)


def _update() -> BroadcastWeightUpdateRequest:
    return BroadcastWeightUpdateRequest(
        session=_SESSION, seq=0, names=("w",), dtypes=("uint8",), shapes=((4,),), offsets=(0,), bucket_bytes=256
    )


class InferenceEngineClientContract(abc.ABC):
    """What every `InferenceEngineClient` keeps: a failure is never turned into a wait, and never into a success."""

    @abc.abstractmethod
    def make_client(self, engines: Sequence[EngineHandle]) -> InferenceEngineClient:
        """A client whose calls reach these engines, in this order. What it opens is closed by `close_all`."""

    def close_all(self) -> None:  # noqa: B027 (a hook that may stay empty)
        """Gives back what `make_client` opened. Called after each test."""

    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        yield
        self.close_all()

    def test_every_engine_is_asked_and_answers_under_its_own_name(self) -> None:
        """World sizes are each engine's own; the order is that of the rank offsets."""
        engines = [
            ScriptedEngine("b", world_size=2),
            ScriptedEngine("a", world_size=1),
            ScriptedEngine("c", world_size=4),
        ]
        client = self.make_client(engines)
        assert list(client.engine_ids) == ["b", "a", "c"]
        sizes = client.get_world_sizes(timeout_s=LONG_S)
        assert list(sizes.items()) == [("b", 2), ("a", 1), ("c", 4)]

    @pytest.mark.parametrize("op", _FAIL_FAST)
    def test_each_step_reaches_every_engine_once(self, op: EngineOp) -> None:
        """With the request that was given."""
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        _BLOCKING[op](self.make_client(engines), LONG_S)
        for engine in engines:
            assert [asked for asked, _ in engine.asked] == [op]
        assert engines[0].asked == engines[1].asked

    def test_each_engine_gets_its_own_init_request(self) -> None:
        """And init returns at once: the sender joins meanwhile."""
        go = threading.Event()
        engines = [ScriptedEngine(name, waits={EngineOp.INIT: go}) for name in ("a", "b")]
        requests = {name: _init(rank) for rank, name in enumerate(("a", "b"), start=1)}
        future = self.make_client(engines).init(requests, timeout_s=LONG_S)
        assert all(engine.entered[EngineOp.INIT].wait(LONG_S) for engine in engines)
        assert not future.done()
        go.set()
        assert set(future.result(LONG_S)) == {"a", "b"}
        assert [engine.asked[0][1] for engine in engines] == [requests["a"], requests["b"]]

    @pytest.mark.parametrize("op", _FAIL_FAST)
    def test_one_failure_is_told_while_another_engine_still_works(self, op: EngineOp) -> None:
        """Rank 0 must not sit in a broadcast for an engine that has failed already."""
        go = threading.Event()
        slow = ScriptedEngine("slow", waits={op: go})
        bad = ScriptedEngine("bad", fails={op: LoadError("no room", parameter="w")})
        client = self.make_client([slow, bad])
        started = time.monotonic()
        try:
            with pytest.raises(SyncFailedError) as caught:
                _BLOCKING[op](client, LONG_S)
        finally:
            go.set()
        assert time.monotonic() - started < LONG_S / 2
        assert list(caught.value.causes) == ["bad"]
        cause = caught.value.causes["bad"]
        assert type(cause) is LoadError
        assert (cause.parameter, cause.peer) == ("w", "bad")

    @pytest.mark.parametrize("op", [EngineOp.BEGIN, EngineOp.STAGE, EngineOp.PAUSE])
    def test_an_engine_that_never_answers_is_a_typed_error_that_names_it(self, op: EngineOp) -> None:
        """Within the timeout."""
        never = threading.Event()
        client = self.make_client([ScriptedEngine("good"), ScriptedEngine("mute", waits={op: never})])
        started = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match="mute"):
                _BLOCKING[op](client, 0.3)
        finally:
            never.set()
        assert time.monotonic() - started < LONG_S / 2

    def test_an_error_of_an_engine_that_is_not_ours_is_typed(self) -> None:
        """Whatever an engine raises."""
        client = self.make_client([ScriptedEngine("e", fails={EngineOp.STAGE: ZeroDivisionError("oops")})])
        with pytest.raises(SyncFailedError) as caught:
            _BLOCKING[EngineOp.STAGE](client, LONG_S)
        assert isinstance(caught.value.causes["e"], WeightSyncError)
        assert caught.value.causes["e"].peer == "e"

    def test_commit_waits_for_everybody(self) -> None:
        """Which engines have committed must be known, whoever failed first."""
        go = threading.Event()
        slow = ScriptedEngine("slow", waits={EngineOp.COMMIT: go})
        bad = ScriptedEngine("bad", fails={EngineOp.COMMIT: LoadError("no")})
        client = self.make_client([slow, bad])
        outcome = in_thread(
            lambda: client.commit(CommitRequest(session=_SESSION), timeout_s=LONG_S), name="contract-commit"
        )
        assert bad.entered[EngineOp.COMMIT].wait(LONG_S)
        assert slow.entered[EngineOp.COMMIT].wait(LONG_S)
        assert not outcome.done()
        go.set()
        error = outcome.exception(LONG_S)
        assert isinstance(error, SyncFailedError)
        assert set(error.causes) == {"bad"}
        assert "slow" in str(error), "it says who serves the new version"

    def test_commit_that_somebody_never_answers(self) -> None:
        """Ends at its timeout and names who did not."""
        never = threading.Event()
        client = self.make_client([ScriptedEngine("good"), ScriptedEngine("mute", waits={EngineOp.COMMIT: never})])
        try:
            with pytest.raises(SyncFailedError) as caught:
                client.commit(CommitRequest(session=_SESSION), timeout_s=0.3)
        finally:
            never.set()
        assert isinstance(caught.value.causes["mute"], DeadlineExceededError)
        assert "good" not in caught.value.causes

    def test_describe_and_abort_never_raise(self) -> None:
        """They return what failed."""
        never = threading.Event()
        fault = LoadError("no")
        engines = [
            ScriptedEngine("good"),
            ScriptedEngine("bad", fails={EngineOp.DESCRIBE: fault, EngineOp.ABORT: fault}),
            ScriptedEngine("mute", waits={EngineOp.DESCRIBE: never, EngineOp.ABORT: never}),
        ]
        client = self.make_client(engines)
        try:
            replies, errors = client.describe(timeout_s=0.3)
            failed = client.abort(AbortRequest(session=_SESSION, reason="as told"), timeout_s=0.3)
        finally:
            never.set()
        assert set(replies) == {"good"}
        assert set(errors) == set(failed) == {"bad", "mute"}
        assert type(errors["bad"]) is LoadError
        assert isinstance(failed["mute"], DeadlineExceededError)

    def test_only_leaves_the_others_alone(self) -> None:
        """And keeps the order."""
        engines = [ScriptedEngine("a"), ScriptedEngine("b"), ScriptedEngine("c")]
        client = self.make_client(engines).only(["c", "a"])
        assert list(client.engine_ids) == ["a", "c"]
        client.resume(ResumeRequest(session=_SESSION), timeout_s=LONG_S)
        assert [len(engine.asked) for engine in engines] == [1, 0, 1]

    @pytest.mark.parametrize("op", [*_FAIL_FAST, EngineOp.COMMIT])
    def test_no_engine_is_a_failure_never_a_success(self, op: EngineOp) -> None:
        """Zero engines found and a sync reported as good is a fault that systems of this kind had."""
        client = self.make_client([ScriptedEngine("a")]).only([])
        step: _Blocking = _BLOCKING.get(op) or (lambda c, s: c.commit(CommitRequest(session=_SESSION), timeout_s=s))
        with pytest.raises(NoEnginesError):
            step(client, LONG_S)

    def test_a_failure_leaves_nothing_behind(self) -> None:
        """The next call is a new one."""
        engine = ScriptedEngine("e", fails={EngineOp.BEGIN: LoadError("once")})
        client = self.make_client([engine])
        with pytest.raises(SyncFailedError):
            _BLOCKING[EngineOp.BEGIN](client, LONG_S)
        engine.fails.clear()
        _BLOCKING[EngineOp.BEGIN](client, LONG_S)


def _init(rank: int) -> InitRequest:
    info = EmptyWeightSyncInitInfo(strategy="none", group_name="g")
    return InitRequest(run_id="r", model_id="m", info=info, rank_offset=rank)


Received = tuple[str, torch.dtype, tuple[int, ...], bytes]
"""Name, dtype, shape and bytes of a tensor that arrived."""


class ReceiverEngine:
    """An `EngineHandle` around bare receivers: joins at init, receives what is announced, keeps the bytes.

    Args:
        engine_id: its id.
        strategy: makes its receivers.
        world_size: how many.
    """

    def __init__(self, engine_id: str, strategy: WeightTransferStrategy, *, world_size: int = 1) -> None:
        self._engine_id = engine_id
        self._strategy = strategy
        self.world_size = world_size
        self.receivers: list[WeightTransferReceiver] = []
        self._got: list[dict[int, list[Received]]] = [{} for _ in range(world_size)]
        self.before_load: Callable[[int], None] = lambda seq: None
        self._turn = threading.Condition()
        self._next = [0] * world_size

    @property
    def engine_id(self) -> str:
        """See `EngineHandle`."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """See `EngineHandle`."""
        match request:
            case InitRequest():
                self.receivers = _at_once(
                    lambda i: self._strategy.create_receiver(request.info, rank=request.rank_offset + i),
                    self.world_size,
                )
            case UpdateRequest(update=update):
                _at_once(lambda i: self._receive(i, update), self.world_size)
        return EngineReply(engine_id=self._engine_id, world_size=self.world_size)

    def got(self, index: int = 0) -> list[Received]:
        """What arrived at a worker, in the order of the chunks' numbers."""
        return [item for _, items in sorted(self._got[index].items()) for item in items]

    def forget(self) -> None:
        """Ready for another session."""
        self._got = [{} for _ in range(self.world_size)]
        self._next = [0] * self.world_size

    def close(self) -> None:
        """Closes all receivers."""
        for receiver in self.receivers:
            receiver.close()

    def _receive(self, index: int, update: Any) -> None:
        receiver = self.receivers[index]
        with self._turn:
            assert self._turn.wait_for(lambda: self._next[index] == update.seq, LONG_S)
        updates = receiver.receive_weights(update, deadline=Deadline(LONG_S))
        with self._turn:
            self._next[index] += 1
            self._turn.notify_all()
        self.before_load(update.seq)
        got: list[Received] = []
        for item in updates:
            assert isinstance(item, Full)
            got.append((item.name, item.tensor.dtype, tuple(item.tensor.shape), bytes_of(item.tensor)))
        receiver.release(update)
        self._got[index][update.seq] = got


def _at_once(function: Callable[[int], Any], count: int) -> list[Any]:
    calls = [in_thread(lambda i=i: function(i), name=f"contract-{i}") for i in range(count)]  # type: ignore[misc]
    return [call.result(2 * LONG_S) for call in calls]


class WeightTransferContract(abc.ABC):
    """What every pair of `WeightTransferSender` and `WeightTransferReceiver` keeps, both ends in one process."""

    ends_meet = True
    """Whether ends meet each other when they are created, so that one that stays away is named on both sides."""

    @abc.abstractmethod
    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        """A strategy whose both ends can be made in this process."""

    def ready(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The chunks as the sender gets them: lent first, where the strategy lends, as a lone training rank does it."""
        sharer = self.make_strategy(join_timeout_s=LONG_S).create_sharer()
        if sharer is None:
            yield from chunks
            return
        self._sharers.append(sharer)  # it outlives the generator: the last chunks are read after it has ended
        num_let_go = 0

        def let_go() -> None:
            nonlocal num_let_go
            num_let_go += 1

        for seq, chunk in enumerate(chunks):
            assert num_let_go > seq - sharer.num_slots, "asked for a chunk whose memory is still read"
            yield SharedChunk.of(chunk, (sharer.share(chunk, seq),), let_go=let_go)

    @contextlib.contextmanager
    def meet(
        self, *world_sizes: int, join_timeout_s: float = LONG_S
    ) -> Iterator[tuple[WeightTransferSender, EngineFanout, list[ReceiverEngine], WeightSyncInitInfo]]:
        """A sender and engines of these world sizes that have met."""
        self._sharers: list[ChunkSharer] = []
        strategy = self.make_strategy(join_timeout_s=join_timeout_s)
        engines = [ReceiverEngine(f"e{i}", strategy, world_size=size) for i, size in enumerate(world_sizes)]
        client = EngineFanout(engines)
        sizes = {engine.engine_id: engine.world_size for engine in engines}
        info, token = strategy.create_init_info(sizes)
        joined = client.init(init_requests(info, sizes, run_id="r", model_id="m"), timeout_s=LONG_S)
        sender = strategy.create_sender(info, token, joined=joined, record=lambda record: None)
        joined.result(LONG_S)
        try:
            yield sender, client, engines, info
        finally:
            for engine in engines:
                engine.close()
            sender.close()
            for sharer in self._sharers:
                sharer.close()

    @staticmethod
    def chunks(count: int, *, seed: int = 0, numel: int = 1000) -> list[WeightChunk]:
        """Chunks of different sizes, dtypes and shapes: 0-d, empty and not contiguous ones included."""
        generator = torch.Generator().manual_seed(seed)

        def words(size: int) -> torch.Tensor:
            return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)

        made = []
        for n in range(count):
            size = numel * (1 + (n * 7) % 5)
            tensors = {
                f"{n}.bf16": words(2 * size).view(torch.bfloat16),
                f"{n}.fp8": words(15).view(torch.float8_e4m3fn).reshape(3, 5),
                f"{n}.odd": words(7),
                f"{n}.step": torch.tensor(n, dtype=torch.int64),
                f"{n}.empty": torch.empty(0, 4),
                f"{n}.mask": words(9) > 127,
                f"{n}.t": words(48).view(torch.float32).reshape(4, 3).t(),
            }
            made.append(WeightChunk(names=tuple(tensors), tensors=tuple(tensors.values())))
        return made

    @staticmethod
    def expected(chunks: Iterable[WeightChunk]) -> list[Received]:
        """What each receiver must have got, in order."""
        return [
            (name, tensor.dtype, tuple(tensor.shape), bytes_of(tensor))
            for chunk in chunks
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
        ]

    def test_every_worker_of_every_engine_gets_every_byte_in_order(self) -> None:
        """World sizes differ; several syncs over the same ends."""
        with self.meet(1, 2) as (sender, client, engines, _):
            for turn in range(3):
                chunks = self.chunks(5, seed=turn)
                sent = sender.send_chunks(self.ready(chunks), client, session=f"s{turn}", deadline=Deadline(LONG_S))
                assert sent == len(chunks)
                assert sender.usable
                for engine in engines:
                    for index in range(engine.world_size):
                        assert engine.got(index) == self.expected(chunks)
                    engine.forget()

    def test_a_chunk_that_a_loader_holds_is_never_overwritten(self) -> None:
        """The window is bounded: while the first chunk is held, few others are asked for, none reaches its memory."""
        go = threading.Event()
        chunks = self.chunks(8)
        taken = 0

        def counted() -> Iterator[WeightChunk]:
            nonlocal taken
            for chunk in chunks:
                taken += 1
                yield chunk

        with self.meet(1) as (sender, client, engines, _):
            held = threading.Event()

            def hold(seq: int) -> None:
                if seq == 0:
                    held.set()
                    assert go.wait(LONG_S)

            engines[0].before_load = hold
            sending = in_thread(
                lambda: sender.send_chunks(self.ready(counted()), client, session="s", deadline=Deadline(LONG_S)),
                name="contract-send",
            )
            try:
                assert held.wait(LONG_S)
                with pytest.raises(TimeoutError):
                    sending.result(0.3)  # everything that may happen has happened
                assert taken <= 3
            finally:
                go.set()
            assert sending.result(LONG_S) == len(chunks)
            assert engines[0].got() == self.expected(chunks)

    def test_nothing_to_send_is_nothing_sent(self) -> None:
        """And the ends stay usable."""
        with self.meet(1) as (sender, client, _, __):
            assert sender.send_chunks(self.ready(()), client, session="s", deadline=Deadline(LONG_S)) == 0
            assert sender.usable

    def test_an_engines_error_ends_the_transfer_at_once(self) -> None:
        """With the engine's own words; then the sender says that it is broken."""
        with self.meet(1, 1) as (sender, client, engines, _):

            def fail(seq: int) -> None:
                if seq == 1:
                    engines[1].close()
                    raise LoadError("no room", parameter="1.odd")

            engines[1].before_load = fail
            started = time.monotonic()
            with pytest.raises(SyncFailedError) as caught:
                sender.send_chunks(self.ready(self.chunks(20)), client, session="s", deadline=Deadline(LONG_S))
            assert time.monotonic() - started < LONG_S / 2
            assert type(caught.value.causes["e1"]) is LoadError
            assert not sender.usable
            with pytest.raises(WeightSyncError):
                sender.send_chunks(self.ready(self.chunks(1)), client, session="s", deadline=Deadline(LONG_S))

    def test_a_failing_source_of_chunks_is_told_as_it_is(self) -> None:
        """The trainer's own error, not one of the transport's."""

        def source() -> Iterator[WeightChunk]:
            yield from self.chunks(2)
            raise LoadError("extraction stopped here")

        with self.meet(1) as (sender, client, _, __):
            with pytest.raises(LoadError, match="extraction stopped here"):
                sender.send_chunks(self.ready(source()), client, session="s", deadline=Deadline(LONG_S))
            assert not sender.usable

    def test_a_member_that_does_not_take_part_costs_the_deadline_and_no_more(self) -> None:
        """An engine that takes the announcement and then does nothing."""
        never = threading.Event()

        class Deaf(ReceiverEngine):
            def _receive(self, index: int, update: Any) -> None:
                never.wait(LONG_S)

        with self.meet(1) as (sender, client, engines, _):
            engines[0].__class__ = Deaf
            started = time.monotonic()
            try:
                with pytest.raises(WeightSyncError):
                    sender.send_chunks(self.ready(self.chunks(5)), client, session="s", deadline=Deadline(0.5))
            finally:
                never.set()
            assert time.monotonic() - started < LONG_S / 2

    def test_a_receiver_refuses_another_strategys_request(self) -> None:
        """Before it waits for a single byte."""
        handle = SharedMemoryHandle(host_nonce="n", name="a", offset_bytes=0, size_bytes=4)
        fields: dict[str, Any] = {"session": "s", "seq": 0, "names": ("w",), "dtypes": ("uint8",), "shapes": ((4,),)}
        foreign: Any = CudaIpcWeightUpdateRequest(**fields, handles=((handle,),))
        with self.meet(1) as (sender, client, engines, _):
            if isinstance(foreign, self.make_strategy(join_timeout_s=1.0).request_type):
                foreign = _update()
            with pytest.raises(InvalidRequestError):
                engines[0].receivers[0].receive_weights(foreign, deadline=Deadline(LONG_S))
            chunks = self.chunks(2)
            sender.send_chunks(self.ready(chunks), client, session="s", deadline=Deadline(LONG_S))
            assert engines[0].got() == self.expected(chunks), "and it goes on working"

    def test_closing_is_quick_and_can_be_repeated(self) -> None:
        """Also with nobody at the other end any more."""
        with self.meet(1) as (sender, _, engines, __):
            started = time.monotonic()
            for _ in range(2):
                sender.close()
                engines[0].close()
            assert time.monotonic() - started < 3
            assert not sender.usable

    def test_a_member_that_stays_away_costs_the_join_timeout_and_no_more(self) -> None:
        """Where ends meet each other, both sides say which ranks are missing."""
        strategy = self.make_strategy(join_timeout_s=0.5)
        info, token = strategy.create_init_info({"e0": 1, "e1": 2})
        joined: Future[Mapping[str, EngineReply]] = Future()
        receiver = in_thread(lambda: strategy.create_receiver(info, rank=2), name="contract-receiver")
        started = time.monotonic()
        with pytest.raises(GroupJoinError) as caught:
            strategy.create_sender(info, token, joined=joined, record=lambda record: None)
        if self.ends_meet:
            assert caught.value.details["missing_ranks"] == [1, 3]
            assert isinstance(receiver.exception(LONG_S), GroupJoinError)
        else:
            receiver.result(LONG_S).close()
        assert time.monotonic() - started < LONG_S / 2

    def test_an_engine_that_can_not_join_ends_the_join_at_once(self) -> None:
        """Its own error, long before the join timeout."""
        strategy = self.make_strategy(join_timeout_s=LONG_S)
        info, token = strategy.create_init_info({"e0": 1})
        joined: Future[Mapping[str, EngineReply]] = Future()
        joined.set_exception(SyncFailedError("init failed", causes={"e0": StateError("busy")}))
        started = time.monotonic()
        with pytest.raises(SyncFailedError):
            strategy.create_sender(info, token, joined=joined, record=lambda record: None)
        assert time.monotonic() - started < LONG_S / 2
