"""The configuration: what is read, what is refused and in which words, and the strategy that follows."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from weightsync._config_foreign import FOREIGN_KEYS
from weightsync.config import (
    ExtractConfig,
    InferenceServiceConfig,
    TransferConfig,
    WeightSyncConfig,
    select_grouping,
    select_strategy,
)
from weightsync.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

REFERENCE = """
weight_sync_controller:
  type: "weight_sync_controller"

  # Synchronization mode
  sync_mode: "sync"  # "sync" | "fully-async" | "batch-async"
  staleness_threshold: 2
  sync_method: "disk"  # "network" | "disk" | "tinker" | "weaver" | "mock"
  sync_weight_path: "/path/to/weights"
  validate_freq: 5
  inference_service:
    model_tag: "default"
    model: "model-name"
    weight_type: "full"
    backend: "sglang"
    base_url: "http://localhost:8000"
"""


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        WeightSyncConfig.load(source)
    return str(caught.value)


def framework(**keys: Any) -> dict[str, Any]:
    """A framework's whole configuration, with much that is none of our business, and `keys` by their last names."""
    tree: dict[str, Any] = {
        "data": {"train_data": ["a.parquet"], "backend": "files"},
        "generator": {"num_inference_engines": 4, "backend": "vllm", "sampling_params": {"temperature": 1.0}},
        "trainer": {"strategy": "fsdp2", "placement": {"policy_num_gpus_per_node": 4}, "epochs": 1},
    }
    for path in FOREIGN_KEYS:
        if path[-1] in keys:
            node = tree
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = keys.pop(path[-1])
    assert not keys
    return tree


# What is read.


def test_the_documented_reference_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(REFERENCE)
    for source in (path, str(path), yaml.safe_load(REFERENCE), yaml.safe_load(REFERENCE)["weight_sync_controller"]):
        config = WeightSyncConfig.load(source)
        assert config == WeightSyncConfig(
            sync_mode="sync",
            staleness_threshold=2,
            sync_method="disk",
            sync_weight_path="/path/to/weights",
            validate_freq=5,
            inference_service=InferenceServiceConfig(
                model_tag="default",
                model="model-name",
                weight_type="full",
                backend="sglang",
                base_url="http://localhost:8000",
            ),
        )


@pytest.mark.parametrize("mode", ["sync", "fully-async", "batch-async"])
@pytest.mark.parametrize("method", ["push", "pull", "network", "disk", "tinker", "weaver", "mock"])
def test_every_documented_mode_and_method_is_accepted(mode: str, method: str) -> None:
    tree = {"sync_mode": mode, "sync_method": method}
    if method in ("network", "disk"):
        tree["sync_weight_path"] = "/weights"
    config = WeightSyncConfig.load({"weight_sync_controller": tree})
    assert (config.sync_mode, config.sync_method) == (mode, method)


def test_own_keys_bare_and_under_their_root_mean_the_same() -> None:
    tree = {"transfer": {"backend": "nccl", "join_timeout_s": 5}, "extract": {"dtype": None}, "validate_freq": 3}
    expected = WeightSyncConfig(
        transfer=TransferConfig(backend="nccl", join_timeout_s=5.0), extract=ExtractConfig(dtype=None), validate_freq=3
    )
    assert WeightSyncConfig.load(tree) == WeightSyncConfig.load({"weight_sync": tree}) == expected
    assert WeightSyncConfig.load(expected) is expected


@pytest.mark.parametrize("source", [{}, {"weight_sync": None}, {"transfer": None}, {"generator": None}, framework()])
def test_nothing_set_means_the_defaults(source: dict[str, Any]) -> None:
    config = WeightSyncConfig.load(source)
    assert config == WeightSyncConfig()
    assert config.extract.dtype == "bfloat16"
    assert config.extract.chunk_bytes == 64 * 1024 * 1024
    assert config.transfer.transfer_timeout_s == 300.0
    assert (config.transfer.join_timeout_s, config.transfer.pause_timeout_s) == (30.0, 30.0)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing set\n")
    assert WeightSyncConfig.load(tmp_path / "empty.yaml") == WeightSyncConfig()


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        WeightSyncConfig().transfer.backend = "nccl"  # type: ignore[misc]


