"""What stays on the device: digests, the search for changes, patches."""

from __future__ import annotations

import numpy as np
import torch

from tests.gpu.timing import Bench, model_of, same_bits, words_of
from weightsync.codec.changes import ChangesCodec
from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_units import plan_units
from weightsync.codec.device_search import DeviceSearch
from weightsync.codec.digest import digest_of, shard_sum
from weightsync.load.patching import LivePatch
from weightsync.tensors import spec_of
from weightsync.types import HeldTensor, Manifest, Patch, PatchBase, Version, WeightChunk

SHARE = 0.01
"""Of the elements that change."""


def held(model: torch.nn.Module) -> list[HeldTensor]:
    """All of a model's parameters."""
    return [
        HeldTensor(spec=spec_of(name, parameter), box=None, tensor=parameter.detach())
        for name, parameter in model.named_parameters()
    ]


def prove_digest(bench: Bench) -> None:
    """It is the host's, for every dtype and odd shape; and how fast it is."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool):
        for shape in ((), (1,), (7,), (33, 5), (0, 3), (1025, 3), (300_007,)):
            words = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
            on_host = words.to(dtype)
            there = on_host.to(bench.device)
            for name, tensor in (("w", there), ("w", there.t().contiguous().t() if there.dim() == 2 else there)):
                assert shard_sum(HeldTensor(spec=spec_of(name, on_host), box=None, tensor=tensor)) == shard_sum(
                    HeldTensor(spec=spec_of(name, on_host), box=None, tensor=on_host)
                ), (dtype, shape)
    model = model_of(bench, seed=1)
    parts = held(model)
    specs = [part.spec for part in parts]
    on_host = [HeldTensor(spec=part.spec, box=None, tensor=part.tensor.cpu()) for part in parts]
    assert digest_of(parts, specs) == digest_of(on_host, specs)
    num_bytes = sum(spec.nbytes for spec in specs)
    took_s = bench.seconds(lambda: digest_of(parts, specs))
    host_s = bench.seconds(lambda: digest_of(on_host, specs))
    bench.row("shard_digest", took_s, bench.copy_s(num_bytes), "one copy on the device", num_bytes=num_bytes)
    bench.row("shard_digest_over_host", took_s, host_s, "the same bytes in host memory, all cores")
    bench.beside_generation("shard_digest", lambda: digest_of(parts, specs))


def changed(bench: Bench, model: torch.nn.Module) -> None:
    """Changes a share of every tensor's elements by their lowest bit, the first among them."""
    for parameter in model.parameters():
        words = words_of(parameter)
        which = torch.rand(len(words), device=bench.device) < SHARE
        which[0] = True
        words[which] ^= 1


def prove_changes(bench: Bench) -> None:
    """A push's search on the device, and an agent's through the device."""
    model = model_of(bench, seed=1)
    names, tensors = zip(*((name, parameter.detach()) for name, parameter in model.named_parameters()), strict=True)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    chunk = WeightChunk(names=names, tensors=tensors)
    specs = tuple(spec_of(name, tensor) for name, tensor in zip(names, tensors, strict=True))
    codec = ChangesCodec(keep_on="device")
    list(codec.encoder().encode([chunk]))
    number = 0

    def find() -> None:
        nonlocal number, found
        manifest = Manifest(version=Version(run_id="r", number=number), model_id="m", tensors=specs, model_digest="d")
        codec.ended(manifest)
        number += 1
        encoder = codec.encoder(PatchBase(version=manifest.version, model_digest="d"))
        found = list(encoder.encode([chunk]))

    found: list[WeightChunk] = []
    took_s = bench.seconds(find, before=lambda: changed(bench, model))
    pairs = {name: tensor for part in found for name, tensor in zip(part.names, part.tensors, strict=True)}
    assert pairs, "something changed"
    for name in names:
        where = pairs[f"{name}#positions"].cpu().numpy().astype(np.int64)
        live = words_of(dict(model.named_parameters())[name]).cpu()
        assert torch.equal(words_of(pairs[f"{name}#values"]).cpu(), live[torch.from_numpy(where)]), name
    bench.row("changes_of_a_push", took_s, bench.copy_s(num_bytes), "one copy on the device", num_bytes=num_bytes,
              share=SHARE)  # fmt: skip
    prove_agent_changes(bench)


def prove_agent_changes(bench: Bench) -> None:
    """The same delta, byte for byte, found on the device and on the host's cores."""
    num_bytes = min(bench.num_bytes, 1 << 30) // 2 * 2
    old = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    new = old.copy()
    words = new.view(np.uint16)
    words[np.random.default_rng(2).random(len(words)) < SHARE] ^= 1
    units = plan_units([(0, num_bytes, "bfloat16")])

    def encoded(search: DeviceSearch | None) -> bytes:
        return encode_delta(
            old, new, units, costs=CostModel(), base=bytes(16), result=bytes(16), search=search
        ).to_bytes()

    search = DeviceSearch(bench.device.type)
    assert encoded(search) == encoded(None)
    there_s, here_s = bench.seconds(lambda: encoded(search)), bench.seconds(lambda: encoded(None))
    bench.row("delta_encode_over_host", there_s, here_s, "the search on the host's cores", num_bytes=num_bytes)
    bench.beside_generation("delta_encode", lambda: encoded(search))


def prove_patch(bench: Bench) -> None:
    """Written in place on the device, proved, undone: exact bits; seconds against the bytes that it must touch."""
    model = model_of(bench, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    changed(bench, model)
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    patch, num_elements = LivePatch(), 0
    for name, parameter in model.named_parameters():
        where = torch.nonzero(words_of(before[name]) != words_of(after[name])).flatten().cpu()
        values = after[name].reshape(-1)[where.to(bench.device)]
        parameter.data.copy_(before[name])
        patch.add(parameter.detach(), Patch(name=name, positions=where, values=values))
        num_elements += len(where)
    gather_s = bench.seconds(patch.gather)
    apply_s = bench.seconds(patch.apply, before=patch.undo)
    for name, parameter in model.named_parameters():
        assert same_bits(parameter, after[name]), name
    undo_s = bench.seconds(patch.undo, before=lambda: (patch.undo(), patch.apply()))
    for name, parameter in model.named_parameters():
        assert same_bits(parameter, before[name]), name
    num_bytes = sum(tensor.nbytes for tensor in before.values())
    facts = {"num_bytes": num_bytes, "num_elements": num_elements, "num_tensors": len(before), "gather_s": gather_s,
             "undo_s": undo_s}  # fmt: skip
    bench.row("patch_apply", apply_s, bench.copy_s(num_bytes), "one copy of the model on the device", **facts)
    bench.beside_generation("patch_apply_and_undo", lambda: (patch.apply(), patch.undo()))
    patch.close()
