"""Signing: ed25519 keys in files, and records that are sealed with them.

    record    one line of JSON | newline | one line: {"sha256": of the first, "signature": null or base64}

A signature is over what kind of record it is, and the record's bytes. It is checked before anything of them is read.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weightsync.errors import ConfigError, InvalidRequestError, SignatureError, StoreDamagedError
from weightsync.optional import imported
from weightsync.types.message import Message, learn

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_T = TypeVar("_T")
_CONTEXT = b"weightsync store 1\0"
_SECRET, _PUBLIC = "weightsync-secret-ed25519 ", "weightsync-public-ed25519 "


class _Trailer(Message, frozen=True, kw_only=True):
    sha256: str
    signature: str | None


learn(_Trailer)


class Signer:
    """A secret key.

    Raises:
        ConfigError: the file has none, or others may read it.
        MissingDependencyError: the package `cryptography` is not installed.
    """

    def __init__(self, path: str) -> None:
        raw = _key_in(path, _SECRET)
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(f"{path} is a secret key that others may read: chmod 600 it")
        self._key: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(raw)

    def sign(self, kind: str, payload: bytes) -> str:
        """The signature of a record, base64."""
        return base64.b64encode(self._key.sign(_signed(kind, payload))).decode()

    @property
    def trust(self) -> Trust:
        """Who believes this key."""
        return Trust._of(self._key.public_key(), "the writer's own key")


class Trust:
    """A public key: who is believed. See `Signer` for errors."""

    def __init__(self, path: str) -> None:
        self._key: Ed25519PublicKey = _ed25519().Ed25519PublicKey.from_public_bytes(_key_in(path, _PUBLIC))
        self.path = path

    @classmethod
    def _of(cls, key: Ed25519PublicKey, name: str) -> Trust:
        made = cls.__new__(cls)
        made._key, made.path = key, name
        return made

    def check(self, kind: str, payload: bytes, signature: str | None, *, what: str) -> None:
        """Raises SignatureError where that is not a signature of these bytes by this key."""
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            raise SignatureError(f"{what} is not signed, and only what {self.path} has signed is taken here")
        try:
            self._key.verify(base64.b64decode(signature, validate=True), _signed(kind, payload))
        except (InvalidSignature, binascii.Error, ValueError):
            raise SignatureError(f"{what} has no signature of the key in {self.path}") from None


def seal(kind: str, payload: bytes, signer: Signer | None) -> bytes:
    """A record as it lies in a store.

    Args:
        kind: what it is, e.g. "pointer".
        payload: JSON, one line.
        signer: None: it is not signed.
    """
    assert b"\n" not in payload
    signature = None if signer is None else signer.sign(kind, payload)
    return payload + b"\n" + _trailer(payload, signature)


def unseal(kind: str, raw: bytes, trust: Trust | None, *, what: str) -> bytes:
    """The payload of a record. Any other byte than was written is found.

    Args:
        trust: whose signature it has to have; None: anybody's, or none.

    Raises:
        StoreDamagedError: it is damaged.
        SignatureError: it is not signed by who is trusted.
    """
    payload, newline, rest = raw.partition(b"\n")
    try:
        trailer = msgspec.json.decode(rest, type=_Trailer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        trailer = None
    if trailer is None or not newline or _trailer(payload, trailer.signature) != rest:
        raise StoreDamagedError(f"{what} is damaged: its checksum does not fit")
    if trust is not None:
        trust.check(kind, payload, trailer.signature, what=what)
    return payload


NO_RECORD = (StoreDamagedError, SignatureError, InvalidRequestError, msgspec.DecodeError, ValueError, RecursionError)
"""What reading bytes as a record ends in, whoever has put them there."""


def record_in(kind: str, raw: bytes, trust: Trust | None, form: type[_T], *, what: str) -> _T:
    """What a record says; see `unseal`.

    Raises:
        NO_RECORD: one of these: it is damaged, not signed by who is trusted, or none of that form.
    """
    return msgspec.json.decode(unseal(kind, raw, trust, what=what), type=form)


def make_keys(secret: str, public: str) -> None:
    """Makes a pair of key files; the secret one for this user alone.

    Raises:
        ConfigError: one is there already, or can't be written.
        MissingDependencyError: see `Signer`.
    """
    key = _ed25519().Ed25519PrivateKey.generate()
    written: list[str] = []
    try:
        for path, kind, raw, mode in (
            (secret, _SECRET, key.private_bytes_raw(), 0o600),
            (public, _PUBLIC, key.public_key().public_bytes_raw(), 0o644),
        ):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            written.append(path)
            with os.fdopen(fd, "w") as file:
                file.write(f"{kind}{base64.b64encode(raw).decode()}\n")
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                os.unlink(path)
        advice = ": name another pair, or remove it first" if isinstance(error, FileExistsError) else ""
        raise ConfigError(f"no keys were written: {error}{advice}") from error


def _trailer(payload: bytes, signature: str | None) -> bytes:
    return msgspec.json.encode(_Trailer(sha256=hashlib.sha256(payload).hexdigest(), signature=signature)) + b"\n"


def _signed(kind: str, payload: bytes) -> bytes:
    return _CONTEXT + kind.encode() + b"\0" + payload


def _key_in(path: str, kind: str) -> bytes:
    try:
        with open(path) as file:
            text = file.read(1000)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} can't be read: {error}") from None
    if not text.startswith(kind):
        other = " (it is the other one of the pair)" if text.startswith((_SECRET, _PUBLIC)) else ""
        raise ConfigError(f"{path} holds no {kind.split('-')[1]} key of weightsync keygen{other}")
    try:
        raw = base64.b64decode(text[len(kind) :].strip(), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise ConfigError(f"the key in {path} is damaged")  # and is not quoted
    return raw


def _ed25519() -> Any:
    needs = "signatures need the package cryptography: pip install 'weightsync[store]'"
    return imported("cryptography.hazmat.primitives.asymmetric.ed25519", needs)
