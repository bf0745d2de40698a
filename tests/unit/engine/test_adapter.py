"""A base and its adapter on one module: whoever generates has a pair that was published together, in whatever order the
two come.

Broken once: without the look inside `generation`, the new base answers with the old adapter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.standins.lora import base_model, logits, peft_model, step
from weightsync.engine.adapter import AdapterEngine
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import ConfigError, NotServingError, SyncFailedError, WrongBaseError
from weightsync.extract.peft import base_extractor
from weightsync.handles.fanout import in_thread
from weightsync.load.merged import MergedAdapterLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader
from weightsync.memory import LeaseReader, ServingLease, boot_s
from weightsync.types import Base, Version


class Pair:
    """A trainer of both, and a module that serves both."""

    def __init__(self) -> None:
        self.trained, self.here = peft_model(), peft_model()
        self.base = EmbeddedEngine.of(PeftBaseLoader(self.here), engine_id="base")
        self.adapter = AdapterEngine(PeftAdapterLoader(self.here), self.base)
        self.bound: Base | None = None
        self.pushes = [
            weightsync.push(base_extractor(self.trained), self.base, model_id="actor", dtype="keep"),
            weightsync.push(self.trained, self.adapter, model_id="lora", base=False),
        ]

    def train(self, number: int) -> None:
        step(self.trained, number)
        with torch.no_grad():
            for parameter in self.trained.parameters():
                if not parameter.requires_grad:
                    parameter.add_(0.01 * number)

    def push_base(self, number: int) -> None:
        report = self.pushes[0].step(number)
        assert report is not None
        self.bound = Base(model_id="actor", version=report.version)

    def push_adapter(self, number: int) -> None:
        extractor: Any = self.pushes[1].sync._parts.extractor
        extractor.adapter = type(extractor.adapter)(config=extractor.adapter.config, base=self.bound)
        self.pushes[1].step(number)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for push in made.pushes:
        push.close()


def test_a_pair_answers_and_nothing_in_between(pair: Pair) -> None:
    with pair.adapter.generation() as version:
        assert version is None
    for number in (1, 2):
        pair.train(number)
        pair.push_base(number)
        if number == 2:
            with pytest.raises(NotServingError, match="the other half"), pair.adapter.generation(timeout_s=0.05):
                raise AssertionError("a mixed pair")
        waiting: list[bool] = []

        def ask(found: list[bool] = waiting) -> None:
            with pair.adapter.generation(timeout_s=20) as version:
                found.append(version is not None and torch.equal(logits(pair.here), logits(pair.trained)))

        thread = threading.Thread(target=ask)
        if number == 2:
            thread.start()
        pair.push_adapter(number)
        if number == 1:
            thread.start()
        thread.join(30)
        assert waiting == [True]


def test_a_generation_of_the_adapter_holds_off_its_base(pair: Pair) -> None:
    """The base's pause waits for it, as for the base's own."""
    pair.train(1)
    pair.push_base(1)
    pair.push_adapter(1)
    pair.train(2)
    before = logits(pair.here)
    with pair.adapter.generation():
        thread = threading.Thread(target=lambda: pair.push_base(2))
        thread.start()
        while pair.base._gate.serving and thread.is_alive():
            time.sleep(0.001)
        thread.join(0.2)
        assert thread.is_alive()
        assert torch.equal(logits(pair.here), before)
    thread.join(30)
    assert pair.base.version is not None
    assert pair.base.version.number == 2


def test_whoever_waits_for_the_adapter_does_not_run_in_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set's commit holds everybody, and may come when somebody is in the base's gate and not yet in the adapter's.

    Seen red: it waited there for the hold to end, the base's pause waited for it, and the commit failed.
    """
    lease = ServingLease(str(tmp_path / "lease"))
    here, reader = peft_model(), LeaseReader(lease.path)
    base = EmbeddedEngine.of(PeftBaseLoader(here), lease=reader)
    adapter = AdapterEngine(PeftAdapterLoader(here), base, lease=reader)
    lease.renew(boot_s() + 1000.0)
    passes, held = base.generation, threading.Event()

    @contextlib.contextmanager
    def held_behind(*, timeout_s: float) -> Iterator[Version | None]:
        with passes(timeout_s=timeout_s) as version:
            if not held.is_set():
                lease.hold(boot_s() + 100.0)
                held.set()
            yield version

    def generate(timeout_s: float) -> bool:
        with adapter.generation(timeout_s=timeout_s):
            return True

    monkeypatch.setattr(base, "generation", held_behind)
    try:
        waiting = in_thread(lambda: generate(30.0), name="waits")
        assert held.wait(10)
        base._gate.pause("s", timeout_s=5.0, lease_s=30.0)
        assert not waiting.done()
        base._gate.release("s")
        lease.lift()
        assert waiting.result(10)
        adapter._gate.pause("s", timeout_s=5.0, lease_s=30.0)
        with pytest.raises(NotServingError, match=r"paused for over 0\.05 s") as caught:
            generate(0.05)
        assert caught.value.state_left == "paused"
        adapter.fence("gone")
        with pytest.raises(NotServingError, match="refuses to serve: gone"):
            generate(30.0)
    finally:
        lease.remove()


def test_an_adapter_of_a_base_that_nobody_has_is_refused(pair: Pair) -> None:
    pair.train(1)
    pair.push_base(1)
    pair.push_adapter(1)
    served = pair.bound
    pair.bound = Base(model_id="actor", model_digest="wsd2:" + "0" * 32)
    with pytest.raises(SyncFailedError) as caught:
        pair.push_adapter(2)
    assert isinstance(next(iter(caught.value.causes.values())), WrongBaseError)
    pair.bound = served
    with pair.adapter.generation(timeout_s=1) as version:
        assert version is not None
        assert version.number == 1


def test_its_base_is_one_worker_of_this_process() -> None:
    with pytest.raises(ConfigError, match="one worker"):
        AdapterEngine(PeftAdapterLoader(peft_model()), EmbeddedEngine([object(), object()]))  # type: ignore[list-item]


def test_an_adapter_that_is_merged_into_its_base_is_refused() -> None:
    """Seen red: it was taken, and the one overwrote what the other had loaded, under the versions of a proper pair."""
    model = base_model()
    base = EmbeddedEngine.of(ModuleWeightLoader(model))
    with pytest.raises(ConfigError, match=r"PeftBaseLoader and PeftAdapterLoader.*merge=True"):
        AdapterEngine(MergedAdapterLoader(model), base)
