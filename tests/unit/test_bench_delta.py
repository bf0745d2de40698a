"""The delta benchmark measures what it says: real updates, right entropies, references that decode exactly.

Seen red: rows of `new` permuted otherwise than those of `old`, or not at all; a gap of 65536 that is not cut; a rank
map without the sign; a class's h(n / N) left out; a cache folder that others may write; a check of units that says
yes; a staging that is not put back.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("numba")

from bench import delta, delta_data
from bench.delta import REFERENCES, Bounds, Case, entropy_bits, zigzag_steps
from bench.delta_data import Bits, Recipe, Trained, tiled
from bench.harness import BenchArgs

from weightsync.codec.delta_units import plan_units

_TINY = Recipe(
    hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48, num_rows=2, row_length=32,
    pretrain_updates=10, updates=8, early_update=1, learning_rates=(1e-6, 1e-4),
)  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Trained:
    return delta_data.train(_TINY)


def _values(bits: Bits) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_equal_recipes_give_equal_bytes(data: Trained) -> None:
    again = delta_data.train(_TINY)
    assert again.densities == data.densities
    for first, second in zip(data.pairs, again.pairs, strict=True):
        assert np.array_equal(first.old, second.old)
        assert np.array_equal(first.new, second.new)
    other = delta_data.train(dataclasses.replace(_TINY, seed=1, learning_rates=(1e-6,), updates=2))
    assert not np.array_equal(other.pairs[0].old, data.pairs[0].old)


def test_pairs_are_single_adamw_updates_of_runs_that_learn_from_one_checkpoint(data: Trained) -> None:
    first, last = data.losses["pretrain"]
    assert last < first
    starts = [pair.old for pair in data.pairs if pair.phase == "early"]
    assert len(starts) == 2
    assert np.array_equal(*starts)
    for pair in data.pairs:
        old, new = _values(pair.old), _values(pair.new)
        number = 1 if pair.phase == "early" else _TINY.updates
        density = np.mean(pair.old != pair.new)
        assert density == pytest.approx(data.densities[pair.learning_rate][number - 1], abs=1e-6)
        assert 0 < density < 0.9
        # AdamW moves no weight by much more than the learning rate; a bf16 cast adds one step of its grid at most.
        grid = 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(abs(old), abs(new)), 1e-30))) - 7)
        assert (abs(new - old) <= 3 * pair.learning_rate + grid).all()
    slow, fast = (data.pair(rate, "late") for rate in _TINY.learning_rates)
    assert np.mean(slow.old != slow.new) < np.mean(fast.old != fast.new)


def test_what_was_made_is_kept_in_a_folder_of_our_own_only(
    data: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def train(recipe: Recipe) -> Trained:
        calls.append(recipe)
        return data

    monkeypatch.setattr(delta_data, "train", train)
    monkeypatch.setenv("WEIGHTSYNC_BENCH_CACHE", str(tmp_path / "mine"))
    delta_data.trained(_TINY)
    kept = delta_data.trained(_TINY)
    assert len(calls) == 1
    assert (kept.shapes, kept.densities, kept.losses) == (data.shapes, data.densities, data.losses)
    for first, second in zip(data.pairs, kept.pairs, strict=True):
        assert (first.learning_rate, first.phase) == (second.learning_rate, second.phase)
        assert np.array_equal(first.old, second.old)
        assert np.array_equal(first.new, second.new)
    (tmp_path / "mine").chmod(0o777)
    delta_data.trained(_TINY)
    assert len(calls) == 2


def test_tiles_have_the_same_rows_in_orders_of_their_own(data: Trained) -> None:
    pair = data.pair(1e-4, "late")
    size = len(pair.old)
    number = 2 * size + size // 3
    old, new = np.zeros(number, np.uint16), np.zeros(number, np.uint16)
    parts = tiled(pair, data.shapes, number, old=old, new=new)
    assert sum(count for _, count in parts) == number

    def rows(old: Bits, new: Bits) -> list[collections.Counter[bytes]]:
        found, at = [], 0
        for _, shape in data.shapes:
            both = np.stack([old[at : at + math.prod(shape)], new[at : at + math.prod(shape)]], axis=1)
            found.append(collections.Counter(row.tobytes() for row in both.reshape(shape[0], -1)))
            at += math.prod(shape)
        return found

    wanted = rows(pair.old, pair.new)
    for tile in (0, 1):
        cut = slice(tile * size, (tile + 1) * size)
        assert rows(old[cut], new[cut]) == wanted
        assert not np.array_equal(old[cut], pair.old)
    assert not np.array_equal(old[:size], old[size : 2 * size])


def test_entropies_of_hand_made_values() -> None:
    assert entropy_bits(np.array([], np.uint16)) == 0
    assert entropy_bits(np.array([7, 7, 7])) == 0
    assert entropy_bits(np.array([0, 1, 1, 0])) == pytest.approx(4)
    assert entropy_bits(np.array([0, 1, 2, 1 << 40])) == pytest.approx(8)


def test_a_step_is_one_place_in_the_order_of_the_reals() -> None:
    old = np.array([0x3F80, 0x3F80, 0xBF80, 0x8000, 0x0000, 0x3F7F], np.uint16)
    new = np.array([0x3F81, 0x3F7F, 0xBF81, 0x0000, 0x8001, 0x3F80], np.uint16)
    assert zigzag_steps(old, new).tolist() == [2, 1, 1, 2, 3, 2]


def test_bounds_of_hand_made_changes() -> None:
    one, two = 0x3F80, 0x4000
    old = np.full(8, one, np.uint16)
    new = old.copy()
    new[1::2] += 1
    units = plan_units([(0, 8, "bfloat16"), (8, 8, "bfloat16")])
    even = Bounds(old, new, units)
    assert (even.num_changed, even.density, even.order0, even.order0_by_unit) == (4, 0.5, 0, 0)
    old[1::2] = two
    new = old.copy()
    new[[1, 3, 5, 7]] += np.array([1, 1, 2, 2], np.uint16)
    told = Bounds(old, new)
    for found in (told.order0, told.steps):  # which ones is known; one bit each for +1 or +2
        assert found == pytest.approx(1 / 8)
    new[7] = old[7]
    other = Bounds(old, new)
    gaps, steps = 0.0, 3 * math.log2(3) - 2
    assert other.order0 * 24 == pytest.approx(gaps + steps)


@pytest.mark.parametrize(
    "places",
    [
        [],
        [0],
        [199_999],
        [65_535],
        [65_536],
        [65_537],
        [0, 65_536],
        [0, 65_537, 196_610],
        [131_071, 131_072, 199_999],
        range(200_000),
        range(3, 200_000, 97),
    ],
    ids=lambda places: f"{len(places)}-from-{next(iter(places), None)}",
)
@pytest.mark.parametrize("name", REFERENCES)
def test_references_decode_exactly(name: str, places: list[int]) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 200_000, dtype=np.uint16)
    new = old.copy()
    new[list(places)] ^= random.integers(1, 1 << 16, len(places), dtype=np.uint16)
    encode, decode = REFERENCES[name]
    pieces = encode(old, new)
    assert np.array_equal(decode(old, pieces), new)
    if name == "absolute_int32":
        assert sum(map(len, pieces)) == 6 * len(places)


def test_a_delta_that_decodes_to_other_bytes_is_no_result(data: Trained) -> None:
    case = Case(data, 3 * data.pairs[0].old.nbytes, (1e-6, "late"))
    encoded = case.encode()
    case.check(encoded)
    for _ in range(2):
        assert case.decode_s(encoded) > 0
        assert np.array_equal(case._staged().view(np.uint16), case.old)  # put back for the next turn
    case.new[5] ^= 1
    with pytest.raises(RuntimeError, match="do not decode"):
        case.check(encoded)
    case.close()


def test_every_row_is_measured_with_a_table_of_all_pairs(data: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "trained", lambda: data)
    size_gib = 2.5 * data.pairs[0].old.nbytes / (1 << 30)
    rows = delta.run(BenchArgs(gib=size_gib, repeats=1, rows=frozenset(delta.ROWS)))
    assert [row.row for row in rows] == list(delta.ROWS)
    json.dumps([row.to_dict() for row in rows])
    details = {row.row: row.detail for row in rows}
    assert len(details["delta_bytes"]["table"]) == len(data.pairs)
    assert details["delta_bytes"]["references"]["absolute_int32"]["bytes_a_change"] == 6
    assert details["delta_bytes"]["forms"].keys() == {"planes"}
    assert details["delta_encode"]["ratios"].keys() == {"encode"}
    assert details["delta_decode"]["ratios"].keys() == {"decode"}
    one = delta.run(BenchArgs(gib=size_gib, repeats=1, rows=frozenset({"delta_decode", "digest"})))
    assert [row.row for row in one] == ["delta_decode"]