# Names of other frameworks.


def test_every_foreign_key_sets_its_own_key() -> None:
    config = WeightSyncConfig.load(
        framework(
            weight_sync_backend="nccl",
            use_cuda_ipc=True,
            use_flashrl=True,
            pack_weights=True,
            weight_transfer_threshold_cuda_ipc_GB=1.5,
            colocate_all=True,
            training_backend="fsdp",
        )
    )
    assert config == WeightSyncConfig(
        transfer=TransferConfig(
            backend="nccl", use_cuda_ipc=True, pack_weights=True, colocated=True, training_backend="fsdp"
        ),
        extract=ExtractConfig(group_by_module=True, chunk_bytes=3 << 29),
    )


def test_null_in_a_foreign_tree_is_not_set_and_fsdp2_is_fsdp() -> None:
    config = WeightSyncConfig.load(
        framework(weight_sync_backend=None, weight_transfer_threshold_cuda_ipc_GB=None, training_backend="fsdp2")
    )
    assert config == WeightSyncConfig(transfer=TransferConfig(training_backend="fsdp"))


def test_who_does_not_use_flashrl_says_nothing_of_groups() -> None:
    """Seen red where false meant that nothing is grouped."""
    config = WeightSyncConfig.load(framework(use_flashrl=False, colocate_all=True))
    assert config.extract.group_by_module is None
    assert select_grouping(config)


def test_megatron_has_buckets_and_not_groups() -> None:
    config = WeightSyncConfig.load(framework(use_flashrl=False, training_backend="megatron"))
    assert not select_grouping(config)
    text = refused(framework(use_flashrl=True, training_backend="megatron"))
    assert "generator.use_flashrl = True with trainer.training_backend = 'megatron'" in text
    assert "training_backend = 'megatron'" in refused(
        {"extract": {"group_by_module": True}, "transfer": {"training_backend": "megatron"}}
    )


def test_all_three_trees_come_together_and_may_repeat_each_other() -> None:
    config = WeightSyncConfig.load(
        {
            **framework(weight_sync_backend="nccl", training_backend="deepspeed"),
            "weight_sync_controller": {"type": "weight_sync_controller", "sync_method": "push", "validate_freq": 5},
            "weight_sync": {"transfer": {"backend": "nccl", "master_addr": "10.0.0.5"}, "validate_freq": 5},
        }
    )
    assert config.transfer == TransferConfig(backend="nccl", training_backend="deepspeed", master_addr="10.0.0.5")
    assert (config.sync_method, config.validate_freq) == ("push", 5)


def test_a_framework_has_its_inference_service_beside_the_controller() -> None:
    """Document 5's own program asks `config.inference_service`. Seen red where it was left alone."""
    beside = {"backend": "sglang", "base_url": "http://host:1", "model": "m", "api_key": "theirs", "model_tag": None}
    for made in (dict, OmegaConf.create):
        tree = {"sync_method": "disk", "sync_weight_path": "/w", "inference_service": {"model": "m"}}
        config = WeightSyncConfig.load(made({"weight_sync_controller": tree, "inference_service": beside}))
        assert config.inference_service == InferenceServiceConfig(backend="sglang", base_url="http://host:1", model="m")
    text = refused({"weight_sync_controller": {"inference_service": {"model": "n"}}, "inference_service": beside})
    assert "inference_service.model = 'm'" in text
    assert "weight_sync_controller.inference_service.model = 'n'" in text
    assert "inference_service.basee_url" in refused(
        {"weight_sync": {}, "inference_service": {"basee_url": "http://host:1"}}
    )
    assert WeightSyncConfig.load({"inference_service": {"model": "m"}}).inference_service.model == "m"


