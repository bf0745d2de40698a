"""Methods disk and network against a real vLLM server: after each sync it answers as a fresh engine of that version."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import Versions
from tests.engines.vllm_support import (
    DIFFERENT,
    LONG_PROMPT,
    SAME,
    Oracle,
    Server,
    build_model,
    next_distance,
    train_step,
)
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.disk_engines import VllmReloadApi
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.push import PushMethod
from weightsync.errors import SyncFailedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.probe import Feature, probe
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.trainer.push import PushSync
from weightsync.types import Version

pytestmark = pytest.mark.timeout(600)


def v(number: int) -> Version:
    return Version(run_id="run", number=number)


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    return VersionFolder(tmp_path / "versions", keep=2)


@pytest.fixture
def disk(vllm_server: Server, folder: VersionFolder) -> Iterator[DiskMethod]:
    with contextlib.closing(DiskMethod(folder, {"actor": vllm_server.url}, timeout_s=60.0)) as method:
        method.initialize()
        yield method


def copies(checkpoint: Path, *, cut_bytes: int = 0) -> Callable[[Path], None]:
    """Writes a checkpoint, less its last bytes."""

    def write(into: Path) -> None:
        shutil.copy(checkpoint / "config.json", into)
        whole = (checkpoint / "model.safetensors").read_bytes()
        (into / "model.safetensors").write_bytes(whole[: len(whole) - cut_bytes])

    return write


def test_the_server_says_what_it_can(vllm_server: Server) -> None:
    told = probe(vllm_server.url)
    assert told.engine == "vllm"
    assert told.release
    assert set(told.lacks) == {Feature.UPDATE, Feature.WORKERS}


def test_the_oracle_holds_after_each_version_from_disk(
    disk: DiskMethod,
    folder: VersionFolder,
    vllm_server: Server,
    oracle: Oracle,
    versions: Versions,
    serves: Callable[[int], None],
) -> None:
    """Also where it answers from its prefix cache; where that is kept, on purpose, it does not."""
    api = VllmReloadApi(vllm_server.url)
    sums = []
    for number, steps in enumerate((1, 2, 0, 1)):
        folder.publish("actor", v(number), copies(versions.checkpoints[steps]))
        assert disk.sync_weights("actor", v(number)) == number
        serves(steps)
        told = vllm_server.next_token(LONG_PROMPT)
        assert next_distance(told, oracle.next_token(versions.checkpoints[steps])) <= SAME
        assert vllm_server.get("/weight_info") == {"weight_version": f"run/{number}"}
        sums.append(api.checksums(timeout_s=20))
    assert sums[0] == sums[3]
    assert sums[0] != sums[1] != sums[2]
    api.close()
    with contextlib.closing(DiskMethod(folder, {"actor": vllm_server.url}, kv_cache="keep")) as keeps:
        folder.publish("actor", v(4), copies(versions.checkpoints[2]))
        assert keeps.sync_weights("actor", v(4)) == 4
        new = oracle.next_token(versions.checkpoints[2])
        assert next_distance(vllm_server.next_token(LONG_PROMPT), new) >= DIFFERENT, "from keys of the old weights"
    folder.publish("actor", v(5), copies(versions.checkpoints[2]))
    assert disk.sync_weights("actor", v(5)) == 5
    assert next_distance(vllm_server.next_token(LONG_PROMPT), new) <= SAME


def test_a_checkpoint_that_is_cut_off_leaves_it_paused_and_the_next_one_heals_it(
    disk: DiskMethod, folder: VersionFolder, vllm_server: Server, versions: Versions, serves: Callable[[int], None]
) -> None:
    folder.publish("actor", v(1), copies(versions.checkpoints[1], cut_bytes=1))
    with pytest.raises(SyncFailedError, match="1 of 1 engines did not load it") as caught:
        disk.sync_weights("actor", v(1))
    assert "it is paused" in str(caught.value.causes[vllm_server.url].state_left)
    assert vllm_server.get("/is_paused") == {"is_paused": True}
    folder.publish("actor", v(2), copies(versions.checkpoints[2]))
    assert disk.sync_weights("actor", v(2)) == 2
    serves(2)


def test_a_controller_syncs_by_a_push(vllm_server: Server, serves: Callable[[int], None]) -> None:
    """One trainer process, a gloo broadcast, vLLM's own update protocol; the controller decides when."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model()
    engine = VllmEngine(VllmHttpApi(vllm_server.url), engine_id="vllm", pause_mode="keep", kv_cache="clear")
    push = PushSync(ModuleWeightExtractor(model, chunk_bytes=20_000), engine, dtype="bfloat16", run_id="run-of-a-push")
    push.initialize()
    controller = WeightSyncController({"sync_mode": "sync"}, PushMethod({"actor": push}), model_tags=["actor"])
    with contextlib.closing(push), contextlib.closing(engine), contextlib.closing(controller):
        for steps in (1, 2):
            controller.trajectory_pool_notify_batch_ready("actor")
            assert controller.check_rollout_service_status("actor") == "block"
            train_step(model, steps)
            controller.train_worker_notify_weight_update("trainer", "actor", "run-of-a-push", steps, timeout_s=60.0)
            state = controller.rollout_service_state("actor")
            assert (state.rollout_model_version, state.last_error) == (steps, None)
            assert controller.check_rollout_service_status("actor") == "continue"
            serves(steps)
    torch.set_num_threads(threads)
