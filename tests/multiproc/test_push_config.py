"""A whole sync driven by a config file in other frameworks' words, and pushes that config makes differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weightsync
from tests.multiproc.spine import Engine, build, cast_bytes, client_of
from tests.standins.processes import children, free_port
from weightsync import EmbeddedEngine, ModuleWeightLoader, PushSync, WeightSyncConfig, extractor_for
from weightsync.codec.changes import ChangesCodec
from weightsync.codec.full import FullCodec
from weightsync.errors import ConfigError, SyncFailedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy

YAML = """
generator:
  weight_sync_backend: gloo
  use_flashrl: true
trainer:
  training_backend: fsdp
  placement: {colocate_all: false}
weight_sync_controller:
  sync_mode: sync
  sync_method: push
"""


def test_a_config_file_drives_a_sync(tmp_path: Path) -> None:
    """The YAML of another framework's trainer, with a plain module for the engine to hold at the end."""
    (tmp_path / "sync.yaml").write_text(YAML)
    config = WeightSyncConfig.load(tmp_path / "sync.yaml")
    assert config.extract.group_by_module
    with children() as start:
        engine = Engine(start, "e")
        model = build(3)
        push = PushSync.from_config(config, extractor_for(config, model), client_of({"e": engine.url}))
        push.initialize()
        assert push.sync_weights(1).digests_equal is True
        push.close()
        assert engine.weights() == cast_bytes(model)


@pytest.mark.parametrize(
    ("transfer", "chunks"),
    [
        ({"backend": "cuda_ipc", "colocated": True}, "modules"),
        ({"use_cuda_ipc": True, "pack_weights": True}, "modules"),
        ({"strategy": "broadcast"}, "tensors"),
    ],
)
def test_the_strategy_and_its_chunks_follow_from_the_config(transfer: dict[str, object], chunks: str) -> None:
    """Colocated: the engine opens whole modules. Nothing but the config differs."""
    config = WeightSyncConfig.load({"transfer": transfer, "extract": {"chunk_bytes": None}})
    with children() as start:
        engine = Engine(start, "e")
        model = build(3)
        extractor = extractor_for(config, model)
        push = PushSync.from_config(config, extractor, client_of({"e": engine.url}))
        push.initialize()
        assert push.sync_weights(1).num_chunks == len(extractor.chunk_plan())
        push.close()
        assert engine.weights() == cast_bytes(model)
    grouped = any(len(chunk.specs) > 1 for chunk in extractor.chunk_plan())
    assert grouped == (chunks == "modules")


