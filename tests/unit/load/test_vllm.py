"""VLLMWeightLoader up to the commit, which needs vLLM (tests/engines, tests/contract/test_vllm_generations.py)."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.load.test_patching import Kernels
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load import patching, vllm_checkpoint, vllm_reload
from weightsync.load.vllm import VLLMWeightLoader
from weightsync.load.vllm_layers import LayerNotes
from weightsync.load.vllm_trust import _NO_HOOK
from weightsync.tensors import spec_of
from weightsync.types import Full, Manifest, Patch, Version


def hf_config(*, tied: bool) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
    )


def checkpoint(*, tied: bool) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in bfloat16."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return {name: p.detach().bfloat16() for name, p in Qwen3ForCausalLM(hf_config(tied=tied)).named_parameters()}


def loader_of(config: Any) -> VLLMWeightLoader:
    """A loader of a model that vLLM would have built; its fused names don't matter before the commit."""
    fused = nn.Linear(2, 2).bfloat16()
    return VLLMWeightLoader(fused, model_config=SimpleNamespace(hf_config=config, dtype=torch.bfloat16))


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(
        version=Version(run_id="r", number=1),
        model_id="m",
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
    )


def replaced(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The same with one tensor exchanged, or left out."""
    return {key: value for key, value in {**tensors, name: tensor}.items() if value is not None}


def test_a_whole_checkpoint_is_taken() -> None:
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(checkpoint(tied=False)))
    with pytest.raises(StateError, match="under way"):
        loader.begin(manifest(checkpoint(tied=False)))
    loader.abort("enough")
    loader.begin(manifest(checkpoint(tied=False)))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", None, r"the trainer does not send 1 of the model's tensors: model.norm.weight \["),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(8).bfloat16(), "no such tensor"),
        ("model.norm.weight", torch.zeros(9).bfloat16(), r"the engine's model has \(8,\)"),
        ("model.norm.weight", torch.zeros(8), "would convert"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_what_vllm_would_load_in_part_or_convert_is_refused(name: str, tensor: torch.Tensor, words: str) -> None:
    """Before anything is changed: the next good manifest is taken."""
    loader = loader_of(hf_config(tied=False))
    whole = checkpoint(tied=False)
    with pytest.raises(ManifestMismatchError, match=words) as caught:
        loader.begin(manifest(replaced(whole, name, tensor)))
    assert caught.value.parameter == name
    loader.begin(manifest(whole))


@pytest.mark.parametrize("said", [True, False], ids=["by transformers", "by nobody"])
def test_what_trainers_keep_in_float32_is_sent_in_that(said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the routers' bias of DeepSeek-V3, by whatever name vLLM has it. Seen red: it was rounded to bfloat16."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

    if said:
        monkeypatch.setattr(Qwen3PreTrainedModel, "_keep_in_fp32_modules_strict", {"k_norm"})
    else:  # as of MiniMax-M2
        monkeypatch.setattr(vllm_checkpoint, "_ROUTERS", ("k_norm",))
    model, name = nn.Linear(2, 2).bfloat16(), "model.layers.0.self_attn.k_norm.weight"
    config = SimpleNamespace(hf_config=hf_config(tied=False), dtype=torch.bfloat16)
    whole = checkpoint(tied=False)
    whole = {key: tensor.bfloat16() for key, tensor in whole.items()}
    VLLMWeightLoader(model, model_config=config).begin(manifest(whole))  # nothing is float32 there
    model.register_parameter("router", nn.Parameter(torch.zeros(2)))
    loader = VLLMWeightLoader(model, model_config=config)
    with pytest.raises(ManifestMismatchError, match="such numbers are kept in float32") as caught:
        loader.begin(manifest(whole))
    assert caught.value.parameter == name
    assert '{"dtype_overrides": {"*k_norm*": "float32"}}' in caught.value.message
    loader.begin(manifest(replaced(whole, name, torch.zeros(4))))


def test_what_vllm_would_round_is_refused_and_what_it_widens_taken() -> None:
    """A head in float32, as of reward models, takes bfloat16. Seen red: it was refused; the glob matched nothing."""
    model = nn.Module()
    model.lm_head = nn.Linear(8, 16, bias=False)
    model.model = nn.Linear(2, 2).bfloat16()
    model.model.norm = nn.LayerNorm(8, bias=False).bfloat16()
    model.packed = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
    loader = VLLMWeightLoader(
        model, model_config=SimpleNamespace(hf_config=hf_config(tied=False), dtype=torch.bfloat16)
    )
    whole, name = checkpoint(tied=False), "model.norm.weight"
    loader.begin(manifest(whole))
    loader.abort("next")
    for other in (torch.float32, torch.float8_e4m3fn):
        with pytest.raises(ManifestMismatchError, match="vLLM has this parameter in bfloat16 and would conv") as caught:
            loader.begin(manifest(replaced(whole, name, whole[name].to(other))))
        assert caught.value.parameter == name
        assert '{"dtype_overrides": {"*norm.weight": "bfloat16"}}' in caught.value.message
    assert fnmatch.fnmatchcase(name, "*norm.weight")


def test_experts_are_taken_as_modules_and_as_files_have_them() -> None:
    """Seen red: names of files were refused, which an exporter, a folder's agent and older trainers send."""
    conversion = pytest.importorskip("transformers.core_model_loading", reason="this release stacks no experts")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, moe_intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=4, tie_word_embeddings=True,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    stacked = {name: p.detach() for name, p in model.named_parameters()}
    files = {name: tensor.clone() for name, tensor in conversion.revert_weight_conversion(model, stacked).items()}
    one = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert one in files
    loader = loader_of(config)
    for whole in (files, stacked, files):
        loader.begin(manifest(whole))
        loader.abort("next")
    assert loader._expected.canonical("lm_head.weight") == "model.embed_tokens.weight"
    for odd, words in (
        (replaced(files, one, None), f"the trainer does not send 1 of the model's tensors: {one}"),
        (
            replaced(files, one, torch.zeros(5, 8).bfloat16()),
            r"the trainer sends \(5, 8\), the engine's model has \(6, 8\)",
        ),
        ({**files, "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 12, 8).bfloat16()}, "no such tensor"),
    ):
        with pytest.raises(ManifestMismatchError, match=words):
            loader.begin(manifest(odd))


def test_all_that_differs_is_said_at_once() -> None:
    """Seen to fail: the first difference alone was told, and the next one at the next try."""
    loader = loader_of(hf_config(tied=False))
    odd = replaced(checkpoint(tied=False), "model.norm.weight", torch.zeros(9))
    odd = replaced(replaced(odd, "lm_head.weight", None), "head.weight", torch.zeros(2))
    odd["model.layers.0.input_layernorm.weight"] = torch.zeros(8)
    with pytest.raises(ManifestMismatchError) as caught:
        loader.begin(manifest(odd))
    text = caught.value.message
    assert text.startswith("4 tensors differ: ")
    for words in (
        "model.layers.0.input_layernorm.weight: the trainer sends float32, vLLM serves this model as bfloat16",
        "model.norm.weight: the trainer sends (9,), the engine's model has (8,)",
        "head.weight: the engine's model has no such tensor",
        "lm_head.weight: the trainer does not send it",
    ):
        assert words in text
    assert text.count("name_map=") == text.count("send bfloat16 (dtype=") == 1


def test_tied_weights_come_once_under_any_of_their_names() -> None:
    whole = checkpoint(tied=True)
    assert "lm_head.weight" not in whole
    loader = loader_of(hf_config(tied=True))
    loader.begin(manifest(whole))
    loader.abort("next")
    other = replaced(replaced(whole, "lm_head.weight", whole["model.embed_tokens.weight"]),
                     "model.embed_tokens.weight", None)  # fmt: skip
    loader.begin(manifest(other))
    loader.abort("next")
    assert loader._expected.canonical("lm_head.weight") == "model.embed_tokens.weight"
    with pytest.raises(ManifestMismatchError, match="are one in the engine's model"):
        loader.begin(manifest({**whole, **other}))


def test_a_model_that_transformers_does_not_know_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(SimpleNamespace(architectures=["NobodyKnowsForCausalLM"]))
    with caplog.at_level(logging.WARNING):
        loader.begin(manifest({"anything": torch.zeros(2).bfloat16()}))
    assert "checked by vLLM alone" in caplog.text
    assert not loader._expected.known


def test_the_bucket_is_free_when_load_weights_returns() -> None:
    """Staged bytes are a copy: the transport reuses the bucket at once."""
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(whole))
    for name, tensor in whole.items():
        bucket = tensor.clone()
        loader.load_weights([Full(name=name, tensor=bucket)])
        bucket.fill_(7)
    loader.verify()
    assert all(torch.equal(loader._staging[name], tensor) for name, tensor in whole.items())


def test_a_buffer_that_vllm_skips_is_not_left_stale_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose loader knows parameters alone; a buffer that is in no checkpoint is nothing to miss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, _ in weights if name == "weight"}

    monkeypatch.setattr(vllm_reload, "_layerwise", lambda: SimpleNamespace(initialize_layerwise_reload=lambda _: None))
    reload = vllm_reload.LayerwiseReload(Model(), SimpleNamespace(quantization=None), None)
    reload.load([("weight", torch.ones(2)), ("cache", torch.ones(2))])
    reload.check(strict=False)
    reload.load([("mean", torch.ones(2))])
    with pytest.raises(LoadError, match="skipped 1 buffers") as caught:
        reload.check(strict=False)
    assert caught.value.parameter == "mean"


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "left out"])
def test_experts_that_are_packed_get_a_new_kernel(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Seen with vLLM 0.32 on a CPU: a reload left the weights unpacked for a kernel that reads packed ones. A kernel
    whose layer gets no weights comes back, and so does one whose reload fails; one that packs nothing stays."""

    class Packing:
        def process_weights_after_loading(self, layer: Any) -> None:
            raise NotImplementedError

    class Plain(Packing):
        """Has vLLM's own hook, which does nothing."""

    hook: Any = lambda self, layer: None  # noqa: E731
    hook.__module__, hook.__qualname__ = _NO_HOOK
    Plain.process_weights_after_loading = hook  # type: ignore[method-assign]
    model, old, new = nn.ModuleList([nn.Module(), nn.Module()]), SimpleNamespace(fused_experts=Packing()), object()
    packing, plain = SimpleNamespace(moe_kernel=old), SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=Plain()))
    model[0].quant_method, model[1].quant_method = packing, plain  # type: ignore[assignment]
    kept = plain.moe_kernel

    def finalize(*_: Any) -> None:
        if not loaded:
            raise RuntimeError("vLLM's")
        packing.moe_kernel = packing.moe_kernel or new

    opened = SimpleNamespace(initialize_layerwise_reload=lambda _: None, finalize_layerwise_reload=finalize)
    monkeypatch.setattr(vllm_reload, "_layerwise", lambda: opened)
    monkeypatch.setattr(vllm_reload, "_is_cpu", lambda: True)
    reload = vllm_reload.LayerwiseReload(model, SimpleNamespace(quantization=None), None)
    assert (packing.moe_kernel, plain.moe_kernel) == (None, kept)
    with contextlib.nullcontext() if loaded else pytest.raises(RuntimeError):
        reload.finish()
    assert packing.moe_kernel is (new if loaded else old)


