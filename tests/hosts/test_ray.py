"""Ray's nodes on hosts of their own: `ray start` on each, and a job of `weightsync.cluster` across them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.ray_job import VERSIONS
from weightsync.testing.hosts import Host, Hosts

pytest.importorskip("ray", reason="Ray is not installed")
ROOT = Path(__file__).parents[2]
NODES_S = 200.0
STORE_BYTES = 80 << 20


def environment(folder: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_enable_metrics_collection": "0",
    }


def start_node(host: Host, where: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[Any]:
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--node-ip-address", host.address, "--num-cpus",
        "2", "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats", "--block",
    ]  # fmt: skip
    with open(log, "wb") as output:
        return host.popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.soak  # Ray's head and a node of each host: a minute or more
@pytest.mark.timeout(600)
def test_a_job_runs_on_rays_nodes_of_two_hosts(bench: Callable[..., Hosts]) -> None:
    """A rank and an engine on either node: everybody listens at its node's address, the group meets at rank 0's, and
    what is served is proved. Each host's own name leads to loopback.
    """
    hosts = bench(2, resolves="loopback")
    head = hosts[0]
    folder = tempfile.mkdtemp(prefix="ws-ray-")  # a short name: sockets lie in it
    (Path(folder) / "ray").mkdir()
    env = environment(folder)
    logs = [Path(folder, f"{host.name}.log") for host in hosts]
    nodes = [start_node(head, ["--head", "--port", "6379", "--include-dashboard", "false"], env, logs[0])]
    try:
        nodes.append(start_node(hosts[1], ["--address", f"{head.address}:6379"], env, logs[1]))
        ask = [
            sys.executable, "-c",
            f"import ray; ray.init('{head.address}:6379', logging_level='ERROR'); print(len(ray.nodes()))",
        ]  # fmt: skip
        end_s = time.monotonic() + NODES_S
        while (found := head.run(ask, env=env, check=False, timeout_s=NODES_S)).stdout.strip() != "2":
            assert time.monotonic() < end_s, found.stdout + found.stderr
            assert [node.poll() for node in nodes] == [None, None], [path.read_text()[-2000:] for path in logs]
        job = [sys.executable, "-m", "tests.hosts.ray_job", f"{head.address}:6379"]
        done = head.run(job, env=env, cwd=ROOT, timeout_s=300.0, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout.splitlines()[-1])
    finally:
        hosts.close()
        for node in nodes:
            node.wait(30.0)
        shutil.rmtree(folder, ignore_errors=True)
    assert sorted({*said["ranks"], *said["engines"]}) == sorted(host.address for host in hosts)
    assert said["served"] == [version for version in VERSIONS for _ in range(2)]
