"""Requests that name a layout: they say the same as in full, and what is not known or can't be is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from weightsync.engine.server import EngineServer
from weightsync.errors import EngineError, InvalidRequestError, LoadError, UnknownLayoutError
from weightsync.handles.compact import (
    COMPACT_HEADER,
    CompactBroadcast,
    CompactUpdate,
    KnownLayouts,
    ToldLayout,
    expanded,
    layout_digest,
    shortened,
)
from weightsync.handles.http import ENGINE_API, HttpEngine
from weightsync.net.exchange import Answer
from weightsync.plan.buckets import plan_bucket
from weightsync.testing.contracts import ScriptedEngine
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    Manifest,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryHandle,
    StageRequest,
    TensorSpec,
    TensorTable,
    UpdateRequest,
    Version,
)

TOKEN = "0123456789abcdef"
SPECS = tuple(
    TensorSpec(name=f"layers.{index}.weight", dtype=("bfloat16", "float32")[index % 2], shape=(index % 5, 3))
    for index in range(200)
)


def manifest(number: int = 1, *, specs: tuple[TensorSpec, ...] = SPECS, digests: bool = False) -> Manifest:
    made = Manifest(version=Version(run_id="r", number=number), model_id="m", tensors=specs)
    if not digests:
        return made
    filled = bytes((index * 7 + number) % 256 for index in range(16 * len(specs)))
    return made.with_packed_digests(filled, "wsd2:" + "ab" * 16)


def begin(number: int = 1, *, specs: tuple[TensorSpec, ...] = SPECS) -> BeginRequest:
    return BeginRequest(session=f"s{number}", manifest=manifest(number, specs=specs), deadline_s=9.5)


def stage(number: int = 1) -> StageRequest:
    return StageRequest(session=f"s{number}", manifest=manifest(number, digests=True))


def chunk(first: int, end: int, *, kind: str = "broadcast", gap: int = 0) -> AnyUpdateRequest:
    specs = SPECS[first:end]
    sizes = tuple(spec.nbytes for spec in specs)
    layout = plan_bucket(sizes)
    common = {
        "session": "s1",
        "seq": 3,
        "names": tuple(spec.name for spec in specs),
        "dtypes": tuple(spec.dtype for spec in specs),
        "shapes": tuple(spec.shape for spec in specs),
        "offsets": tuple(offset + gap for offset in layout.offsets),
    }
    if kind == "broadcast":
        return BroadcastWeightUpdateRequest(**common, bucket_bytes=layout.total_bytes + gap)  # type: ignore[arg-type]
    handle = SharedMemoryHandle(host_nonce="n", name="segment", offset_bytes=0, size_bytes=layout.total_bytes + gap)
    return PackedCudaIpcWeightUpdateRequest(**common, sizes=sizes, handles=(handle,))  # type: ignore[arg-type]


LAYOUT = TensorTable.of(SPECS)


@pytest.mark.parametrize(
    "request_",
    [
        begin(),
        stage(),
        *(
            UpdateRequest(update=chunk(first, end, kind=kind, gap=gap))
            for first, end in ((0, 200), (0, 1), (7, 90), (199, 200))
            for kind in ("broadcast", "packed")
            for gap in (0, 256)
        ),
    ],
    ids=lambda request_: type(request_).__name__,
)
def test_the_compact_form_says_the_same(request_: EngineRequest) -> None:
    short = shortened(request_, LAYOUT)
    assert short is not None
    sent = msgspec.json.encode(short)
    read = msgspec.json.decode(sent, type=type(short))
    again = expanded(read, TensorTable.of(SPECS))
    assert again == request_
    assert msgspec.json.encode(again) == msgspec.json.encode(request_)
    if isinstance(request_, StageRequest):
        assert len(sent) / len(SPECS) < 40


def test_what_is_not_of_the_layout_has_no_compact_form() -> None:
    other = (*SPECS[:-1], TensorSpec(name="layers.199.weight", dtype="float16", shape=(4, 3)))
    assert shortened(begin(specs=other), LAYOUT) is None
    assert shortened(begin(specs=SPECS[::-1]), LAYOUT) is None
    assert shortened(CommitRequest(session="s"), LAYOUT) is None
    mixed = msgspec.structs.replace(chunk(5, 8), names=("layers.5.weight", "layers.7.weight", "layers.6.weight"))
    assert shortened(UpdateRequest(update=mixed), LAYOUT) is None
    strange = msgspec.structs.replace(chunk(5, 6), names=("somebody.else",))
    assert shortened(UpdateRequest(update=strange), LAYOUT) is None
    beyond = msgspec.structs.replace(
        chunk(199, 200), names=("layers.199.weight", "x"), dtypes=("float32",) * 2, shapes=((4, 3), (1,)),
        offsets=(0, 256), bucket_bytes=512,
    )  # fmt: skip
    assert shortened(UpdateRequest(update=beyond), LAYOUT) is None


def test_a_layouts_digest_depends_on_all_of_it() -> None:
    def but(**changes: object) -> TensorTable:
        return TensorTable.of((*SPECS[:3], msgspec.structs.replace(SPECS[3], **changes), *SPECS[4:]))

    digests = {
        layout_digest(layout) for layout in (LAYOUT, but(name="x"), but(dtype="int32"), but(shape=(9,)), but(offset=8))
    }
    assert len(digests) == 5
    assert layout_digest(TensorTable.of(SPECS[::-1])) not in digests
    assert layout_digest(TensorTable.of(list(SPECS))) == layout_digest(LAYOUT)


@pytest.mark.parametrize(("first", "num"), [(-1, 2), (0, 0), (0, 201), (200, 1), (199, 2), (1 << 70, 1)])
def test_a_run_that_the_layout_has_not_is_refused(first: int, num: int) -> None:
    made = CompactBroadcast(
        session="s", seq=0, layout=layout_digest(LAYOUT), first=first, num_tensors=num, offsets=None, bucket_bytes=256
    )
    with pytest.raises(InvalidRequestError, match="not one of the layout"):
        expanded(CompactUpdate(update=made), LAYOUT)


def test_digests_of_another_number_of_tensors_are_refused() -> None:
    short = shortened(stage(), LAYOUT)
    assert short is not None
    with pytest.raises(InvalidRequestError, match="one digest a tensor"):
        expanded(short, TensorTable.of(SPECS[:-1]))


def test_a_server_keeps_the_layouts_that_were_used_last() -> None:
    known = KnownLayouts()
    layouts = [TensorTable.of(SPECS[: 10 + index]) for index in range(6)]
    for layout in layouts[:4]:
        known.keep(layout)
    assert known.named(layout_digest(layouts[0])) is layouts[0]  # now the one used last
    known.keep(layouts[4])
    known.keep(layouts[5])
    assert [layout_digest(layout) for layout in layouts if _is_kept(known, layout)] == [
        layout_digest(layouts[index]) for index in (0, 3, 4, 5)
    ]
    with pytest.raises(UnknownLayoutError):
        known.named("wsl1:nonsense")


def test_many_tensors_are_few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.handles.compact._MAX_TENSORS_KEPT", 250)
    known = KnownLayouts()
    first, second, third = TensorTable.of(SPECS[:120]), TensorTable.of(SPECS[:130]), TensorTable.of(SPECS)
    known.keep(first)
    known.keep(second)
    assert _is_kept(known, first)
    known.keep(third)
    assert not _is_kept(known, first)
    assert _is_kept(known, third)


def _is_kept(known: KnownLayouts, layout: TensorTable) -> bool:
    with contextlib.suppress(UnknownLayoutError):
        return layout_digest(known.named(layout_digest(layout))) == layout_digest(layout)
    return False


def test_a_server_that_read_another_layout_is_not_believed() -> None:
    told = ToldLayout()
    with pytest.raises(EngineError, match="has read layout"):
        told.answered(begin(), "wsl1:" + "0" * 64)
    assert told.shortened(begin(2)) is None
    told.answered(begin(), None)
    assert told.shortened(begin(2)) is None
    told.answered(begin(), layout_digest(LAYOUT))
    assert told.shortened(begin(2)) is not None


@contextlib.contextmanager
def serving(engine: ScriptedEngine, port: int = 0) -> Iterator[str]:
    server = EngineServer(engine, token=TOKEN, port=port)
    try:
        yield server.start()
    finally:
        server.close()


def client_of(url: str, lengths: list[tuple[str, int, bool]]) -> HttpEngine:
    """A client that writes down each request: its step, its bytes, and whether it was compact."""
    client = HttpEngine(url, token=TOKEN)

    answer = client._client.answer

    def noted(method: str, path: str, *, content: bytes, headers: dict[str, str], **options: Any) -> Answer:
        lengths.append((path.rsplit("/", 1)[1], len(content), COMPACT_HEADER in headers))
        return answer(method, path, content=content, headers=headers, **options)

    client._client.answer = noted  # type: ignore[method-assign]
    return client


def test_only_the_first_version_says_the_layout() -> None:
    engine, lengths = ScriptedEngine("inside"), []  # type: ignore[var-annotated]
    with serving(engine) as url:
        client = client_of(url, lengths)
        sent = []
        for number in (1, 2, 3):
            for op, request in (
                (EngineOp.BEGIN, begin(number)),
                (EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=chunk(0, 200))),
                (EngineOp.STAGE, stage(number)),
                (EngineOp.COMMIT, CommitRequest(session=f"s{number}")),
            ):
                client.call(op, request, timeout_s=10)
                sent.append((op, request))
        assert engine.asked == sent
    compact = [compact for _, _, compact in lengths]
    assert compact == [False, True, True, False, *[True, True, True, False] * 2]
    later = sum(num_bytes for _, num_bytes, _ in lengths[4:8])
    assert later / len(SPECS) < 40


def test_a_server_that_started_anew_is_told_in_full_again() -> None:
    lengths: list[tuple[str, int, bool]] = []
    with serving(ScriptedEngine("inside")) as url:
        client = client_of(url, lengths)
        client.call(EngineOp.BEGIN, begin(1), timeout_s=10)
        port = int(url.rsplit(":", 1)[1])
    engine = ScriptedEngine("inside")
    with serving(engine, port):
        client.call(EngineOp.STAGE, stage(1), timeout_s=10)  # which the engine itself would refuse
        client.call(EngineOp.BEGIN, begin(2), timeout_s=10)
        client.call(EngineOp.BEGIN, begin(3), timeout_s=10)
    assert engine.asked == [(EngineOp.STAGE, stage(1)), (EngineOp.BEGIN, begin(2)), (EngineOp.BEGIN, begin(3))]
    assert [(step, compact) for step, _, compact in lengths] == [
        ("begin", False), ("stage", True), ("stage", False), ("begin", False), ("begin", True),
    ]  # fmt: skip


def test_after_an_error_the_layout_is_said_again() -> None:
    """An engine that was replaced by one that can't read compact forms refuses them for another reason."""
    lengths: list[tuple[str, int, bool]] = []
    engine = ScriptedEngine("inside")
    with serving(engine) as url:
        client = client_of(url, lengths)
        client.call(EngineOp.BEGIN, begin(1), timeout_s=10)
        engine.fails[EngineOp.BEGIN] = LoadError("no")
        with pytest.raises(LoadError):
            client.call(EngineOp.BEGIN, begin(2), timeout_s=10)
        engine.fails.clear()
        client.call(EngineOp.BEGIN, begin(3), timeout_s=10)
    assert [compact for _, _, compact in lengths] == [False, True, False]


