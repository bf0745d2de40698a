"""Layers as a person reads them: numbers of layers put together, reasons kept apart, workers merged."""

from __future__ import annotations

from weightsync.types.live_layer import LiveLayer, layers_of, merged_layers


def test_layers_are_put_together_where_all_else_is_the_same() -> None:
    found: dict[str, str | None] = {f"model.layers.{number}.mlp.down.weight": None for number in range(12)}
    found |= {f"model.layers.{number}.q.weight": f"layers.{number}.qkv packs it as int8" for number in range(3)}
    found |= {"model.layers.7.q.weight": None, "lm_head.weight": None}
    assert layers_of(found) == (
        LiveLayer(name="model.layers.*.q.weight", num_tensors=3, why="layers.*.qkv packs it as int8"),
        LiveLayer(name="model.layers.*.mlp.down.weight", num_tensors=12),
        LiveLayer(name="lm_head.weight", num_tensors=1),
        LiveLayer(name="model.layers.*.q.weight", num_tensors=1),
    )


def test_workers_of_one_engine_say_it_once() -> None:
    one = layers_of({"a.0.w": None, "a.1.w": None})
    other = layers_of({"a.0.w": None, "b": "repacked"})
    assert merged_layers([one, other]) == (
        LiveLayer(name="b", num_tensors=1, why="repacked"),
        LiveLayer(name="a.*.w", num_tensors=2),
    )


def test_a_model_of_strange_names_does_not_fill_the_screen() -> None:
    found: dict[str, str | None] = {f"w{number}": None for number in range(1000)}
    layers = layers_of({**found, "odd": "quantised"})
    assert len(layers) == 200
    assert layers[0] == LiveLayer(name="odd", num_tensors=1, why="quantised")
    assert sum(each.num_tensors for each in layers) == 1001
