"""lent: which staging tensors a model has taken for its own."""

from __future__ import annotations

import torch
from torch import nn

from weightsync.load.whole import lent


def test_every_way_to_share_is_seen() -> None:
    """Whole, in part, as a buffer, under another name, through numpy. Seen red by addresses alone."""
    staging = {name: torch.zeros(8) for name in ("whole", "part", "buffer", "renamed", "numpy", "copied", "spare")}
    staging["empty"] = torch.zeros(0)
    model = nn.Module()
    model.whole = nn.Parameter(staging["whole"])
    model.part = nn.Parameter(staging["part"][2:6].view(2, 2))
    model.register_buffer("buffer", staging["buffer"].view(torch.int32), persistent=False)
    model.inner = nn.Linear(8, 1, bias=False)
    model.inner.weight.data = staging["renamed"].unsqueeze(0)
    model.foreign = nn.Parameter(torch.from_numpy(staging["numpy"].numpy()[5:]))
    model.copied = nn.Parameter(staging["copied"].clone())
    model.nothing = nn.Parameter(torch.zeros(0))
    model.meta = nn.Parameter(torch.zeros(8, device="meta"))
    model.sparse = nn.Parameter(torch.zeros(2, 2).to_sparse())
    assert lent(staging, model) == {"whole", "part", "buffer", "renamed", "numpy"}
    assert lent({}, model) == lent(staging, nn.Module()) == set()