def test_an_engine_that_refuses_a_begin_makes_nobody_keep_its_layout() -> None:
    engine = ScriptedEngine("inside", fails={EngineOp.BEGIN: LoadError("no")})
    with serving(engine) as url:
        with pytest.raises(LoadError):
            HttpEngine(url, token=TOKEN).call(EngineOp.BEGIN, begin(1), timeout_s=10)
        short = shortened(begin(2), LAYOUT)
        answer = post(url, "begin", msgspec.json.encode(short), layout_digest(LAYOUT))
        assert (answer.status_code, answer.json()["error"]) == (409, "UnknownLayoutError")


def post(url: str, op: str, body: bytes, layout: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", COMPACT_HEADER: layout, "content-type": "application/json"}
    return httpx.post(f"{url}{ENGINE_API}/{op}", content=body, headers=headers, trust_env=False)


def test_a_server_refuses_compact_bodies_that_do_not_fit() -> None:
    engine = ScriptedEngine("inside")
    with serving(engine) as url:
        HttpEngine(url, token=TOKEN).call(EngineOp.BEGIN, begin(1), timeout_s=10)
        HttpEngine(url, token=TOKEN).call(EngineOp.BEGIN, begin(1, specs=SPECS[:5]), timeout_s=10)
        engine.asked.clear()
        short = msgspec.json.encode(shortened(stage(2), LAYOUT))
        other = layout_digest(TensorTable.of(SPECS[:5]))
        for op, body, layout, says in (
            ("stage", short, other, "different layouts"),
            ("stage", msgspec.json.encode(stage(2)), layout_digest(LAYOUT), "does not fit"),
            ("stage", short[:-9], layout_digest(LAYOUT), "does not fit"),
            ("commit", b'{"session": "s"}', layout_digest(LAYOUT), "no compact form"),
            ("stage", short.replace(layout_digest(LAYOUT).encode(), other.encode()), other, "one digest a tensor"),
        ):
            answer = post(url, op, body, layout)
            assert answer.status_code == 422, (op, answer.text)
            assert says in answer.json()["message"]
    assert engine.asked == []


def test_replies_are_the_engines() -> None:
    with serving(ScriptedEngine("inside", world_size=3)) as url:
        client = HttpEngine(url, token=TOKEN)
        replies = [client.call(EngineOp.BEGIN, begin(number), timeout_s=10) for number in (1, 2)]
    assert [type(reply) for reply in replies] == [EngineReply, EngineReply]
    assert [reply.world_size for reply in replies] == [3, 3]
