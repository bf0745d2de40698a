"""A real SGLang of two tensor-parallel workers: each loads its shard, whichever way the bytes come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import weightsync
from tests.engines.sglang_kit import Place, Pulls, model_after, place
from tests.engines.sglang_support import NEEDS_SGLANG, sglang_is_there

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("sglang-tp"), tp=2) as there:
        yield there


def test_two_workers_load_each_its_shard(there: Place) -> None:
    """By file, by memory and by group: there and back, so that each way has something to change."""
    for load_by in ("file", "tensor"):
        with contextlib.closing(Pulls(there.server, load_by=load_by)) as run:
            for steps in (1, 0):
                run.publish(steps)
                status = run.sync()
                there.serves(steps)
                assert status.checksums == {"sglang": there.checksum(steps)}
                if load_by == "tensor":
                    assert "each of 2 workers has a shard" in status.unprovable["sglang"]
    with weightsync.push(model_after(1), [f"sglang+{there.server.url}"], dtype="keep") as push:
        assert push.step() is not None
    there.serves(1)
