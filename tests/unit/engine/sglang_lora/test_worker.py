"""The proof behind a load: what SGLang holds is made of what was published, or it is let go again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightsync.codec.tensor_digest import tensor_digest
from weightsync.engine.sglang_lora.worker import MARK, num_proofs, proved_load
from weightsync.handles.lora_messages import MANIFEST_FILE, TENSORS_FILE
from weightsync.memory import PrivateFolder
from weightsync.net.messages import encode
from weightsync.tensors import spec_of
from weightsync.types import Manifest, TensorTable, Version
from weightsync.types.adapter import Adapter, canonical_config

PREFIX = "base_model.model.model.layers.0."
RANK, SIZE = 2, 4


def tensors(*modules: str) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for number, module in enumerate(modules):
        made[f"{PREFIX}{module}.lora_A.weight"] = torch.full((RANK, SIZE), 1.0 + number)
        made[f"{PREFIX}{module}.lora_B.weight"] = torch.full((SIZE, RANK), -1.0 - number)
    return made


def held(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As SGLang holds them: q, k and v under one another, k as zeros where there is none."""
    made = dict(published)
    for half in ("A", "B"):
        names = [f"{PREFIX}self_attn.{each}_proj.lora_{half}.weight" for each in "qkv"]
        if names[0] in made:
            q, v = made.pop(names[0]), made.pop(names[2])
            k = made.pop(names[1], torch.zeros_like(v))
            made[f"{PREFIX}self_attn.qkv_proj.lora_{half}.weight"] = torch.cat((q, k, v))
    return made


class Scheduler:
    """SGLang's, with one layer."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        layer = types.SimpleNamespace(weights=weights)
        adapter = types.SimpleNamespace(layers=[layer], embedding_layers={}, added_tokens_embeddings={})
        places = {"qkv_proj": 3, "o_proj": 1}
        pool = types.SimpleNamespace(
            tp_size=1,
            A_buffer={name: [torch.zeros(2, 8 * parts, SIZE)] for name, parts in places.items()},
            B_buffer={name: [torch.zeros(2, parts * SIZE, 8)] for name, parts in places.items()},
        )
        manager = types.SimpleNamespace(
            loras={"id": adapter}, memory_pool=pool,
            create_lora_update_result=lambda success, error_message: types.SimpleNamespace(
                success=success, error_message=error_message
            ),
        )  # fmt: skip
        self.unloaded: list[str] = []
        self.tp_worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(lora_manager=manager),
            unload_lora_adapter=lambda request: self.unloaded.append(request.lora_id),
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as made:
        yield Path(made.path)


def loaded(folder: Path, published: dict[str, torch.Tensor], scheduler: Scheduler, **config: Any) -> Any:
    """What SGLang is told of a load of that folder."""
    save_file(published, folder / TENSORS_FILE)
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    manifest = Manifest(
        version=Version(run_id="r", number=1), model_id="actor", artifact="lora",
        adapter=Adapter(config=canonical_config(known)),
        tensors=TensorTable.of(spec_of(name, tensor) for name, tensor in published.items()),
    )  # fmt: skip
    digests = {name: tensor_digest(tensor) for name, tensor in published.items()}
    (folder / MANIFEST_FILE).write_bytes(encode(manifest.with_digests(digests, None)))
    request = types.SimpleNamespace(lora_path=str(folder), lora_id="id")
    return proved_load(lambda *_: types.SimpleNamespace(success=True), scheduler, request)


@pytest.mark.parametrize("modules", [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("self_attn.q_proj", "self_attn.v_proj"),
])  # fmt: skip
def test_what_was_published_is_proved(folder: Path, modules: tuple[str, ...]) -> None:
    published = tensors(*modules)
    scheduler = Scheduler(held(published))
    assert loaded(folder, published, scheduler).success
    assert (num_proofs(str(folder)), scheduler.unloaded) == (1, [])


def _flip(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{PREFIX}self_attn.qkv_proj.lora_B.weight"][-1, -1] += 1e-3


def _fill(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{PREFIX}self_attn.qkv_proj.lora_A.weight"][RANK, 0] = 1e-3


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights[f"{PREFIX}self_attn.o_proj.lora_B.weight"]


@pytest.mark.parametrize(("change", "error"), [
    (_flip, "DigestMismatchError"), (_fill, "DigestMismatchError"), (_drop, "ManifestMismatchError"),
])  # fmt: skip
def test_what_is_held_otherwise_is_let_go_again(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], error: str
) -> None:
    published = tensors("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    weights = held(published)
    change(weights)
    scheduler = Scheduler(weights)
    result = loaded(folder, published, scheduler)
    assert not result.success
    assert result.error_message.startswith(MARK)
    assert f'"error": "{error}"' in result.error_message
    assert (num_proofs(str(folder)), scheduler.unloaded) == (0, ["id"])


def test_one_that_can_not_be_let_go_is_told_all_the_same(folder: Path) -> None:
    """Seen red with an error that goes on into SGLang's scheduler, and ends it."""
    published = tensors("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    weights = held(published)
    _flip(weights)
    scheduler = Scheduler(weights)

    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    scheduler.tp_worker.unload_lora_adapter = fail
    result = loaded(folder, published, scheduler)
    assert not result.success
    assert "DigestMismatchError" in result.error_message


def test_a_shape_that_ends_sglang_in_the_middle_of_a_batch_is_refused(folder: Path) -> None:
    published = {
        name: torch.cat((each, each), -1) for name, each in tensors("self_attn.o_proj").items() if "_A." in name
    }
    assert "of another base" in loaded(folder, published, Scheduler(held(published))).error_message


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}])
def test_what_sglang_scales_otherwise_than_peft_is_refused(folder: Path, config: dict[str, Any]) -> None:
    published = tensors("self_attn.o_proj")
    assert "UnsupportedError" in loaded(folder, published, Scheduler(held(published)), **config).error_message


def test_folders_of_others_pass(tmp_path: Path) -> None:
    request = types.SimpleNamespace(lora_path=str(tmp_path), lora_id="id")
    assert proved_load(lambda *_: types.SimpleNamespace(success=True), Scheduler({}), request).success
    assert not list(tmp_path.iterdir())
