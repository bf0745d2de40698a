"""HostCopy: what an iterator gave, though its memory is used again, and walked to its end whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weightsync.adapters.host_copy import HostCopy
from weightsync.errors import ExtractError, InvalidRequestError


def gathered(versions: int, walked: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Three tensors in one memory, as a framework gathers them."""
    buffer = torch.empty(4)
    for number in range(3):
        buffer.fill_(10.0 * versions + number)
        walked.append(f"t{number}")
        yield f"t{number}", buffer
    buffer.fill_(-1.0)


def test_an_iterator_may_use_its_memory_again() -> None:
    """Seen to fail: with the tensors kept as they came."""
    copy = HostCopy()
    first = dict(copy.take(gathered(1, [])))
    assert {name: tensor[0].item() for name, tensor in first.items()} == {"t0": 10.0, "t1": 11.0, "t2": 12.0}
    where = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = copy.take(gathered(2, []))
    assert {name: tensor[0].item() for name, tensor in second.items()} == {"t0": 20.0, "t1": 21.0, "t2": 22.0}
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == where, "its memory is kept"


def test_what_changed_its_shape_or_is_gone() -> None:
    copy = HostCopy()
    copy.take([("a", torch.ones(4)), ("b", torch.ones(4))])
    assert {name: tensor.shape for name, tensor in copy.take([("a", torch.ones(2, 3))]).items()} == {"a": (2, 3)}
    assert copy.take([("a", torch.ones(2, 3, dtype=torch.bfloat16))])["a"].dtype == torch.bfloat16
    strided = copy.take([("a", torch.arange(6.0).reshape(2, 3).t())])["a"]
    assert strided.is_contiguous()
    assert strided.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_it_is_walked_to_its_end_where_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks walk theirs in step. Seen to fail: with the first error raised at once, they hung."""
    copy, walked = HostCopy(), list[str]()

    def no_room(self: HostCopy, name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(HostCopy, "_copy", no_room)
    with pytest.raises(ExtractError, match="no room") as caught:
        copy.take(gathered(1, walked))
    assert (walked, caught.value.parameter) == (["t0", "t1", "t2"], "t0")


def test_what_can_not_be_a_model() -> None:
    copy = HostCopy()
    with pytest.raises(InvalidRequestError, match="twice"):
        copy.take([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(InvalidRequestError, match="not one tensor"):
        copy.take([])


def test_what_the_iterator_raises_is_told() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        HostCopy().take(broken())
