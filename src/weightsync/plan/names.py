"""What a text is called where it has to be the name of one file."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

_LONGEST_NAME = 120


def as_name(text: str) -> str:
    """One name in a folder, whatever the text is: what a path can't hold is written as in a URL, and what is too long
    ends in a hash. Different texts have different names.
    """
    name = quote(text, safe=" ", errors="surrogatepass")
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 33]}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
    return f"%2E{name[1:]}" if name.startswith(".") else name
