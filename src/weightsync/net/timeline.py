"""`/timeline`: the route by which every face of ours tells its last phases, and what time it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from weightsync.net.server import Api, json_of
from weightsync.types.timeline import MAX_RECORDS, Timeline

if TYPE_CHECKING:
    from weightsync.observe import Recorder


def add_timeline(app: Api, recorded: Recorder, head: Callable[[], Timeline]) -> None:
    """Adds `/timeline`, and `/timeline/clock`, which tells the time alone: a small answer to measure a clock with.

    Args:
        app: a server's; what stands before it asks for the token.
        recorded: whose phases these are.
        head: the answer without its phases, by the clock of this moment. Called in the server's event loop, or in a
            thread: it must be quick, and `phases` that it has come on top.
    """

    async def clock() -> Response:
        return json_of(msgspec.structs.replace(head(), phases=()))

    def timeline() -> Response:  # in a thread: thousands of records take a while to write
        now, records = head(), recorded.records()
        kept = (*now.phases, *records[-MAX_RECORDS:])
        left_out = max(0, len(records) - MAX_RECORDS)
        return json_of(msgspec.structs.replace(now, phases=kept, num_dropped=recorded.num_dropped + left_out))

    app.answer("GET", "/timeline/clock", clock)
    app.answer("GET", "/timeline", timeline)
