"""Names: of one file for any text, and the one that was meant where another one was said."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from itertools import takewhile
from urllib.parse import quote

_LONGEST_NAME = 120
_NUMBERS = re.compile(r"\d+")
_ALIKE = 2 / 3
"""What of their letters two names have in common, at least, where one is a slip for the other."""
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
    """The known name that was probably meant; None where none is close, and where nothing but a number may be wrong.

    Of a tensor's names the one with the longest common end counts, component by component: a wrapper, or another
    framework, adds or takes away at the front. Else the one that has most letters in common.
    """
    numbers = _NUMBERS.findall(name)
    names = [each for each in known if _wraps(each, name) or _NUMBERS.findall(each) == numbers]
    parts = name.split(".")
    shared = {
        each: sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts[::-1], each.split(".")[::-1], strict=False))
        )
        for each in names
        if each.endswith(parts[-1])
    }
    best = max(shared, key=lambda each: (shared[each], -len(each)), default=None)
    if sum(_wraps(each, name) for each in names) > 1:
        return None  # of which of them?
    if best is not None and shared[best] >= min(2, len(parts)) and (_wraps(best, name) or _alike(best, name)):
        return best
    found = difflib.get_close_matches(name, names[:_MAX_COMPARED], n=3, cutoff=_ALIKE)
    return next((each for each in found if _alike(*_where_apart(each, name))), None)


def _wraps(one: str, other: str) -> bool:
    """Whether one of them is the other behind further components."""
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _where_apart(one: str, other: str) -> tuple[str, str]:
    """Both without the components that they have in common at the front and at the end."""
    ones, others = one.split("."), other.split(".")
    for _ in range(2):
        while ones and others and ones[-1] == others[-1]:
            ones.pop()
            others.pop()
        ones.reverse()
        others.reverse()
    return ".".join(ones), ".".join(others)


def _alike(one: str, other: str) -> bool:
    return not (one and other) or difflib.SequenceMatcher(None, one, other).ratio() >= _ALIKE


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " did you mean 'x'?", or nothing where no known name is close."""
    found = closest(name, known)
    return "" if found is None else f" did you mean {found!r}?"