def test_one_setting_twice_with_two_values_is_refused() -> None:
    text = refused({**framework(weight_sync_backend="nccl"), "weight_sync": {"transfer": {"backend": "gloo"}}})
    assert "generator.weight_sync_backend = 'nccl'" in text
    assert "weight_sync.transfer.backend = 'gloo'" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"generator": {"weight_sync_backnd": "nccl"}},
            ["generator.weight_sync_backnd = 'nccl'", "'weight_sync_backend'"],
        ),
        ({"trainer": {"placement": {"colocateall": 1}}}, ["trainer.placement.colocateall = 1", "'colocate_all'"]),
        ({"generator": {}, "weight_synch": {"a": 1}}, ["weight_synch = {'a': 1}", "'weight_sync'"]),
        ({"generator": {}, "transfer": {"backend": "gloo"}}, ["transfer = {'backend': 'gloo'}", "under 'weight_sync'"]),
        ({"weight_sync_backend": "nccl"}, ["weight_sync_backend = 'nccl'", "'generator.weight_sync_backend'"]),
        (framework(weight_sync_backend="mpi"), ["generator.weight_sync_backend = 'mpi'", "'gloo', 'nccl', 'cuda_ipc'"]),
        (framework(use_cuda_ipc="yes"), ["generator.use_cuda_ipc = 'yes'", "true or false"]),
        (framework(training_backend="jax"), ["trainer.training_backend = 'jax'", "'module', 'fsdp'"]),
        (framework(weight_transfer_threshold_cuda_ipc_GB=0), ["weight_transfer_threshold_cuda_ipc_GB = 0", "GB"]),
        (framework(weight_transfer_threshold_cuda_ipc_GB="1"), ["weight_transfer_threshold_cuda_ipc_GB = '1'", "GB"]),
        (framework(weight_transfer_threshold_cuda_ipc_GB=float("nan")), ["cuda_ipc_GB = nan", "finite"]),
        (framework(weight_transfer_threshold_cuda_ipc_GB=1e308), ["cuda_ipc_GB = 1e+308", "finite"]),
        (framework(weight_transfer_threshold_cuda_ipc_GB=10**400), ["cuda_ipc_GB = 1000", "finite"]),
        ({"generator": 7}, ["generator is no mapping", "7"]),
    ],
)
def test_what_is_wrong_in_a_foreign_tree_is_told_in_its_own_names(source: dict[str, Any], expected: list[str]) -> None:
    """Seen red: OverflowError, of numbers that are no bytes."""
    text = refused(source)
    for part in expected:
        assert part in text


# What is refused.


def test_names_of_the_library_that_are_gone_are_told() -> None:
    """Seen red with a check that looks at files alone."""
    text = "`net.guard.Guard` `net.guard.Nope` `load/nope.py` `load/module.py:ModuleWeightLoader` `transfer.backend`"
    text += " `serve.engines` `serve.engine` `generator.use_cuda_ipc` `push.step()`"
    assert list(_docs_check()._name_problems(text)) == [
        "the library has no net.guard.Nope",
        "no configuration has the key serve.engine",
        "the library has no such file in load/nope.py",
    ]


