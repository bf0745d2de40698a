"""The seal of a grant: a checksum over all that a receiver takes on an agent's word.

Blocks have checksums of their own, and a layout is named by its digest; what says which version they are, and which
digests it has, would have none. It finds accidents, and no adversary: against those there is TLS.
"""

from __future__ import annotations

import hashlib

import msgspec

_DIGITS = 32


def seal_of(head: bytes, proof: bytes, *, source: int, incarnation: str | None) -> str:
    """32 hex digits.

    Args:
        head: a publication without its layout (`types.layout.PublicationHead`), as msgspec writes it in JSON.
        proof: likewise.
        source, incarnation: as in the grant.
    """
    state = hashlib.sha256()
    for piece in (head, proof, msgspec.json.encode([source, incarnation])):
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.hexdigest()[:_DIGITS]
