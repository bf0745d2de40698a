"""`store_pull`: a chain's anchor and first delta, from an object store to staged, over plain reads of the same objects.

A receiver that has nothing: from the first request to the staged, proved version (pointer, manifests, layout, ranges
with their SHA-256, the delta decoded into the staging), against one plain read of each of these objects. The store is
an S3 server in a process of its own (moto) where that is installed, else a folder. `detail` has the delta alone, whose
read is so short on loopback that its decoding is most of it, and bytes a version against a full, for a change of 1 % of
the elements.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import torch

from bench.harness import BenchArgs, Row
from weightsync.clients.store import client_at
from weightsync.host.puller import Puller
from weightsync.objects.opened import open_store
from weightsync.objects.urls import asked_url
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Deadline
from weightsync.types.sink import SinkConfig
from weightsync.types.store import POINTER

ROWS = {"store_pull": "anchor and first delta of a chain from an object store, to staged, over plain reads of the same"}
_TARGET = 1.2
_TIMEOUT_S = 300.0
_CHANGED = 100
"""One element in so many changes."""


def run(args: BenchArgs) -> list[Row]:
    """Measures the row."""
    flat = torch.full((args.num_bytes // 2,), 0.5, dtype=torch.bfloat16)
    weights = {f"w{index}": part for index, part in enumerate(flat.chunk(8))}
    with _place() as (url, what), WeightManager("bench", run_id="bench") as manager:
        manager.start(deltas=True)
        sink = SinkProcess(SinkConfig(store=url, model_id="bench", run_id="bench", agents=manager.endpoints))
        sink.start(wait_s=30.0)
        try:
            for version in (1, 2):
                flat[version::_CHANGED] += 1.0
                manager.offload(weights, version)
                if (why := sink.wait_stored(version, timeout_s=_TIMEOUT_S)) is not None:
                    raise RuntimeError(f"version {version} is not stored: {why}")
        finally:
            sink.close()
        return [_measured(url, what, args)]


def _measured(url: str, what: str, args: BenchArgs) -> Row:
    store = open_store(url)
    listed = {each.key: each.nbytes for each in store.list_under("e000001", deadline=Deadline(60.0))}
    listed[POINTER] = next(each.nbytes for each in store.list_under("", deadline=Deadline(60.0)) if each.key == POINTER)
    delta = next(key for key in listed if "/deltas/" in key)
    full = next(key for key in listed if "/anchors/" in key)
    buffers = {key: memoryview(bytearray(nbytes)) for key, nbytes in listed.items()}
    plain: dict[str, list[float]] = {key: [] for key in listed}
    joined, followed = [], []
    for _ in range(args.repeats):
        for key in listed:
            begun_s = time.perf_counter()
            store.get_range(key, 0, buffers[key], deadline=Deadline(_TIMEOUT_S))
            plain[key].append(time.perf_counter() - begun_s)
        seconds = _pull(url)
        joined.append(sum(seconds))
        followed.append(seconds[1])
    plain_s = {key: statistics.median(times) for key, times in plain.items()}
    few_s = sum(plain_s[key] for key in (POINTER, "e000001/versions/2.json", delta))
    ratio = statistics.median(joined) / sum(plain_s.values())
    return Row(
        row="store_pull", ratio=ratio, target=_TARGET,
        detail={
            "store": what, "plain_s": sum(plain_s.values()), "pull_s": statistics.median(joined),
            "delta_alone_s": statistics.median(followed), "delta_plain_s": few_s, "delta_bytes": listed[delta],
            "full_bytes": listed[full], "delta_share": listed[delta] / listed[full],
        },
    )  # fmt: skip


def _pull(url: str) -> tuple[float, float]:
    """Seconds to the anchor, staged; and from there to the version after it, staged."""
    client = client_at(url)
    first = Puller(asked_url(url, version=1), "bench", receiver_id="bench")
    try:
        begun_s = time.perf_counter()
        first.pull(deadline=Deadline(_TIMEOUT_S)).release()
        anchor_s = time.perf_counter() - begun_s
        after = Puller(url, "bench", receiver_id="bench", staging=first._staging)
        after._source_of = {after.endpoint: 0}
        begun_s = time.perf_counter()
        with after.pull(deadline=Deadline(_TIMEOUT_S)) as found:
            seconds = time.perf_counter() - begun_s
            assert found.num_deltas == 1
        after.close()
        return anchor_s, seconds
    finally:
        first.close()
        client.close()


@contextlib.contextmanager
def _place() -> Iterator[tuple[str, str]]:
    try:
        import moto.server  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
        import obstore  # noqa: F401
    except ImportError:
        with tempfile.TemporaryDirectory() as folder:
            yield f"file://{folder}/run", "a folder"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end_s = time.monotonic() + 60.0
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=5)
                break
            if time.monotonic() > end_s:
                raise RuntimeError("moto's server does not start")
            time.sleep(0.1)
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "bench"), ("AWS_SECRET_ACCESS_KEY", "bench"), ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", endpoint),
        ):  # fmt: skip
            os.environ[name] = value
        yield "s3://bucket/run", "S3 (moto's server) over loopback"
    finally:
        server.kill()
        server.wait()