def test_staging_is_allocated_once() -> None:
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(whole))
    first = {name: tensor.data_ptr() for name, tensor in loader._staging.items()}
    loader.abort("again")
    loader.begin(manifest(whole))
    assert {name: tensor.data_ptr() for name, tensor in loader._staging.items()} == first


def test_chunks_are_checked() -> None:
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    name, tensor = next(iter(whole.items()))
    with pytest.raises(StateError, match="begin first"):
        loader.load_weights([Full(name=name, tensor=tensor)])
    loader.begin(manifest(whole))
    loader.load_weights([Full(name=name, tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="came twice"):
        loader.load_weights([Full(name=name, tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="not in the manifest"):
        loader.load_weights([Full(name="odd", tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="announced was"):
        loader.load_weights([Full(name="model.norm.weight", tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="did not arrive"):
        loader.verify()
    with pytest.raises(StateError, match="what was loaded is"):
        loader.commit(Version(run_id="r", number=1))
    assert loader.healthy, "nothing of it touched the live model"


def test_live_weights_are_unprovable_and_a_part_is_refused() -> None:
    loader = loader_of(hf_config(tied=False))
    with pytest.raises(UnsupportedError, match="compared in the commit of a full load"):
        next(iter(loader.live_tensors()))
    with pytest.raises(UnsupportedError, match="not shown its model"):
        VLLMWeightLoader(None, model_config=None).begin(manifest(checkpoint(tied=False)))


class Fused(nn.Module):
    """q and k in one parameter, as vLLM has them, and a loader that knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(4, 6), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            {"q": self.qk.data[:4], "k": self.qk.data[4:], "out": self.out.data}[name].copy_(tensor)


class PlainReload:
    """As vLLM's own where it repacks nothing."""

    def __init__(self, model: Fused, *_: Any, only: Any = None) -> None:
        self.notes = LayerNotes()
        self._model = model

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(weights)

    def check(self, *, strict: bool) -> None:
        assert strict, "what a checkpoint of it holds is not known"

    def finish(self) -> None:
        """Nothing is repacked."""


class Live:
    """A loader of a fused model, with versions of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reload: type[PlainReload] = PlainReload) -> None:
        monkeypatch.setattr("weightsync.load.vllm.LayerwiseReload", reload)
        monkeypatch.setattr("weightsync.load.vllm.doubts", lambda model: {})
        self.model = Fused()
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Nobody"]), dtype=torch.float32)
        self.loader = VLLMWeightLoader(self.model, model_config=config)
        self.whole = {"q": torch.ones(4, 4), "k": torch.full((2, 4), 2.0), "out": torch.full((4, 6), 3.0)}
        self._number = 0

    def manifest(self) -> Manifest:
        self._number += 1
        specs = tuple(spec_of(name, tensor) for name, tensor in self.whole.items())
        return Manifest(version=Version(run_id="r", number=self._number), model_id="m", tensors=specs)

    def full(self) -> None:
        new = self.manifest()
        self.loader.begin(new)
        self.loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in self.whole.items())
        self.loader.verify()
        self.loader.cover([self.loader.coverage()])
        self.loader.commit(new.version)

    def prepared(self, value: float) -> Manifest:
        """A patch of some elements of k and out, ready to be committed; `whole` is as before."""
        new = self.manifest()
        self.loader.begin_patch(new)
        for name, where in (("k", [1, 6]), ("out", [0, 23])):
            values = torch.full((2,), value)
            self.loader.load_weights([Patch(name=name, positions=torch.tensor(where), values=values)])
        assert [change.new.tolist() for change in self.loader.prepare_patch()] == [[value] * 2] * 2
        return new

    def patched(self, value: float) -> None:
        self.loader.commit(self.prepared(value).version)
        self.whole["k"].view(-1)[[1, 6]] = value
        self.whole["out"].view(-1)[[0, 23]] = value

    def serves(self) -> bool:
        whole = {**self.whole}
        qk = torch.cat([whole["q"], whole["k"]])
        return torch.equal(self.model.qk, qk) and torch.equal(self.model.out, whole["out"])


def test_a_patch_enters_the_fused_parameters_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(monkeypatch)
    live.full()
    assert (live.loader.proved, live.loader.marked, live.serves()) == (True, {}, True)
    live.patched(7.0)
    assert live.serves()
    live.patched(8.0)
    assert live.serves(), "the base has followed"
    before = {name: tensor.clone() for name, tensor in live.whole.items()}
    live.patched(9.0)
    live.loader.rollback()
    live.whole = before
    assert live.serves()
    live.patched(10.0)
    assert live.serves(), "the base is that of the version before"
    assert {held.spec.name for held in live.loader.live_tensors()} == {"q", "k", "out"}
    live.loader.settle()
    with pytest.raises(StateError, match="no patch"):
        live.loader.rollback()


def test_an_aborted_full_load_costs_the_base_and_a_full_one_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to be told as "can't be patched", which is for good; the staging held half of another version."""
    live = Live(monkeypatch)
    live.full()
    live.loader.begin(live.manifest())
    live.loader.load_weights([Full(name="q", tensor=torch.full((4, 4), -1.0))])
    live.loader.abort("the trainer died")
    assert (live.loader.proved, live.serves()) == (True, True)
    with pytest.raises(StateError, match="a full load was aborted"):
        live.prepared(7.0)
    live.full()
    live.patched(7.0)
    assert live.serves()


def test_a_patch_that_is_aborted_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(monkeypatch)
    live.full()
    live.prepared(7.0)
    live.loader.abort("another worker failed")
    assert live.serves()
    live.patched(8.0)
    assert live.serves()


def test_live_weights_that_somebody_else_writes_end_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(monkeypatch)
    live.full()
    live.model.out.data[0, 0] = -5.0
    with pytest.raises(LoadError, match="not those of the version"):
        live.prepared(7.0)
    live.loader.abort("as told")
    live.model.out.data = live.model.out.data.clone()
    with pytest.raises(LoadError, match="was moved"):
        live.prepared(7.0)


def test_live_weights_that_are_moved_before_the_commit_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(monkeypatch)
    live.full()
    new = live.prepared(7.0)
    old, live.model.out.data = live.model.out.data, live.model.out.data.clone()
    before = old.clone()
    with pytest.raises(LoadError, match="was moved"):
        live.loader.commit(new.version)
    assert torch.equal(old, before)


@pytest.mark.parametrize("fault", ["raise", "another writer", "lost"])
def test_a_failure_at_every_point_of_the_writes_leaves_exactly_what_was(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """In the middle of a parameter too: pieces are of one element. The next patch builds on what was."""
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 1)
    monkeypatch.setattr(patching, "num_cores", lambda: 1)
    live = Live(monkeypatch)
    live.full()
    failed = 0
    while True:
        new = live.prepared(50.0 + failed)

        def fail(number: int, name: str, memory: Any, rest: Any, *, point: int = failed) -> str:
            if number != point:
                return ""
            if fault == "raise":
                raise MemoryError("no")
            if fault == "another writer":
                memory[rest[0][0]] ^= 1
            return fault

        armed = Kernels(fail)
        with monkeypatch.context() as patch:
            patch.setattr(patching, "kernels", lambda armed=armed: armed)
            try:
                live.loader.commit(new.version)
            except LoadError:
                assert live.loader.healthy
                assert live.serves(), failed
            else:
                break  # it has no such point
        live.loader.abort("failed")
        assert live.serves(), failed
        failed += 1
    assert failed >= 4
    live.whole["k"].view(-1)[[1, 6]] = live.whole["out"].view(-1)[[0, 23]] = 50.0 + failed
    assert live.serves()


def test_a_repacked_parameter_is_found_in_the_commit_and_never_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repacks(PlainReload):
        def finish(self) -> None:
            self._model.out.data.copy_(self._model.out.data.flip(0).clone())

    live = Live(monkeypatch, Repacks)
    live.whole["out"] = torch.arange(24.0).reshape(4, 6)
    live.full()
    assert (live.loader.proved, set(live.loader.marked)) == (False, {"out"})
    with pytest.raises(UnsupportedError, match="out does not hold it as it came"):
        live.prepared(7.0)
    live.full()
    assert not live.loader.proved


def test_a_model_that_keeps_what_it_was_given_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: the staging was live, was proved by itself, and the next version was written into it before its commit."""

    class Keeps(PlainReload):
        def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            held = dict(weights)
            self._model.load_weights(held.items())
            self._model.out.data = held["out"]

    live = Live(monkeypatch, Keeps)
    live.full()
    assert (live.loader.proved, live.serves()) == (False, True)
    live.loader.begin(live.manifest())
    live.loader.load_weights([Full(name="out", tensor=torch.full((4, 6), -1.0))])
    live.loader.abort("as told")
    assert live.serves()
