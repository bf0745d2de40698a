"""Names: of one file for any text, and the one that was meant where another one was said."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from itertools import takewhile
from urllib.parse import quote

_LONGEST_NAME = 120
_MAX_COMPARED = 2000
"""Names that are compared letter by letter: a model may have a hundred thousand."""


def as_name(text: str) -> str:
    """One name in a folder, whatever the text is: what a path can't hold is written as in a URL, and what is too long
    ends in a hash. Different texts have different names.
    """
    name = quote(text, safe=" ", errors="surrogatepass")
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 33]}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
    return f"%2E{name[1:]}" if name.startswith(".") else name


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None where none is close.

    Of a tensor's names the one with the longest common end counts, component by component: a wrapper, or another
    framework, adds or takes away at the front. Else the one that has most letters in common.
    """
    names = list(known)
    parts = name.split(".")
    shared = {
        each: sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts[::-1], each.split(".")[::-1], strict=False))
        )
        for each in names
        if each.endswith(parts[-1])
    }
    best = max(shared, key=lambda each: (shared[each], -len(each)), default=None)
    if best is not None and shared[best] >= min(2, len(parts)):
        return best
    found = difflib.get_close_matches(name, names[:_MAX_COMPARED], n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " did you mean 'x'?", or nothing where no known name is close."""
    found = closest(name, known)
    return "" if found is None else f" did you mean {found!r}?"
