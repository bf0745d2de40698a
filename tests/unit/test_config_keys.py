"""The key walk: each key of the schema and of the five documents is seen to act with each method, or is refused.

For every key there is a value that is not its default, and for every method that reads it (`_config_reads.READ_WITH`,
which the tables of docs/configuration-keys.md show too) somebody who is built from the configuration without it and
with it, and has to differ. With every other method the configuration is refused, and the error names the key. A key
without a line in `VALUES`, or one that changes nothing, turns this red.
"""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.standins.processes import free_port
from tests.unit.config_seen import ENGINE, HEARD, OTHER, RUN_ID, Tree, seen_by, tree_of
from weightsync import WeightSyncConfig
from weightsync._config_foreign import FOREIGN_KEYS
from weightsync._config_problems import must_be
from weightsync._config_reads import METHODS, READ_WITH, read_with
from weightsync.config import SECTIONS
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.network import NetworkMethod
from weightsync.errors import ConfigError


def schema_keys() -> list[str]:
    """Every key of the pydantic models, with its section."""
    own = [key for key in WeightSyncConfig.model_fields if key not in SECTIONS]
    return own + [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]


DOCUMENTED = {
    "generator.weight_sync_backend": "nccl",  # documents 1 and 2
    "generator.use_cuda_ipc": True,  # document 1
    "generator.use_flashrl": True,  # document 2
    "generator.pack_weights": True,  # document 2
    "generator.weight_transfer_threshold_cuda_ipc_GB": 0.5,  # document 1
    "trainer.placement.colocate_all": True,  # document 1
    "trainer.training_backend": "deepspeed",  # document 2
    "weight_sync_controller.sync_mode": "fully-async",  # document 5, from here on
    "weight_sync_controller.staleness_threshold": 7,
    "weight_sync_controller.sync_weight_path": "{tmp}/w",
    "weight_sync_controller.validate_freq": 5,
    "weight_sync_controller.inference_service.model_tag": "verifier",
    "weight_sync_controller.inference_service.model": "m",
    "weight_sync_controller.inference_service.base_url": OTHER,
    "weight_sync_controller.inference_service.backend": "sglang",
    "inference_service.model_tag": "verifier",
    "inference_service.model": "m",
    "inference_service.base_url": OTHER,
    "inference_service.backend": "sglang",
}
"""Documents 3 and 4 name no keys; `type`, `sync_method` and `weight_type` have tests of their own below."""

VALUES: dict[str, Any] = {
    "run_id": RUN_ID,
    "sync_mode": "fully-async",
    "staleness_threshold": 1,
    "sync_method": None,  # see test_each_sync_method_is_another_one
    "sync_weight_path": "{tmp}/elsewhere",
    "validate_freq": 5,
    "transfer.backend": "nccl",
    "transfer.strategy": "packed_cuda_ipc",
    "transfer.colocated": True,
    "transfer.use_cuda_ipc": True,
    "transfer.pack_weights": False,
    "transfer.training_backend": "megatron",
    "transfer.delta": True,
    "transfer.master_addr": "127.0.0.2",
    "transfer.interface": "nowhere0",
    "transfer.join_timeout_s": 7.0,
    "transfer.transfer_timeout_s": 77.0,
    "transfer.pause_timeout_s": 5.0,
    "extract.dtype": "float32",
    "extract.group_by_module": True,
    "extract.chunk_bytes": 8,
    "extract.dtype_overrides": {"*bias": "float32"},
    "inference_service.model_tag": "verifier",
    "inference_service.model": "m",
    "inference_service.weight_type": None,  # one choice; see test_the_one_weight_type
    "inference_service.backend": "vllm",
    "inference_service.base_url": OTHER,
    "fleet.models": ["verifier"],  # one: "disk" and "network" have one engine
    "fleet.sets": [["default", "critic"]],
    "fleet.commit_policy": "all",
    "fleet.lease_s": 3.0,
    "fleet.barrier_timeout_s": 11.0,
    "fleet.prepare_timeout_s": 12.0,
    "fleet.commit_timeout_s": 13.0,
    "fleet.straggler_s": 14.0,
    "fleet.retries_s": [0.5],
    "fleet.after_failure": "evict",
    "fleet.validate_timeout_s": 15.0,
    "fleet.step_timeout_s": 16.0,
    "fleet.host": "127.0.0.2",
    "fleet.port": "{port}",
    "publish.to": ["{url}"],
    "publish.host": "127.0.0.2",
    "publish.port": "{port}",
    "publish.advertise": "trainer-0",
    "publish.guard_s": 0.5,
    "publish.last_wait_s": 0.0,
    "publish.store": "s3://bucket/run",
    "publish.sign_key": "{tmp}/key.secret",
    "publish.anchor_every": 5,
    "publish.keep_s": 60.0,
    "push.engines": [ENGINE],
    "push.controller": "http://127.0.0.1:1",
    "serve.engines": {"critic": [ENGINE]},
    "serve.sources": ["http://127.0.0.1:3"],
    "serve.trust_key": "{tmp}/key.public",
    "serve.relay": True,
    "serve.zone": "rack-7",
    "serve.upload_bytes_s": 1e6,
    "serve.host": "127.0.0.2",
    "serve.port": "{port}",
    "serve.service_id": "host-7",
    "serve.lease": "{tmp}/lease",
    "serve.controller": "http://127.0.0.1:1",
    "serve.advertise": "http://host-7:9000",
}
"""Of each key a value that is not its default. `{tmp}`: a folder, `{port}`: a free port, `{url}`: a useless server."""

