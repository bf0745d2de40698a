"""The web page of a controller, and what it reads: four static files and one answer in JSON.

The page takes nothing from elsewhere, and what instances say enters it as text alone. Its files hold no secret, so they
are served without the token, which a browser can't send with an address; `/overview` demands it.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response

from weightsync.control.web.headline import Fact, facts, troubled_first
from weightsync.control.web.history import History, VersionPoint
from weightsync.net.server import Api, json_of
from weightsync.types.control import SPANS, ControllerStatus

OPEN_PATHS = frozenset({"/", "/page.js", "/plots.js", "/page.css"})
"""What a server answers without a token."""

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What `/overview` answers.

    Attributes:
        facts: what is to be said, the worst first.
        status: the tables; of the instances the troubled ones first.
        versions: what the plots show.
        spans: names of what a sync waits for, in the order of the legend.
    """

    facts: tuple[Fact, ...]
    status: ControllerStatus
    versions: tuple[VersionPoint, ...] = ()
    spans: tuple[str, ...] = SPANS


def add_page(app: Api, status: Callable[[], ControllerStatus]) -> Callable[[ControllerStatus], None]:
    """Adds `/`, its files, and `/overview`.

    Args:
        app: the server's; let it answer `OPEN_PATHS` without a token.
        status: called for each `/overview`, in the server's event loop: it must be quick.

    Returns:
        To be given the status after each change of a model, so that the plots miss no version.
    """
    history = History()
    folder = importlib.resources.files(__package__)
    for path, (name, media_type) in _FILES.items():
        app.answer("GET", path, _file((folder / name).read_bytes(), media_type))

    async def overview() -> Response:
        now = status()
        history.look(now)
        now = msgspec.structs.replace(now, instances=troubled_first(now.instances))
        answer = json_of(Overview(facts=facts(now), status=now, versions=history.points()))
        answer.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        return answer

    app.answer("GET", "/overview", overview)
    return history.look


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer
