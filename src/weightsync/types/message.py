"""Message: the base of all messages; and how a module has msgspec learn its own."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, keyword-only, unknown fields refused."""


def learn(*kinds: Any) -> None:
    """Called where a module ends, so under the import lock: msgspec learns what a type is made of at its first use, and
    two threads that use it first at the same moment end the process (segmentation fault, seen with 0.22)."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
