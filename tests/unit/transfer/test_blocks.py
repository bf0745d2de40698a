"""The frames of a TCP pull: what is written is read back, and what was bent is refused."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from weightsync.errors import TransferError
from weightsync.transfer.blocks import (
    ANSWER,
    ASK,
    HELLO,
    MAGIC,
    Answer,
    Code,
    answer_bytes,
    ask_bytes,
    checksum,
    parse_answer,
    parse_ask,
)

answers = st.builds(
    Answer,
    code=st.sampled_from(Code),
    block=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**64 - 1),
)


def test_the_frames_are_those_of_the_document() -> None:
    """Test vectors: whoever writes another receiver starts from these bytes."""
    hello = HELLO.pack(MAGIC, bytes(range(16)))
    assert hello.hex() == "575350554c4c310a" + "000102030405060708090a0b0c0d0e0f"
    assert ask_bytes(7).hex() == "5753414b" + "07000000"
    told = Answer(code=Code.OK, block=7, offset=4096, length=4 << 20)
    assert (
        answer_bytes(told).hex() == "5753424b" + "0100" + "0000" + "07000000" + "0010000000000000" + "0000400000000000"
    )
    assert checksum(memoryview(b"weightsync")) == "f149a24055f1e042"


@given(answers)
def test_an_answer_comes_back_as_it_was(answer: Answer) -> None:
    assert parse_answer(answer_bytes(answer)) == answer


@given(st.integers(0, 2**32 - 1))
def test_an_ask_comes_back_as_it_was(block: int) -> None:
    assert parse_ask(ask_bytes(block)) == block


@given(answers, st.data())
def test_a_bent_head_is_refused_or_says_something_else(answer: Answer, data: st.DataObject) -> None:
    """Every byte that can be flipped: a typed error, or another block, place or length than was asked for."""
    raw = bytearray(answer_bytes(answer))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(TransferError):
        assert parse_answer(bytes(raw)) != answer


@given(st.binary(min_size=ANSWER.size, max_size=ANSWER.size))
def test_garbage_is_no_answer(raw: bytes) -> None:
    if not raw.startswith(b"WSBK"):
        with pytest.raises(TransferError):
            parse_answer(raw)


@given(st.binary(min_size=ASK.size, max_size=ASK.size))
def test_garbage_is_no_ask(raw: bytes) -> None:
    assert (parse_ask(raw) is None) == (not raw.startswith(b"WSAK"))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_checksum_sees_every_flipped_byte(raw: bytes, data: st.DataObject) -> None:
    bent = bytearray(raw)
    bent[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(memoryview(raw)) != checksum(memoryview(bent))
    assert len(checksum(memoryview(raw))) == 16
