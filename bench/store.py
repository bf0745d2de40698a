"""`store_pull`: a chain's anchor and first delta, from an object store to staged, over plain reads of the same objects.

A receiver that has nothing: from the first request to the staged, proved version (pointer, manifests, layout, ranges
with their SHA-256, the delta decoded into the staging), against plain reads of each of these objects, in ranges as long
and as many at once, by the same client. The store is a folder that a process on another host shows as S3, over a link
of 2 Gbit/s, as root on Linux with moto and obstore; else over loopback, where server and receiver share the cores and
the receiver's own work stands beside a read that costs no time; without moto and obstore the folder itself. `detail`
has the delta alone, loopback's ratio, and bytes a version against a full, for a change of 1 % of the elements.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.harness import BenchArgs, Row
from weightsync.clients.store import client_at
from weightsync.host.puller import Puller
from weightsync.objects.base import ObjectStore
from weightsync.objects.opened import open_store
from weightsync.objects.urls import asked_url
from weightsync.testing.hosts import Hosts, why_not
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Deadline
from weightsync.types.sink import SinkConfig
from weightsync.types.store import POINTER

ROWS = {"store_pull": "anchor and first delta of a chain from an object store, to staged, over plain reads of the same"}
_TARGET = 1.2
_TIMEOUT_S = 300.0
_NUM_STREAMS, _RANGE_BYTES = 6, 8 << 20
_URL = "s3://bucket/run"
_MBIT = 2000.0
_CHANGED = 100
"""One element in so many changes."""


def run(args: BenchArgs) -> list[Row]:
    """Measures the row."""
    with tempfile.TemporaryDirectory() as folder:
        if any(importlib.util.find_spec(name) is None for name in ("obstore", "moto")):
            url = f"file://{folder}/run"
            _write(url, args)
            return [_row("a folder", _measured(url, url, args.repeats))]
        written = f"file://{folder}/run"
        _write_by_moto(Path(folder, "run"), args)
        port = str(_free_port())
        with _serving("bench.store_server", folder, "127.0.0.1", port):
            loopback = _measured(_URL, written, args.repeats)
        if why_not() is not None:
            return [_row("S3 over loopback", loopback)]
        with Hosts(2, mbit=_MBIT) as (there, here):
            os.environ["AWS_ENDPOINT_URL"] = endpoint = f"http://{there.address}:{port}"
            server = there.popen([sys.executable, "-m", "bench.store_server", folder, there.address, port])
            try:
                here.call(_wait_for, endpoint)
                command = [sys.executable, "-m", "bench.store", _URL, written, str(args.repeats)]
                linked = json.loads(here.run(command, timeout_s=1800.0).stdout.splitlines()[-1])
            finally:
                server.kill()
                server.wait()
        return [_row(f"S3 over {_MBIT:g} Mbit/s", {**linked, "loopback": loopback})]


def _row(store: str, found: dict[str, Any]) -> Row:
    return Row(row="store_pull", ratio=found.pop("ratio"), target=_TARGET, detail={"store": store, **found})


def _write_by_moto(folder: Path, args: BenchArgs) -> None:
    """What the trainer's side writes to S3, copied into a folder."""
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION="us-east-1")
    with _serving("moto.server", "-H", "127.0.0.1", "-p", str(_free_port())):
        _write(_URL, args)
        store = open_store(_URL)
        for each in list(store.list_under("", deadline=Deadline(60.0))):
            copy = folder / each.key
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = bytearray(each.nbytes)
            store.get_range(each.key, 0, memoryview(data), deadline=Deadline(_TIMEOUT_S))
            copy.write_bytes(data)


def _write(url: str, args: BenchArgs) -> None:
    """Two versions into the store: a full and a delta."""
    flat = torch.full((args.num_bytes // 2,), 0.5, dtype=torch.bfloat16)
    weights = {f"w{index}": part for index, part in enumerate(flat.chunk(8))}
    with WeightManager("bench", run_id="bench") as manager:
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


def _measured(url: str, listing: str, repeats: int) -> dict[str, Any]:
    """The ratio, and what else is to be known."""
    store = open_store(listing)
    listed = {each.key: each.nbytes for each in store.list_under("e000001", deadline=Deadline(60.0))}
    listed[POINTER] = next(each.nbytes for each in store.list_under("", deadline=Deadline(60.0)) if each.key == POINTER)
    store = open_store(url)
    delta = next(key for key in listed if "/deltas/" in key)
    full = next(key for key in listed if "/anchors/" in key)
    buffers = {key: memoryview(bytearray(nbytes)) for key, nbytes in listed.items()}
    plain: dict[str, list[float]] = {key: [] for key in listed}
    joined, followed = [], []
    for _ in range(repeats):
        for key in listed:
            begun_s = time.perf_counter()
            _read(store, key, buffers[key])
            plain[key].append(time.perf_counter() - begun_s)
        seconds = _pull(url)
        joined.append(sum(seconds))
        followed.append(seconds[1])
    plain_s = {key: statistics.median(times) for key, times in plain.items()}
    few_s = sum(plain_s[key] for key in (POINTER, "e000001/versions/2.json", delta))
    ratio = statistics.median(joined) / sum(plain_s.values())
    return {
        "ratio": ratio, "plain_s": sum(plain_s.values()), "pull_s": statistics.median(joined),
        "delta_alone_s": statistics.median(followed), "delta_plain_s": few_s, "delta_bytes": listed[delta],
        "full_bytes": listed[full], "delta_share": listed[delta] / listed[full],
    }  # fmt: skip


def _read(store: ObjectStore, key: str, into: memoryview) -> None:
    """An object in ranges as long and as many at once as the library's, looked at by nobody."""
    starts = collections.deque(range(0, len(into), _RANGE_BYTES))

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                start = starts.popleft()
                store.get_range(key, start, into[start : start + _RANGE_BYTES], deadline=Deadline(_TIMEOUT_S))

    streams = [threading.Thread(target=work) for _ in range(min(_NUM_STREAMS, len(starts)))]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()


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
def _serving(module: str, *words: str) -> Iterator[None]:
    """An S3 server in a process of its own, with a bucket; the last of its words is its port."""
    command = [sys.executable, "-m", module, *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{words[-1]}"
        _wait_for(os.environ["AWS_ENDPOINT_URL"])
        yield
    finally:
        server.kill()
        server.wait()


def _wait_for(endpoint: str) -> None:
    """Returns when there is a bucket."""
    end_s = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=5)
            return
        if time.monotonic() > end_s:
            raise RuntimeError(f"{endpoint} does not answer")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