BESIDE: dict[str, Tree] = {
    "staleness_threshold": {"sync_mode": "batch-async"},
    "transfer.pack_weights": {"transfer": {"backend": "cuda_ipc", "training_backend": "megatron"}},
    "fleet.sets": {"fleet": {"models": ["default", "critic"]}},
    "extract.group_by_module": {"extract": {"chunk_bytes": None}},
    "fleet.barrier_timeout_s": {"fleet": {"models": ["default", "critic"], "sets": [["default", "critic"]]}},
    "fleet.straggler_s": {"fleet": {"commit_policy": "quorum(1)"}},
    "publish.last_wait_s": {"publish": {"to": ["http://127.0.0.1:1"]}},
    "publish.sign_key": {"publish": {"store": "s3://bucket/run"}},
    "publish.anchor_every": {"publish": {"store": "s3://bucket/run"}},
    "publish.keep_s": {"publish": {"store": "s3://bucket/run"}},
    "serve.controller": {"serve": {"lease": "{tmp}/lease"}},
    "inference_service.backend": {"inference_service": {"base_url": OTHER}},
}
"""What else has to be said for a key to have something to do."""

BASE: dict[str, Tree] = {
    "network": {"sync_weight_path": "{tmp}/w", "inference_service": {"model": "served", "base_url": "http://host:1"}},
    "disk": {"sync_weight_path": "{tmp}/w", "inference_service": {"base_url": "http://host:1"}},
}
"""What a method needs in any case."""


# --- the walk ---