def test_a_message_that_is_quoted_and_that_nobody_prints_is_told() -> None:
    """Seen red without the look into the code, and with one that takes docstrings for messages."""
    rows = "| it says | do |\n| --- | --- |\n| `instance … is evicted`, `NoEnginesError` | `anything` |\n"
    rows += "| `instance … is banished` | |\n| `the data an operator needs` | |\n"
    assert list(_docs_check()._quote_problems(f"# A page\n\n{rows}\n| means |\n| --- |\n| `nothing` |\n")) == [
        "the library does not say 'instance … is banished'",
        "the library does not say 'the data an operator needs'",
    ]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"sync_mod": "sync"}, ["weight_sync.sync_mod = 'sync'", "not a key", "'sync_mode'"]),
        ({"transfer": {"backnd": "nccl"}}, ["weight_sync.transfer.backnd = 'nccl'", "'backend'", "master_addr"]),
        ({"type": "weight_sync_controller"}, ["weight_sync.type", "not a key"]),
        ({3: 4}, ["weight_sync.3 = 4", "not a key"]),
        ({"transfer": {"backend": "mpi"}}, ["weight_sync.transfer.backend = 'mpi'", "'gloo', 'nccl', 'cuda_ipc'"]),
        ({"sync_mode": "async"}, ["sync_mode = 'async'", "'sync', 'fully-async', 'batch-async'"]),
        ({"sync_method": "dsk"}, ["sync_method = 'dsk'", "did you mean 'disk'"]),
        ({"extract": {"dtype": "bf16"}}, ["dtype = 'bf16'", "'bfloat16'", "null"]),
        ({"extract": {"dtype_overrides": {"*.norm.*": "int8"}}}, ["dtype_overrides['*.norm.*'] = 'int8'", "'float32'"]),
        ({"extract": {"dtype_overrides": "float32"}}, ["dtype_overrides = 'float32'", "mapping"]),
        ({"extract": {"chunk_bytes": 0}}, ["chunk_bytes = 0", "bytes above 0"]),
        ({"publish": {"anchor_every": 0}}, ["anchor_every = 0", "a whole number of versions, 1 to 256"]),
        ({"serve": {"upload_bytes_s": "1G"}}, ["upload_bytes_s", "number of bytes a second, above 0, or null"]),
        ({"extract": {"chunk_bytes": 1.5}}, ["chunk_bytes = 1.5", "whole number of bytes"]),
        ({"extract": {"chunk_bytes": True}}, ["chunk_bytes = True", "whole number of bytes"]),
        ({"transfer": {"join_timeout_s": 0}}, ["join_timeout_s = 0", "seconds above 0"]),
        ({"transfer": {"join_timeout_s": -1.0}}, ["join_timeout_s = -1.0", "seconds above 0"]),
        ({"transfer": {"transfer_timeout_s": float("inf")}}, ["transfer_timeout_s = inf", "finite number of seconds"]),
        ({"transfer": {"pause_timeout_s": float("nan")}}, ["pause_timeout_s = nan", "finite number of seconds"]),
        ({"transfer": {"pause_timeout_s": "30"}}, ["pause_timeout_s = '30'", "number of seconds"]),
        ({"transfer": {"pause_timeout_s": True}}, ["pause_timeout_s = True", "number of seconds"]),
        ({"transfer": {"join_timeout_s": 1e9}}, ["join_timeout_s = 1000000000.0", "a week"]),
        ({"transfer": {"transfer_timeout_s": 604801}}, ["transfer_timeout_s = 604801", "a week"]),
        ({"transfer": {"pause_timeout_s": 10**400}}, ["pause_timeout_s = 1000"]),
        ({"transfer": {"pause_timeout_s": 1e300}}, ["pause_timeout_s = 1e+300", "a week"]),
        ({"fleet": {"retries_s": [1, 1e10]}}, ["fleet.retries_s", "1000000000", "a week"]),
        ({"transfer": {"colocated": 1}}, ["colocated = 1", "true or false"]),
        ({"transfer": {"master_addr": ""}}, ["master_addr = ''", "not empty"]),
        ({"transfer": [1]}, ["weight_sync.transfer = [1]", "mapping"]),
        ({"staleness_threshold": 0}, ["staleness_threshold = 0", "versions, 1 or more"]),
        ({"validate_freq": -1}, ["validate_freq = -1", "training steps, 0"]),
        ({"inference_service": {"weight_type": "lora"}}, ["weight_type = 'lora'", "'full'"]),
        ({"inference_service": {"base_url": "ftp://host"}}, ["base_url = 'ftp://host'", "http://"]),
        ({"sync_method": "disk"}, ["sync_method = 'disk' with sync_weight_path = None", "'push'"]),
        ({"sync_method": "network"}, ["sync_method = 'network' with sync_weight_path = None", "'mock'"]),
        (
            {"sync_method": "tinker", "inference_service": {"backend": "vllm"}},
            ["sync_method = 'tinker'", "inference_service.backend = 'vllm'", "'mock'"],
        ),
        (
            {"inference_service": {"backend": "weaver"}},
            ["sync_method = 'push'", "inference_service.backend = 'weaver'"],
        ),
    ],
)
def test_what_is_wrong_is_told_with_key_value_and_choices(tree: dict[Any, Any], expected: list[str]) -> None:
    """Seen red with `strict=False` in the schema; times above a week were read, and broke who waited so long."""
    text = refused({"weight_sync": tree})
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (
            {"strategy": "broadcast", "backend": "cuda_ipc"},
            ["strategy = 'broadcast'", "backend = 'cuda_ipc'", "'gloo'"],
        ),
        (
            {"strategy": "broadcast", "use_cuda_ipc": True},
            ["strategy = 'broadcast'", "use_cuda_ipc = True", "'cuda_ipc'"],
        ),
        (
            {"strategy": "broadcast", "backend": "nccl", "colocated": True},
            [
                "strategy = 'broadcast'",
                "backend = 'nccl'",
                "colocated = True",
                "one GPU",
                "'gloo'",
                "'packed_cuda_ipc'",
            ],
        ),
        (
            {"strategy": "cuda_ipc", "pack_weights": True},
            ["strategy = 'cuda_ipc'", "pack_weights = True", "'packed_cuda_ipc'"],
        ),
        ({"delta": True, "strategy": "cuda_ipc"}, ["delta = True", "strategy = 'cuda_ipc'", "'broadcast'"]),
        ({"delta": True, "backend": "cuda_ipc"}, ["delta = True", "backend = 'cuda_ipc'", "'gloo'"]),
        ({"delta": True, "colocated": True}, ["delta = True", "colocated = True", "colocated to false"]),
        ({"delta": True, "use_cuda_ipc": True}, ["delta = True", "use_cuda_ipc = True", "use_cuda_ipc to false"]),
    ],
)
def test_a_contradiction_names_every_key_its_value_and_the_way_out(
    transfer: dict[str, Any], expected: list[str]
) -> None:
    for text in (refused({"transfer": transfer}), _refused_directly(transfer)):
        assert text.startswith("the configuration is wrong: ")
        for part in expected:
            assert part in text


def _refused_directly(transfer: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**transfer)
    return str(caught.value)


def test_a_contradiction_is_told_in_the_names_that_were_used() -> None:
    text = refused({"weight_sync": {"transfer": {"strategy": "broadcast"}}, "generator": {"use_cuda_ipc": True}})
    assert "weight_sync.transfer.strategy = 'broadcast' with generator.use_cuda_ipc = True" in text


def test_all_problems_of_all_sections_come_out_together() -> None:
    """Seen red without the marker that lets sections be validated together: the first section's error came alone."""
    with pytest.raises(ConfigError) as caught:
        WeightSyncConfig.load(
            {
                "sync_mode": "never",
                "nope": 1,
                "transfer": {"strategy": "broadcast", "use_cuda_ipc": True},
                "extract": {"chunk_bytes": -1, "dtype": "int4"},
            }
        )
    error = caught.value
    assert "has 5 problems" in str(error)
    assert error.details["keys"] == ["nope", "sync_mode", "transfer.strategy", "extract.dtype", "extract.chunk_bytes"]
    assert error.to_dict()["details"]["keys"] == error.details["keys"]


def test_an_unknown_argument_is_refused_without_load_too() -> None:
    """Seen red with `extra="ignore"` in the schema."""
    with pytest.raises(ConfigError, match=r"transfer\.backnd = 'nccl': is not a key; did you mean 'backend'"):
        WeightSyncConfig(transfer={"backnd": "nccl"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        {"token": "s3cr3t-0123456789"},
        {"serve": {"token": "s3cr3t-0123456789"}},
        {"weight_sync": {"transfer": {"auth_token": "s3cr3t-0123456789"}}},
        {"server": {"port": 1, "hf_token": "s3cr3t-0123456789, and more"}},
        {"server": {"api_keys": ["a", "s3cr3t-0123456789"], "credentials": {"user": "u", "key": "s3cr3t-0123456789"}}},
        {"server": {"passphrase": "'s3cr3t-0123456789\" and more"}},
        {"push": {"engines": "http://user:s3cr3t-0123456789@host:8000"}},
        {"push": {"engine": ["http://host/?a=b&sig=s3cr3t-0123456789"]}},
        {"push": {"engine": ["https://b/w?X-Amz-Signature=s3cr3t-0123456789&X-Amz-Security-Token=s3cr3t-0123456789"]}},
        {"push": {"engine": ["https://s3cr3t-0123456789@host"]}},
        {"push": {"engine": {"http://user:s3/cr3t/s3cr3t-0123456789@host:1"}}},
        {"push": {"engine": "user:s3cr3t-0123456789@host:1"}},
        {"server": {"tokenizer_api_key": "s3cr3t-0123456789", "api-key": "s3cr3t-0123456789"}},
        {"server": OmegaConf.create({"token": "s3cr3t-0123456789"})},
    ],
)
def test_a_secret_in_a_file_is_shown_in_no_error(source: dict[str, Any]) -> None:
    """Seen red: it stood in the log of each rank."""
    text = refused(source)
    assert "s3cr3t" not in text
    assert "and more" not in text
    if "push" not in source and "server" not in source:
        assert "WEIGHTSYNC_TOKEN" in text


@pytest.mark.parametrize(
    "value",
    ["s3://bucket/run@1", "file:///w/run@3", "/runs/2026-11-28_12:30@n/c.yaml", "me@x.org", "host:8000", "quorum(2)"],
)
def test_what_is_no_secret_is_shown(value: str) -> None:
    assert f"nope = {value!r}:" in refused({"nope": value})


def test_what_only_sounds_like_a_secret_is_shown() -> None:
    assert "max_tokens = 5:" in refused({"max_tokens": 5})
    assert "'*embed_tokens*'] = 'int4':" in refused({"extract": {"dtype_overrides": {"*embed_tokens*": "int4"}}})
    assert "{'tokenizer': 't', 'max_new_tokens': 5}" in refused({"serves": {"tokenizer": "t", "max_new_tokens": 5}})


def test_a_long_value_is_cut() -> None:
    assert len(refused({"sync_mode": "x" * 10_000})) < 400


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n- b\n", "no mapping"),
        ("a: [1\n", "not YAML"),
        ("transfer: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("transfer:\n  backend: gloo\n  backend: nccl\n", "comes twice"),
    ],
)
def test_a_file_that_is_not_a_mapping_in_plain_yaml_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    text = refused(path)
    assert expected in text
    assert str(path) in text


def test_what_can_not_be_a_configuration_is_refused(tmp_path: Path) -> None:
    assert "can't be read" in refused(tmp_path / "missing.yaml")
    assert "no mapping" in refused(7)
    assert "no mapping" in refused(OmegaConf.create([1]))


# OmegaConf.


def test_omegaconf_interpolations_are_resolved_and_foreign_ones_left_alone() -> None:
    tree = framework(weight_sync_backend="${backend}", colocate_all="${trainer.together}", use_flashrl=True)
    tree["backend"] = "nccl"
    tree["trainer"] |= {"together": False, "run_name": "${nowhere}", "epochs": "???"}
    tree["data"]["path"] = "${nowhere_either}"
    tree["output"] = "${nowhere_as_well}"
    tree["weight_sync"] = {"transfer": {"interface": "${host}", "backend": "${generator.weight_sync_backend}"}}
    tree["host"] = "eth5"
    config = WeightSyncConfig.load(OmegaConf.create(tree))
    assert config == WeightSyncConfig(
        transfer=TransferConfig(backend="nccl", colocated=False, interface="eth5"),
        extract=ExtractConfig(group_by_module=True),
    )
    assert "colocated" in config.transfer.model_fields_set
    bare = OmegaConf.create({"transfer": {"backend": "nccl"}, "extract": {"dtype_overrides": {"*": "float32"}}})
    assert WeightSyncConfig.load(bare).extract.dtype_overrides == {"*": "float32"}
    assert WeightSyncConfig.load(OmegaConf.create({"a": yaml.safe_load(REFERENCE)}).a).sync_method == "disk"


@pytest.mark.parametrize("value", ["${nowhere}", "???"])
@pytest.mark.parametrize("text", ["weight_sync: {transfer: {backend: '%s'}}", "generator: {weight_sync_backend: '%s'}"])
def test_an_omegaconf_value_of_ours_that_does_not_resolve_is_refused(text: str, value: str) -> None:
    assert "does not resolve" in refused(OmegaConf.create(text % value))


def test_a_misspelling_in_an_omegaconf_tree_is_refused() -> None:
    assert "'weight_sync_backend'" in refused(OmegaConf.create({"generator": {"weight_sync_backnd": "nccl"}}))


# The strategy.


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"weight_sync_backend": "nccl"}, "broadcast"),
        ({"weight_sync_backend": "gloo"}, "broadcast"),
        ({"weight_sync_backend": "nccl", "pack_weights": True}, "broadcast"),
        ({"weight_sync_backend": "nccl", "training_backend": "megatron"}, "broadcast"),
        ({"weight_sync_backend": "nccl", "use_cuda_ipc": False, "colocate_all": False}, "broadcast"),
        ({"weight_sync_backend": "nccl", "colocate_all": True}, "cuda_ipc"),
        ({"weight_sync_backend": "gloo", "colocate_all": True, "use_cuda_ipc": False}, "broadcast"),
        ({"weight_sync_backend": "nccl", "use_cuda_ipc": True}, "cuda_ipc"),
        ({"weight_sync_backend": "gloo", "colocate_all": True}, "cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc"}, "cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc", "training_backend": "fsdp"}, "cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc", "pack_weights": False, "training_backend": "deepspeed"}, "cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc", "pack_weights": True, "training_backend": "fsdp"}, "packed_cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc", "training_backend": "megatron"}, "packed_cuda_ipc"),
        ({"weight_sync_backend": "cuda_ipc", "training_backend": "megatron", "pack_weights": False}, "cuda_ipc"),
        ({"weight_sync_backend": "nccl", "pack_weights": False, "use_flashrl": False}, "broadcast"),
        ({"weight_sync_backend": "cuda_ipc", "pack_weights": True, "training_backend": "megatron"}, "packed_cuda_ipc"),
        ({"weight_sync_backend": "nccl", "colocate_all": True, "training_backend": "megatron"}, "packed_cuda_ipc"),
        ({"use_cuda_ipc": True, "pack_weights": True}, "packed_cuda_ipc"),
    ],
)
def test_the_strategy_follows_from_the_documented_keys(keys: dict[str, Any], expected: str) -> None:
    assert select_strategy(WeightSyncConfig.load(framework(**keys))) == expected


@pytest.mark.parametrize(
    ("keys", "beside"),
    [
        ({"weight_sync_backend": "cuda_ipc", "use_cuda_ipc": False}, "generator.weight_sync_backend = 'cuda_ipc'"),
        (
            {"weight_sync_backend": "nccl", "colocate_all": True, "use_cuda_ipc": False},
            "trainer.placement.colocate_all = True",
        ),
    ],
)
def test_a_frameworks_false_is_refused_where_it_cant_be_kept(keys: dict[str, Any], beside: str) -> None:
    """Seen red with a false that is not read: CUDA IPC was chosen without a word."""
    text = refused(framework(**keys))
    assert beside in text
    assert "generator.use_cuda_ipc = False" in text


def test_a_frameworks_false_is_no_matter_where_no_bytes_are_pushed() -> None:
    """Seen red with a false that counts as a key that nobody reads."""
    tree = {**framework(use_cuda_ipc=False), "weight_sync": {"sync_method": "disk", "sync_weight_path": "/weights"}}
    assert WeightSyncConfig.load(tree).sync_method == "disk"


def test_our_own_false_wins_over_what_would_follow() -> None:
    transfer = {"backend": "gloo", "colocated": True, "use_cuda_ipc": False}
    assert select_strategy(WeightSyncConfig.load({"transfer": transfer})) == "broadcast"


TRANSFERS = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["gloo", "nccl", "cuda_ipc"]),
        "strategy": st.sampled_from([None, "broadcast", "cuda_ipc", "packed_cuda_ipc"]),
        "colocated": st.booleans(),
        "use_cuda_ipc": st.none() | st.booleans(),
        "pack_weights": st.none() | st.booleans(),
        "training_backend": st.sampled_from(["module", "fsdp", "deepspeed", "megatron"]),
    }
)


@given(TRANSFERS)
@settings(deadline=None)
def test_every_combination_has_one_answer_or_a_typed_refusal(transfer: dict[str, Any]) -> None:
    """Seen red with the NCCL rule taken out."""
    asked, said = transfer["use_cuda_ipc"], transfer["pack_weights"]
    ipc = asked if asked is not None else transfer["colocated"] or transfer["backend"] == "cuda_ipc"
    packed = said if said is not None else transfer["training_backend"] == "megatron"
    named = transfer["strategy"]
    no_group = transfer["backend"] == "cuda_ipc" or asked or (transfer["backend"] == "nccl" and transfer["colocated"])
    impossible = (
        (named == "broadcast" and no_group)
        or (named == "cuda_ipc" and said)
        or (named == "packed_cuda_ipc" and said is False)
        or (named in ("cuda_ipc", "packed_cuda_ipc") and asked is False)
        or (named is None and asked is False and no_group)
    )
    if impossible:
        assert "transfer." in refused({"transfer": transfer})
    else:
        follows = ("packed_cuda_ipc" if packed else "cuda_ipc") if ipc else "broadcast"
        assert select_strategy(WeightSyncConfig.load({"transfer": transfer})) == (named or follows)


