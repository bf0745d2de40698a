"""The lines of docs/loops.md: torchrun, Ray Train, Lightning, two ranks each; a host serves their last version."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.test_snippets import ALL
from weightsync.verbs.serving import Service, serve

ROOT = Path(__file__).parents[2]
PAGE = "docs/loops.md"
STEPS = 3
MODEL = """
import torch

def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)

def train_step(model):
    model(torch.ones(1, 8)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
            p.grad = None

"""
"""A step takes 1 from each parameter: so large is the gradient of the outputs' sum, for inputs of 1."""
LIGHTNING = """
import torch
from model import build_model

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, _):
        return self.model(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

trainer = lightning.Trainer(
    max_epochs=1, limit_train_batches=3, accelerator="cpu", devices=2, strategy="ddp", callbacks=[Publish()],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(6, 8), batch_size=1))
"""

pytestmark = pytest.mark.timeout(300)


def lines(number: int, url: str) -> str:
    """The page's block of that number, telling that host, and with a port that nobody else has."""
    code = [each.code for each in ALL if each.page == PAGE and each.language == "python"][number]
    told = 'to=["http://127.0.0.1:9000"]'
    assert told in code
    return code.replace(told, f'to=["{url}"], port=0, dtype="float32"')


@pytest.fixture
def served() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8)


@pytest.fixture
def host(served: torch.nn.Linear) -> Iterator[Service]:
    with serve({"actor": served}, port=0) as service:
        yield service


def run(folder: Path, code: str, *words: str) -> None:
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "train.py").write_text(code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, "train.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def check(host: Service, served: torch.nn.Linear) -> None:
    """It is the model after so many steps."""
    assert host.model_status("actor").version == STEPS
    torch.manual_seed(0)
    wanted = torch.nn.Linear(8, 8)
    for here, there in zip(served.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(here, there - 1.0 - 1.0 - 1.0)


def test_torchrun(tmp_path: Path, host: Service, served: torch.nn.Linear) -> None:
    run(tmp_path, lines(0, host.url), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    check(host, served)


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install weightsync[engines-cpu]")
def test_ray_train(tmp_path: Path, host: Service, served: torch.nn.Linear) -> None:
    run(tmp_path, "import ray\nray.init(num_cpus=3, include_dashboard=False)\n" + lines(1, host.url))
    check(host, served)


needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs Lightning: pip install weightsync[engines-cpu]"
)


@needs_lightning
def test_lightning(tmp_path: Path, host: Service, served: torch.nn.Linear) -> None:
    run(tmp_path, lines(2, host.url) + LIGHTNING)
    check(host, served)


@needs_lightning
def test_a_lightning_training_that_fails_before_it_begins_says_its_own_error() -> None:
    """Seen red: an AttributeError of the callback's, in its place."""
    import lightning

    class Wrong(lightning.LightningModule):
        def training_step(self, batch: torch.Tensor, _: int) -> None: ...

        def configure_optimizers(self) -> None:
            raise ValueError("a user's own mistake")

    page: dict[str, Any] = {}
    exec(lines(2, "http://127.0.0.1:9"), page)  # noqa: S102
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=1, callbacks=[page["Publish"]()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a user's own mistake"):
        trainer.fit(Wrong(), torch.utils.data.DataLoader(torch.ones(2, 8)))
