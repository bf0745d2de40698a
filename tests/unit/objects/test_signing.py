"""Keys in files, and sealed records: every other byte is found."""

from __future__ import annotations

import os

import pytest

from tests.standins.stores import flipped
from weightsync.errors import ConfigError, SignatureError, StoreDamagedError
from weightsync.objects.signing import Signer, Trust, make_keys, seal, unseal


@pytest.fixture
def keys(tmp_path):
    make_keys(f"{tmp_path}/k.secret", f"{tmp_path}/k.public")
    return tmp_path


def test_every_bit_counts(keys) -> None:
    signer, trust = Signer(f"{keys}/k.secret"), Trust(f"{keys}/k.public")
    raw = seal("pointer", b'{"a":1}', signer)
    assert unseal("pointer", raw, trust, what="x") == b'{"a":1}'
    for byte in range(len(raw)):
        for bit in (0, 5):
            with pytest.raises((StoreDamagedError, SignatureError)):
                unseal("pointer", flipped(raw, byte, bit), trust, what="x")
    with pytest.raises(SignatureError):
        unseal("version", raw, trust, what="x")
    with pytest.raises(SignatureError):
        unseal("pointer", seal("pointer", b'{"a":1}', None), trust, what="x")
    assert unseal("pointer", raw, None, what="x") == b'{"a":1}'


def test_the_secret_key_is_for_one_user(keys) -> None:
    secret = f"{keys}/k.secret"
    assert os.stat(secret).st_mode & 0o777 == 0o600
    os.chmod(secret, 0o644)
    with pytest.raises(ConfigError, match="others may read"):
        Signer(secret)


def test_wrong_files_are_named_and_never_quoted(keys) -> None:
    with pytest.raises(ConfigError, match="other one of the pair"):
        Trust(f"{keys}/k.secret")
    text = (keys / "k.public").read_text()
    (keys / "bad").write_text(text[:-10])
    with pytest.raises(ConfigError) as caught:
        Trust(f"{keys}/bad")
    assert text.split()[1][:10] not in str(caught.value)
    with pytest.raises(ConfigError):
        Trust(f"{keys}/none")
    before = (keys / "k.secret").read_bytes()
    with pytest.raises(ConfigError):
        make_keys(f"{keys}/k.secret", f"{keys}/k2.public")
    assert (keys / "k.secret").read_bytes() == before
