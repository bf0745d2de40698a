"""An adapter is bound to its base by the digest of live bytes: whatever loads it, on the right base it is taken, on any
other it is refused in words, and what was served is served on.

Broken once: with the digest kept for ever, a base that was changed in place is not seen; with the check left out, the
wrong base takes the adapter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightsync
from tests.standins.lora import base_model, logits, peft_model, step
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.live_base import LiveBase
from weightsync.errors import SyncFailedError, WeightSyncError, WrongArtifactError, WrongBaseError
from weightsync.load.base import WeightLoader
from weightsync.load.merged import MergedAdapterLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader
from weightsync.types import Base, Version


def in_place(seed: int = 7) -> tuple[Any, WeightLoader]:
    model = peft_model(seed=seed)
    return model, PeftAdapterLoader(model)


def merged(seed: int = 7) -> tuple[Any, WeightLoader]:
    model = base_model(seed=seed)
    return model, MergedAdapterLoader(model)


def pushed(trained: Any, loader: WeightLoader, number: int, **options: Any) -> Any:
    with weightsync.push(trained, EmbeddedEngine.of(loader), model_id="lora", **options) as push:
        return push.step(number)


def cause_of(error: SyncFailedError) -> WeightSyncError:
    return next(iter(error.causes.values()))


@pytest.mark.parametrize("make", [in_place, merged])
def test_an_adapter_on_another_base_is_refused_and_the_old_one_served_on(make: Any) -> None:
    here, loader = make()
    trained = peft_model()
    engine = EmbeddedEngine.of(loader)
    with weightsync.push(trained, engine, model_id="lora") as push:
        report = push.step()
        assert report is not None
        assert report.total_bytes == report.sent_bytes
        served = logits(here)
        assert torch.allclose(served, logits(trained), atol=1e-5)
        step(trained, 2)
        with torch.no_grad():
            here.get_parameter(next(iter(dict(here.named_parameters())))).view(-1)[0] += 1  # of the base's embedding
        changed = logits(here)
        with pytest.raises(SyncFailedError) as caught:
            push.step()
    error = cause_of(caught.value)
    assert isinstance(error, WrongBaseError)
    assert "trained on base wsd2:" in str(error)
    assert torch.equal(logits(here), changed)
    with engine.generation(timeout_s=1) as version:
        assert version is not None
        assert version.number == 1


def test_a_base_is_read_again_where_it_was_written() -> None:
    """By a swap, in place, and past torch by a patch."""
    here, loader = in_place()
    digests = []
    live = LiveBase()
    digests.append(live.digest(loader))
    assert live.digest(loader) == digests[0]
    trained = base_model(seed=8)
    base = EmbeddedEngine.of(PeftBaseLoader(here))
    with weightsync.push(trained, base, model_id="base", dtype="keep", delta=True) as push:
        push.step()
        digests.append(live.digest(loader))
        for _ in range(2):
            with torch.no_grad():
                trained.get_parameter("model.norm.weight")[0] += 1
            report = push.step()
            digests.append(live.digest(loader))
        assert report is not None
        assert report.num_deltas == 1
    assert len(set(digests)) == 4
    with torch.no_grad():
        here.get_parameter("base_model.model.model.norm.weight")[0] += 1
    assert live.digest(loader) not in digests


def test_what_an_engine_does_not_take_is_refused_before_anything_is_changed() -> None:
    trained, plain = peft_model(), base_model()
    before = logits(plain)
    with pytest.raises(SyncFailedError) as caught:
        weightsync.push(trained, plain, model_id="lora")
    assert isinstance(cause_of(caught.value), WrongArtifactError)
    assert torch.equal(logits(plain), before)
    with pytest.raises(SyncFailedError) as caught:
        weightsync.push(trained, peft_model(), model_id="lora", merge=True)
    assert isinstance(cause_of(caught.value), WrongArtifactError)


def test_merged_it_is_a_model_like_any_other() -> None:
    trained, plain = peft_model(), base_model(seed=9)
    with weightsync.push(trained, plain, merge=True, dtype="keep") as push:
        report = push.step()
    assert report is not None
    assert report.digests_equal
    want = trained.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in plain.state_dict().items())


def test_an_adapter_that_is_bound_to_nothing_is_taken_anywhere() -> None:
    _, loader = in_place(seed=8)
    assert pushed(peft_model(), loader, 1, base=False).digests_equal


@pytest.mark.parametrize("make", [in_place, merged])
def test_an_adapter_that_is_bound_to_a_version_needs_an_engine_that_knows_its_base(make: Any) -> None:
    """Seen red: it was taken on any base, and proved."""
    base = Base(model_id="actor", version=Version(run_id="run", number=3))
    with pytest.raises(SyncFailedError) as caught:
        pushed(peft_model(), make(seed=8)[1], 1, base=base)
    error = cause_of(caught.value)
    assert isinstance(error, WrongBaseError)
    assert "AdapterEngine" in error.message


def test_a_digest_that_was_given_is_the_one_that_counts() -> None:
    _, loader = in_place()
    with pytest.raises(SyncFailedError) as caught:
        pushed(peft_model(), loader, 1, base="wsd2:" + "0" * 32)
    assert isinstance(cause_of(caught.value), WrongBaseError)


def test_a_change_of_an_adapter_is_written_where_it_is_live() -> None:
    trained, (here, loader) = peft_model(), in_place()
    with weightsync.push(trained, EmbeddedEngine.of(loader), model_id="lora", delta=True) as push:
        push.step()
        push.step()
        with torch.no_grad():
            trained.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight[0, 0] += 1
        report = push.step()
    assert report is not None
    assert (report.num_deltas, report.digests_equal) == (1, True)
    assert report.sent_bytes < report.total_bytes / 100
    assert torch.equal(logits(here), logits(trained))


def test_changes_are_taken_again_when_an_adapter_is_no_longer_merged_in_place() -> None:
    """Seen red: one change that came while it was merged, and each version after it went out in full."""
    trained, (here, loader) = peft_model(), in_place()
    parameter = trained.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight")
    with weightsync.push(trained, EmbeddedEngine.of(loader), model_id="lora", delta=True, base=False) as push:
        push.step()
        here.merge_adapter()
        with pytest.raises(SyncFailedError) as caught:
            push.step()
        assert "unmerge it first" in str(cause_of(caught.value))
        here.unmerge_adapter()
        with torch.no_grad():
            parameter[0, 0] += 1
        report = push.step()
    assert report is not None
    assert (report.num_deltas, report.digests_equal) == (1, True)


def test_a_base_that_was_swapped_twice_is_another_one() -> None:
    """It lies where the first one lay. Seen red: that one's digest was told of it."""
    model = base_model()
    loader, live, digests = MergedAdapterLoader(model), LiveBase(), set[str | None]()
    engine = EmbeddedEngine.of(ModuleWeightLoader(model))
    trained = base_model(seed=8)
    with weightsync.push(trained, engine, model_id="base", dtype="keep") as push:
        for number in (1, 2, 3, 4):
            with torch.no_grad():
                next(trained.parameters()).view(-1)[0] += 1
            push.step(number)
            if number != 2:  # nobody looks at the one between
                digests.add(live.digest(loader))
    assert len(digests) == 3
