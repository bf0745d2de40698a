"""One Ray cluster of two nodes on this machine for all tests of this folder, and nothing of it left behind."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUM_GPUS_A_NODE = 2  # Ray's bookkeeping alone: nothing here touches a GPU
STORE_BYTES = 80 << 20


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """The cluster; this process is connected as a driver."""
    patch = pytest.MonkeyPatch()
    # A folder of its own: a Ray that runs here already is left alone. A short name: sockets lie in it.
    folder = tempfile.mkdtemp(prefix="ws-ray-")
    (Path(folder) / "ray").mkdir()  # Ray notes its address there, and does not make the folder
    for name, value in {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Ray would write one into the home folder
        "RAY_worker_niceness": "0",  # not 15: beside the suite's other processes actors would starve
        "RAY_memory_monitor_refresh_ms": "0",  # a machine that is busy with other tests is no reason to kill actors
        "RAY_enable_metrics_collection": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }.items():
        patch.setenv(name, value)
    import ray
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    reset_auth_token_state()  # another test of this worker may have imported Ray: it read the variables then
    node = {"num_cpus": 4, "num_gpus": NUM_GPUS_A_NODE, "object_store_memory": STORE_BYTES, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)
