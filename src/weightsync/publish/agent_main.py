"""The agent's process: `python -m weightsync.publish.agent_main`, started by `AgentProcess`.

It talks in JSON lines: over its standard input come orders, over its standard output go events. It ends when its
standard input does, or its parent: then the trainer is gone.

    {"order": "layout", "digest": ..., "layout": ...}   {"order": "publish", "version": 7, "head": ..., "source": 0}
    {"order": "reset"}   {"order": "ping"}   {"order": "end"}

A layout comes before the first publication of it, and stands for all that follow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import resource
import sys
import threading
from typing import Any, Literal

import msgspec

from weightsync.errors import InvalidRequestError, WeightSyncError
from weightsync.memory import reclaim_dead
from weightsync.memory.segment import unlink_own
from weightsync.net.messages import decode
from weightsync.publish.agent import TransferAgent
from weightsync.publish.agent_config import AgentConfig
from weightsync.types.layout import PublicationHead, PublicationLayout

_LAST_RECLAIMS = 20
_LOOK_EVERY_S = 0.5
_MAX_EVENTS = 1000


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the standard input."""

    order: Literal["layout", "publish", "reset", "ping", "end"]
    version: int = -1
    digest: str = ""
    layout: msgspec.Raw = msgspec.Raw(b"")
    head: msgspec.Raw = msgspec.Raw(b"")
    source: int = 0


def main() -> None:
    """A config on the first line, orders on the next ones, the end where they end."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not stand between the events
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells each request
    events: queue.Queue[dict[str, Any]] = queue.Queue(_MAX_EVENTS)

    def tell(event: dict[str, Any]) -> None:
        with contextlib.suppress(queue.Full):  # a trainer that stands still must not hold up receivers
            events.put_nowait(event)

    def write_events() -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                out.write(json.dumps(events.get()) + "\n")
                out.flush()

    threading.Thread(target=write_events, name="weightsync-events", daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="weightsync-parent", daemon=True).start()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each connection is a descriptor, and each segment that is read
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = sys.stdin.buffer
    try:
        agent = TransferAgent(msgspec.json.decode(lines.readline(), type=AgentConfig), tell)
        tell(agent.start())
    except WeightSyncError as error:
        out.write(json.dumps({"event": "failed", "error": error.to_dict()}) + "\n")
        out.flush()
        os._exit(1)
    orderly = False
    layout: PublicationLayout | None = None
    why = InvalidRequestError("no layout was told before it")
    decoder = msgspec.json.Decoder(_Order)
    for line in lines:
        order = decoder.decode(line)
        orderly = order.order == "end"
        if order.order == "ping":
            tell({"event": "pong"})
        elif order.order == "reset":
            tell({"event": "reset", "num_transfers": agent.reset()})
        elif order.order == "layout":
            layout = None
            try:
                layout = PublicationLayout.read(memoryview(order.layout), order.digest)
            except InvalidRequestError as error:
                why = error
        elif order.order == "publish":
            try:
                if layout is None:
                    raise why
                publication = layout.publication(decode(bytes(order.head), PublicationHead, what="a version"))
            except InvalidRequestError as error:  # the next one may be better
                logging.getLogger(__name__).error("version %d can't be served: %s", order.version, error)
                tell({"event": "not_published", "version": order.version, "error": error.to_dict()})
            else:
                agent.publish(publication, order.source)
    agent.close()
    _end(orderly=orderly)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, though a child that it forked keeps our input open."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_LOOK_EVERY_S)
    _end(orderly=False)


def _end(*, orderly: bool) -> None:
    for _ in range(0 if orderly else _LAST_RECLAIMS):  # the trainer's lock comes free, and its segments go
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
        threading.Event().wait(0.05)
    unlink_own()  # deltas
    os._exit(0)


if __name__ == "__main__":
    main()