KEYS = st.sampled_from(["weight_sync", "transfer", "backend", "generator", "use_cuda_ipc", "trainer", "placement", "x"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=3)
    )
)
@settings(deadline=None)
def test_whatever_comes_in_only_a_config_error_comes_out(source: Any) -> None:
    if isinstance(source, str):
        source = {"weight_sync": source}
    try:
        config = WeightSyncConfig.load(source)
    except ConfigError:
        return
    assert select_strategy(config) in ("broadcast", "cuda_ipc", "packed_cuda_ipc")


# The page.


def _docs_check() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))  # where it finds its tables
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_say_what_the_code_does() -> None:
    """Seen red after a default was changed."""
    check = _docs_check()
    pages = "".join(page.read_text(encoding="utf-8") for page in check.pages(ROOT))
    for name, table in check.TABLES.items():
        assert pages.count(f"<!-- generated: {name} -->\n{table()}<!-- end -->") == 1, name


def test_the_strategy_table_has_every_combination() -> None:
    rows = _docs_check().TABLES["strategies"]().splitlines()[2:]
    keys = [tuple(cell.strip().strip("`") for cell in row.split("|")[1:4]) for row in rows]
    assert keys == list(itertools.product(["gloo", "nccl", "cuda_ipc"], ["no", "yes"], ["null", "yes", "no"]))


def test_a_page_that_is_wrong_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n[here](#a-page) [there](missing.md) [no](#nowhere)\n\n"
        "```python\nfrom weightsync.config import nope\n```\n\n```python\ndef (\n```\n\n"
        "<!-- generated: strategies -->\nold\n<!-- end -->\n"
    )
    found = list(_docs_check().problems(page))
    assert len(found) == 5
    for part, problem in zip(["missing.md", "#nowhere", "nope", "compile", "strategies"], found, strict=True):
        assert part in problem


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, False),
        ({"transfer": {"colocated": True}}, True),
        ({"transfer": {"strategy": "packed_cuda_ipc"}}, True),
        ({"transfer": {"colocated": True, "training_backend": "megatron"}}, False),
        ({"transfer": {"colocated": True}, "extract": {"group_by_module": False}}, False),
        ({"extract": {"group_by_module": True}}, True),
    ],
)
def test_grouping_follows_the_strategy_unless_it_is_said(tree: dict[str, Any], expected: bool) -> None:
    """Documents 1 and 2: whole modules where engines open the trainer's memory, buckets with Megatron."""
    assert select_grouping(WeightSyncConfig.load(tree)) is expected


class _Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


_DEEP: dict[str, Any] = {}
for _ in range(3000):
    _DEEP = {"a": _DEEP}


@pytest.mark.parametrize(
    "source",
    [
        {"run_id": 10**5000}, {"sync_mode": 10**5000},
        {"run_id": _Unwritable()}, {"run_id": _DEEP}, {"fleet": {"models": [[]] * 1000}},
        {"x" * 10**6: 1}, {"fleet": {"x" * 10**6: 1}}, {10**5000: 1}, "x" * 10**6, "\ud800", "\x00",
    ],
    ids=[
        "digits", "a choice of digits",
        "no repr", "deep", "many", "long key", "long inner", "key of digits", "long path", "no path", "nul",
    ],
)  # fmt: skip
def test_what_can_not_be_shown_is_refused_in_few_words(source: Any) -> None:
    """Red where its own repr was the error, or the message was as long as it."""
    with pytest.raises(ConfigError) as caught:
        WeightSyncConfig.load(source)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "text", ["fleet: 2026-13-45\n", "? [a, b]\n: c\n", "? {a: b}\n: c\n", "[" * 5000, f"run_id: {'9' * 5000}\n"]
)
def test_yaml_that_python_can_not_hold_is_refused_as_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        WeightSyncConfig.load(path)
    assert len(str(caught.value)) < 1000
