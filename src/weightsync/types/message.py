"""Message: the base of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, keyword-only, unknown fields refused."""