def at(key: str, value: Any) -> Tree:
    """A tree with a value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def filled(value: Any, places: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, places) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, places) for each in value]
    if value == "{port}":
        return places["port"]
    return value.format_map(places) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def useless() -> Iterator[str]:
    """A server that is neither a rollout service nor a controller."""

    class Useless(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            HEARD.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Useless)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def places(tmp_path: Path, useless: str) -> dict[str, Any]:
    return {"tmp": str(tmp_path), "port": free_port(), "url": useless}


def test_a_number_is_not_said_to_be_text() -> None:
    """Seen red for a number of versions, and for bytes a second."""
    fields = {f"{name}.{key}": field for name, part in SECTIONS.items() for key, field in part.model_fields.items()}
    numbers = []
    for key, field in (fields | WeightSyncConfig.model_fields).items():
        with contextlib.suppress(ValidationError):
            TypeAdapter(Annotated[field.annotation, field, *field.metadata]).validate_python(5, strict=True)
            numbers.append(key)
            assert "text" not in must_be(key.rpartition(".")[2], field.annotation), key
    assert {"publish.anchor_every", "serve.upload_bytes_s", "serve.port", "fleet.lease_s"} <= {*numbers}


def test_the_walk_has_every_key() -> None:
    """Seen red with a key that was added to the schema alone."""
    assert sorted(VALUES) == sorted(schema_keys())
    sections = {key for key in READ_WITH if key in SECTIONS}
    assert sections == set(SECTIONS)
    assert set(READ_WITH) - sections <= set(schema_keys()), "a line for a key that is not there"
    assert [key for key in WeightSyncConfig.model_fields if key not in READ_WITH] == []
    theirs = {".".join(path) for path in FOREIGN_KEYS}
    assert theirs - set(DOCUMENTED) == {"inference_service.weight_type"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", [key for key, value in VALUES.items() if value is not None])
def test_each_key_acts_or_is_refused(key: str, method: str, places: dict[str, Any]) -> None:
    """Seen red with a key that nobody reads, with and without a line of its own in `READ_WITH`."""
    without = tree_of({"sync_method": method, "fleet": {"port": free_port()}}, BASE.get(method, {}))
    if method in read_with(key):
        without = tree_of(without, BESIDE.get(key, {}))
    without = filled(without, places)
    value = method if key == "inference_service.backend" and method in ("tinker", "weaver") else VALUES[key]
    said = tree_of(without, at(key, filled(value, places)))
    if method not in read_with(key):
        with pytest.raises(ConfigError) as caught:
            WeightSyncConfig.load(said)
        assert key in caught.value.details["keys"]
        assert f"{key} = " in caught.value.message
    else:
        see = seen_by(key, method)
        before = see(without)
        assert before == see(without), "what is seen changes by itself"
        assert before != see(said), f"{key} changes nothing with {method}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", DOCUMENTED)
def test_each_key_of_the_documents_is_its_own_key_or_refused(key: str, method: str, places: dict[str, Any]) -> None:
    """Seen red with an `inference_service` beside the roots that was left alone."""
    path = tuple(key.split("."))
    own = ".".join(FOREIGN_KEYS.get(path, path[1:]))
    needed = tree_of({"sync_method": method}, BASE.get(method, {}), {} if own != "staleness_threshold" else BESIDE[own])
    last = own.rpartition(".")[2]
    needed.get("inference_service", {}).pop(last, None)
    tree = filled(at(key, DOCUMENTED[key]), places)
    value = tree
    for part in path:
        value = value[part]
    needed = filled(needed, places)
    if last == "sync_weight_path":
        needed.pop(last, None)
    root = "weight_sync" if key.startswith("weight_sync_controller") else "weight_sync_controller"
    source = {root: needed, **tree}
    hosted = last == "backend" and method in ("tinker", "weaver")
    if method in read_with(own) and not hosted:
        meant = int(value * (1 << 30)) if own == "extract.chunk_bytes" else value
        assert WeightSyncConfig.load(source) == WeightSyncConfig.load(tree_of(needed, at(own, meant)))
        assert own in dict(WeightSyncConfig.load(source).asked())
    else:
        with pytest.raises(ConfigError, match=r"the configuration") as caught:
            WeightSyncConfig.load(source)
        assert f"{key} = " in caught.value.message


def test_each_sync_method_is_another_one(tmp_path: Path) -> None:
    """Document 5's `type` may stand beside it, and be nothing else."""
    kinds = set()
    for method in METHODS:
        tree = filled(tree_of({"sync_method": method}, BASE.get(method, {})), {"tmp": tmp_path})
        with contextlib.closing(
            WeightSyncController({"weight_sync_controller": {**tree, "type": "weight_sync_controller"}})
        ) as made:
            kinds.add(type(made.method))
    assert len(kinds) == len(METHODS)
    with pytest.raises(ConfigError, match=r"weight_sync_controller\.type = 'other'"):
        WeightSyncConfig.load({"weight_sync_controller": {"type": "other"}})


def test_the_one_weight_type(tmp_path: Path) -> None:
    """It is what a told service is told; another one is refused with every method."""
    tree = filled(tree_of({"sync_method": "network"}, BASE["network"]), {"tmp": tmp_path})
    with contextlib.closing(WeightSyncController(tree)) as controller:
        assert isinstance(controller.method, NetworkMethod)
        assert controller.method._services["default"].weight_type == "full"
    for root in ("weight_sync_controller", None):
        service = {"inference_service": {"weight_type": "lora"}}
        with pytest.raises(ConfigError, match="weight_type = 'lora'"):
            WeightSyncConfig.load({root: service} if root else {"weight_sync": {}, **service})