@pytest.mark.parametrize(
    "asked",
    [
        {"sync_method": "pull"},
        {"sync_mode": "fully-async"},
        {"validate_freq": 5},
        {"push": {"engines": ["http://127.0.0.1:1"]}},
        {"push": {"controller": "http://127.0.0.1:1"}},
        {"publish": {"to": ["http://127.0.0.1:1"]}},
    ],
)
def test_settings_that_nothing_would_read_are_refused(asked: dict[str, object]) -> None:
    """Silence would be taken for obedience."""
    config = WeightSyncConfig.load(asked)
    with pytest.raises(ConfigError, match=next(iter(asked))):
        PushSync.from_config(config, extractor_for(config, torch.nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "key",
    [{"chunk_bytes": 7}, {"chunk_bytes": None}, {"group_by_module": True}, {"dtype_overrides": {"w*": "float32"}}],
)
def test_an_extractor_that_was_made_with_other_settings_is_refused(key: dict[str, object]) -> None:
    """Seen red, of chunks, without `check_extractor`: what the configuration says of chunks was nobody's."""
    config = WeightSyncConfig.load({"extract": key})
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=f"extract.{next(iter(key))}"):
        PushSync.from_config(config, ModuleWeightExtractor(model))
    PushSync.from_config(config, extractor_for(config, model))
    backend = WeightSyncConfig.load({"transfer": {"training_backend": "deepspeed"}})
    with pytest.raises(ConfigError, match=r"transfer\.training_backend is 'deepspeed', and this is a ModuleWeight"):
        PushSync.from_config(backend, ModuleWeightExtractor(model))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"extractor": torch.nn.Linear(1, 1)}, "ModuleWeightExtractor"),
        ({"client": "http://127.0.0.1:1"}, "EngineFanout"),
        ({"client": []}, "EngineFanout"),
        ({"strategy": "broadcast"}, "from_config"),
        ({"codec": "changes"}, r"ChangesCodec\(\)"),
        ({"codec": ChangesCodec}, r"ChangesCodec\(\)"),
        ({"codec": ChangesCodec(), "strategy": PackedCudaIpcTransferStrategy()}, "lends whole tensors"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_in_words(wrong: dict[str, object], words: str) -> None:
    """A name or a URL is what a config takes; here it would fail at the first sync, in Python's words."""
    parts: dict[str, object] = {"extractor": ModuleWeightExtractor(torch.nn.Linear(1, 1)), **wrong}
    with pytest.raises(ConfigError, match=words):
        PushSync(**parts)  # type: ignore[arg-type]


def test_time_outs_that_are_given_come_before_those_of_the_configuration() -> None:
    """Seen red: a TypeError, and of `push` behind the engines' answers."""
    extractor, model = ModuleWeightExtractor(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    config = WeightSyncConfig.load({"transfer": {"transfer_timeout_s": 9.0, "join_timeout_s": 3.0}})
    push = PushSync.from_config(config, extractor, transfer_timeout_s=7.0, dtype="float32")
    assert (push._transfer_timeout_s, push._join_timeout_s, push._parts.dtype) == (7.0, 3.0, "float32")
    with weightsync.push(model, [torch.nn.Linear(1, 1).bfloat16()], config=config, pause_timeout_s=2.0) as pusher:
        assert (pusher.sync._transfer_timeout_s, pusher.sync._parts.pause_timeout_s) == (9.0, 2.0)
    with pytest.raises(ConfigError, match="join_timeout_s"):
        weightsync.push(model, [model], config=config, join_timeout_s=-1.0)


def test_a_config_asks_for_changes_with_a_codec_of_its_own_or_the_callers() -> None:
    extractor = ModuleWeightExtractor(torch.nn.Linear(1, 1))
    asked, not_asked = (WeightSyncConfig.load({"transfer": {"delta": delta}}) for delta in (True, False))
    assert isinstance(PushSync.from_config(asked, extractor)._parts.codec, ChangesCodec)
    assert isinstance(PushSync.from_config(not_asked, extractor)._parts.codec, FullCodec)
    for config in (asked, not_asked):
        mine = ChangesCodec(full_sync_interval=3)
        assert PushSync.from_config(config, extractor, codec=mine)._parts.codec is mine
    with pytest.raises(ConfigError, match=r"transfer\.delta"):
        PushSync.from_config(asked, extractor, codec=FullCodec())


def test_an_engine_comes_back_at_its_address() -> None:
    """Killed and restarted on the same port: the next sync takes it in again, without a new PushSync."""
    port = free_port()
    with children() as start:
        first = Engine(start, "e", port=port)
        model = build(3)
        config = WeightSyncConfig.load({"transfer": {"transfer_timeout_s": 8.0, "join_timeout_s": 4.0}})
        push = PushSync.from_config(config, extractor_for(config, model), client_of({"e": first.url}))
        push.initialize()
        push.sync_weights(1)
        first.child.kill()
        second = Engine(start, "e", port=port)
        assert push.sync_weights(2).engine_ids == ("e",)
        assert second.weights() == cast_bytes(model)
        push.close()


def test_the_configured_model_is_the_one_that_is_pushed() -> None:
    """`model_tag` was dropped, and every push was one of "default"."""
    model = torch.nn.Linear(2, 2)
    config = WeightSyncConfig.load({"inference_service": {"model_tag": "actor"}, "extract": {"dtype": None}})
    for model_id, refused in (("critic", True), ("actor", False)):
        engine = EmbeddedEngine.of(ModuleWeightLoader(torch.nn.Linear(2, 2)), engine_id="e", model_id=model_id)
        push = PushSync.from_config(config, extractor_for(config, model), engine)
        if refused:
            with pytest.raises(SyncFailedError, match="critic"):
                push.initialize()
        else:
            push.initialize()
            assert push.sync_weights(1).digests_equal
        push.close()
