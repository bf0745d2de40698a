"""Versions as a store's writer takes them, made without a trainer; what is right for each; and pulls of a place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.multiproc.pull_kit import MODEL, SPARSE, content, is_right, run_of
from weightsync.clients import store as clients
from weightsync.clients.chain import Chain
from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_units import plan_units
from weightsync.codec.runs import digests_and_sum, runs_of
from weightsync.host.puller import Puller
from weightsync.objects.base import ObjectStore
from weightsync.objects.signing import Signer, Trust
from weightsync.plan.safetensors import plan_layout
from weightsync.sink.claim import ClaimKeeper
from weightsync.sink.intake import Taken
from weightsync.sink.writer import ChainWriter
from weightsync.tensors import spec_of
from weightsync.transfer.blocks import checksum
from weightsync.types import Deadline, Manifest, Version
from weightsync.types.publication import DeltaLink, Publication, Source, SourceProof

KIB = 64
BLOCK = 16 << 10
SEED = SPARSE
AGENT = "http://127.0.0.1:1"


@functools.cache
def layout() -> object:
    return plan_layout([spec_of(name, tensor) for name, tensor in content(SEED, 1, KIB).items()])


@functools.cache
def file_of(number: int, seed: int = SEED) -> memoryview:
    """A version's safetensors file."""
    plan, tensors = layout(), content(seed, number, KIB)
    memory = memoryview(bytearray(plan.total_bytes))  # type: ignore[attr-defined]
    head = plan.header(Version(run_id=run_of(seed), number=number), MODEL)  # type: ignore[attr-defined]
    memory[: len(head)] = head
    for part in plan.parts:  # type: ignore[attr-defined]
        memory[part.offset : part.offset + part.nbytes] = tensors[part.name].numpy().tobytes()
    return memory


@functools.cache
def published(number: int, seed: int = SEED) -> tuple[Publication, SourceProof]:
    plan, memory = layout(), file_of(number, seed)
    where = Source(
        endpoint=AGENT, segment="weightsync-1", data_start=plan.data_start,  # type: ignore[attr-defined]
        data_end=plan.total_bytes, block_bytes=BLOCK,  # type: ignore[attr-defined]
    )  # fmt: skip
    specs = [spec_of(name, tensor) for name, tensor in content(seed, number, KIB).items()]
    manifest = Manifest(version=Version(run_id=run_of(seed), number=number), model_id=MODEL, tensors=tuple(specs))
    digests, total = digests_and_sum(memory, runs_of(plan.parts), check_cancelled=lambda: None)  # type: ignore[attr-defined]
    sums = [checksum(memory[start : start + size]) for start, size in map(where.block, range(where.num_blocks))]
    proof = SourceProof(block_checksums="".join(sums), part_digests=digests, lane_a=total.lane_a, lane_b=total.lane_b)
    return Publication(manifest=manifest, parts=plan.parts, sources=(where,)), proof  # type: ignore[attr-defined]


def taken(number: int, *, base: int | None = None, seed: int = SEED, incarnation: str = "one") -> Taken:
    """A version as the agents give it: a full, or the delta from `base`."""
    publication, proof = published(number, seed)
    if base is None:
        return Taken(publication=publication, incarnation=incarnation, proofs=(proof,), fulls=(file_of(number, seed),))
    where = publication.sources[0]
    parts = sorted(publication.parts_of(0), key=lambda part: (part.offset, part.nbytes))
    units = plan_units([(part.offset - where.data_start, part.nbytes, part.dtype) for part in parts])
    was, now = (np.frombuffer(file_of(each, seed), np.uint8)[where.data_start :] for each in (base, number))
    encoded = encode_delta(
        was, now, units, costs=CostModel(), base=bytes.fromhex(published(base, seed)[1].digest),
        result=bytes.fromhex(proof.digest),
    )  # fmt: skip
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    blob = Source(endpoint=AGENT, segment="weightsync-2", data_start=0, data_end=len(memory), block_bytes=4096)
    sums = [checksum(memory[start : start + size]) for start, size in map(blob.block, range(blob.num_blocks))]
    link = DeltaLink(base=base, version=number, blob=blob, block_checksums="".join(sums), transfer_id="0" * 32)
    return Taken(publication=publication, incarnation=incarnation, proofs=(proof,), deltas=(((link, memory),),))


def taken_over(number: int, *, base: int) -> Taken:
    """A version with a delta for each one since `base`, though those between were passed by."""
    links = (taken(each, base=each - 1).deltas for each in range(base + 1, number + 1))
    return dataclasses.replace(taken(number), fulls=None, deltas=(tuple(each[0][0] for each in links if each),))


_begun: list[Writing] = []


@pytest.fixture(autouse=True)
def writers_end() -> Iterator[None]:
    """A writer ends with its test: it would renew its claim beside every test that follows."""
    yield
    while _begun:
        _begun.pop().stand_still()


class Writing:
    """A writer of a place, from its claim on."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        signer: Signer | None = None,
        seed: int = SEED,
        takeover_s: float = 0.3,
        **options: int,
    ) -> None:
        import threading

        self.seed = seed
        self.store = store
        self.claim = ClaimKeeper(store, run_id=run_of(seed), takeover_s=takeover_s)
        self.claim.acquire(ended=threading.Event())
        _begun.append(self)
        self.writer = ChainWriter(store, self.claim, signer=signer, **options)  # type: ignore[arg-type]
        self.writer.begin(deadline=Deadline(20))

    def stand_still(self) -> None:
        """As its process would that was killed, or stopped."""
        self.claim._ended.set()
        self.claim._thread.join(20)
        assert not self.claim._thread.is_alive(), "it renews its claim on"

    def write(self, number: int) -> None:
        """The next version: a delta from the last one where it may be."""
        bases = self.writer.bases
        self.writer.write(
            taken(number, base=None if bases is None else bases[0].version, seed=self.seed), deadline=Deadline(20)
        )


@contextlib.contextmanager
def chain_of(store: ObjectStore, trust: Trust | None = None, **options: float) -> Iterator[Chain]:
    """Whoever reads that place in this process meanwhile reads it through `store`."""
    chain = Chain(store, trust=trust, **options)
    key = (store.url, None)
    assert key not in clients._chains
    clients._chains[key] = chain, 1
    try:
        yield chain
    finally:
        del clients._chains[key]


@contextlib.contextmanager
def puller_of(url: str) -> Iterator[Puller]:
    puller = Puller(url, MODEL, receiver_id="r")
    try:
        yield puller
    finally:
        puller.close()


def pulled(puller: Puller, timeout_s: float = 10.0) -> tuple[int, int, bool]:
    """(number, deltas, whether its bytes are right) of what comes."""
    with puller.pull(deadline=Deadline(timeout_s)) as found:
        return found.version.number, found.num_deltas, is_right(found, KIB)
