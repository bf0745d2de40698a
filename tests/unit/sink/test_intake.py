"""How long a version may take. What is taken, and from whom: `tests/multiproc/test_store.py`, `test_pull_grants.py`."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from tests.standins.stored import AGENT, MODEL, published, taken
from tests.unit.codec.test_delta_hostile import bounded
from weightsync.plan.safetensors import plan_layout
from weightsync.sink import intake
from weightsync.sink.intake import Intake
from weightsync.sink.main import Sink
from weightsync.types import Deadline, Manifest, TensorSpec, Version
from weightsync.types.publication import DeltaBase, DeltaLink, Publication, Source
from weightsync.types.sink import SinkConfig


class Granting:
    """Agents and their bytes, of which none come; notes how long they may take."""

    def __init__(self, delta: object) -> None:
        self.publication, self.proof = published(2)
        self.delta = delta
        self.asked_s: list[float] = []
        self.read_s: list[float] = []

    def grant(self, endpoint, version, deadline, **_):
        self.asked_s.append(deadline.remaining_s)
        return SimpleNamespace(
            publication=self.publication,
            proof=self.proof,
            source=0,
            incarnation="one",
            delta=self.delta,
            take_up_s=60.0,
        )

    def source(self, *_):
        return self

    blob = source

    def read(self, *_, deadline) -> None:
        self.read_s.append(deadline.remaining_s)

    def close(self, *_) -> None:
        pass

    acknowledge = give_up = renew = close


@pytest.mark.parametrize("slowest", [0.1, 1e9])
@pytest.mark.parametrize("base", [None, 1])
def test_bytes_that_need_longer_than_a_versions_time_have_it(monkeypatch: pytest.MonkeyPatch, base, slowest) -> None:
    """When they are taken, and when they are written: a large version was begun anew for ever. Seen red with one time
    for whatever size, at either place; and with a full's time for a delta, which is small."""
    monkeypatch.setattr(intake, "_SLOWEST_BYTES_S", slowest)
    version = taken(2, base=base)
    links = None if version.deltas is None else tuple(link for link, _ in version.deltas[0])
    nbytes = version.fulls[0].nbytes if links is None else links[0].blob.data_end
    assert version.nbytes == nbytes > 100
    agents = Granting(links)
    with contextlib.closing(Intake([AGENT], MODEL, receiver_id="r", token=None, verify=True)) as taking:
        taking._agents = agents
        bases = (DeltaBase(run_id="x", version=1, digest="0" * 32),) if base else None
        assert taking.take(bases, deadline=Deadline(600.0)).nbytes == nbytes
    written_s: list[float] = []

    class Writing:
        bases, last_number, current = None, -1, SimpleNamespace(is_anchor=True, total_bytes=1)

        def write(self, given, *, deadline) -> int:
            written_s.append(deadline.remaining_s)
            return given.nbytes

    sink = Sink.__new__(Sink)
    sink._config = SinkConfig(store="file:///nowhere/run", model_id="m", run_id="r", agents=())
    sink._tell, sink._store, sink._seen = lambda event: None, SimpleNamespace(url="x"), None
    sink._intake = SimpleNamespace(newest=lambda **_: version.version, take=lambda bases, deadline: version)
    assert sink._turn(Writing(), wait_s=0.0)
    assert agents.asked_s == pytest.approx([600.0], abs=60.0)
    expected_s = max(600.0, nbytes / slowest)
    assert agents.read_s == pytest.approx([expected_s], abs=60.0)
    assert written_s == pytest.approx([expected_s], abs=60.0)


def test_memory_is_written_by_what_comes_and_nothing_else_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: all of it was filled with zeros first, and no other thread ran meanwhile; and bytes before a delta's
    first block were what this process had there before."""
    spec = TensorSpec(name="w", dtype="uint8", shape=(256 << 20,))
    layout = plan_layout([spec])
    manifest = Manifest(version=Version(run_id="r", number=1), model_id=MODEL, tensors=(spec,))
    where = Source(
        endpoint=AGENT, segment="weightsync-1", data_start=layout.data_start, data_end=layout.total_bytes,
        block_bytes=64 << 20,
    )  # fmt: skip
    publication = Publication(manifest=manifest, parts=layout.parts, sources=(where,))
    blob = Source(endpoint=AGENT, segment="weightsync-2", data_start=5, data_end=100, block_bytes=4096)
    link = DeltaLink(base=1, version=2, transfer_id="0" * 32, block_checksums="0" * 16, blob=blob)
    granted = SimpleNamespace(grant=SimpleNamespace(publication=publication, source=0, delta=(link,)))

    class Reading:
        def __init__(self, cut: Source) -> None:
            self.cut = cut

        def read(self, blocks, into, arrived, *, deadline) -> None:
            for block in blocks:
                into(*self.cut.block(block))[:7] = b"arrived"

        def close(self) -> None:
            pass

    with contextlib.closing(Intake([AGENT], MODEL, receiver_id="r", token=None, verify=True)) as taking:
        taking._agents = SimpleNamespace(
            source=lambda _: Reading(where), blob=lambda *_: Reading(blob), close=lambda: None
        )
        with bounded():
            full = taking._full(granted, Deadline(60.0))
        assert (len(full), full.format) == (layout.total_bytes, "B")
        head = layout.header(manifest.version, MODEL)
        assert bytes(full[: len(head) + 7]) == head + b"arrived"
        monkeypatch.setattr(np, "empty", lambda count, dtype: np.full(count, 99, dtype))
        ((_, delta),) = taking._deltas(granted, Deadline(60.0))
    assert bytes(delta[:12]) == bytes(5) + b"arrived"
    assert len(delta) == 100
