"""What answers at a URL, and what it says of itself: a controller, a rollout service, an agent or an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from weightsync.cli.status_tables import tables_of
from weightsync.cli.tables import table
from weightsync.clients.host import RolloutClient
from weightsync.control.web.headline import Fact, Level, facts, seconds_text, worst_first
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.by_url import engine_at, or_another_part, read_engine_url
from weightsync.handles.two_kinds import SGLangServerEngine, TwoKinds
from weightsync.net.client import JsonClient
from weightsync.net.messages import decode
from weightsync.observe import now_s
from weightsync.types import Deadline, DescribeRequest, EngineHandle, EngineOp, EngineReply
from weightsync.types.control import ControllerStatus
from weightsync.types.service import ModelStatus, ServiceStatus
from weightsync.types.transfer_messages import AgentVersion, EndedTransfers, Receivers

if TYPE_CHECKING:
    from rich.table import Table

_MOST_TRANSFERS = 10
_PAUSE_S = 2.0  # between two looks at an engine that is paused
_RUNS = "a weightsync controller, rollout service, agent or engine"
_NO_SIGN = (EngineUnreachableError, DeadlineExceededError, AuthError)
"""What does not say that something else answers there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One look.

    Attributes:
        facts: sentences, the worst first.
        tables: what there is besides.
        raw: all of it, as it was told.
    """

    facts: Sequence[Fact]
    tables: Sequence[Table]
    raw: Any


class Face:
    """Whatever answers at a URL; it is asked what it is at the first look that it answers.

    Args:
        url: of a controller, a service, an agent or an engine; an engine's may say what it is, vllm+http://...
        token, verify: see `JsonClient`.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, *, token: str | None, verify: bool | str) -> None:
        self._url, self._token, self._verify = url, token, verify
        self._client: JsonClient | None = None
        self._engine: EngineHandle | None = None
        self._known: Callable[[float], Seen] | None = None
        self._odd: str | None = None  # what a part of ours has said that is none of the answers looked for
        if "+" in url.partition("://")[0]:
            read_engine_url(url)
        else:
            self._client = JsonClient(url, runs=_RUNS, token=token, verify=verify)

    def look(self, timeout_s: float) -> Seen:
        """Asks it.

        Raises:
            EngineUnreachableError, DeadlineExceededError: nobody answers.
            AuthError: it refuses the token.
            EngineError: what answers is none of ours, and no engine.
        """
        if self._known is not None:
            return self._known(timeout_s)
        self._odd = None
        for way in (self._ask_status, self._ask_agent) if self._client is not None else ():
            try:
                seen = way(timeout_s)
            except _NO_SIGN:
                raise
            except WeightSyncError as error:
                said = self._said_by_ours(error)  # a failure is worth more than that there is no such path
                self._odd = (self._odd or said) if isinstance(error, UnsupportedError) else (said or self._odd)
                continue
            self._known = way
            return seen
        return self._ask_engine(timeout_s)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if self._client is not None:
            self._client.close()
        if self._engine is not None:
            self._engine.close()  # type: ignore[attr-defined]

    def _body(self, path: str, timeout_s: float) -> bytes:
        assert self._client is not None
        return self._client.answer("GET", path, deadline=Deadline(timeout_s)).body

    def _said_by_ours(self, error: WeightSyncError) -> str | None:
        """An error's words, where they are those of a part of weightsync that answers there; None where they may be
        anybody's."""
        if isinstance(error, UnsupportedError):
            if "this is a weightsync" not in error.message:
                return None
            parts = urlsplit(self._url)
            less = f": leave its path out, {parts.scheme}://{parts.netloc}" if parts.path else ""
            return f"{error.message}{less}"
        anybodys = isinstance(error, InvalidRequestError) or error.details.keys() & {"status", "remote_error"}
        return None if anybodys else error.message

    @contextlib.contextmanager
    def _known_as(self, whose: str, *, known: bool = True) -> Iterator[None]:
        """Around what is asked of a part of ours: what does not fit there is of another release, and no stranger's."""
        try:
            yield
        except (InvalidRequestError, UnsupportedError) as error:
            if known:
                self._odd = f"{error.message}: ask by the {whose}'s own release"
            raise

    def _ask_status(self, timeout_s: float) -> Seen:
        """A controller and a service both have `/status`."""
        body = self._body("/status", timeout_s)
        status = decode(body, dict[str, Any], what="its status")
        if "sync_mode" in status:
            with self._known_as("controller"):
                now = decode(body, ControllerStatus, what="the status of a controller")
            return Seen(facts=facts(now), tables=tuple(tables_of(now)), raw=now)
        with self._known_as("service", known=isinstance(status.get("models"), dict)):
            service = decode(body, ServiceStatus, what="the status of a service")
        found = [fact for name, model in service.models.items() for fact in _of_model(name, model)]
        found += _of_lease(service)
        rows = (
            (
                name, f"{model.run_id}/{model.version}" if model.version is not None else "none", model.sender,
                model.state, "; ".join(f"{who} {version or 'none'}" for who, version in model.engines.items()),
                str(model) if model.version is not None else None,
            )
            for name, model in service.models.items()
        )  # fmt: skip
        heads = ("model", "served", "pulls from", "state", "engines", "last version")
        return Seen(facts=worst_first(found), tables=(table("Models", heads, rows),), raw=service)

    def _ask_agent(self, timeout_s: float) -> Seen:
        body = self._body("/get_version", timeout_s)
        with self._known_as("agent", known="model_id" in decode(body, dict[str, Any], what="its version")):
            now = decode(body, AgentVersion, what="the version of an agent")
            ended = decode(self._body("/get_transfers", timeout_s), EndedTransfers, what="the transfers of an agent")
            book = decode(self._body("/receivers", timeout_s), Receivers, what="the receivers of an agent")
            can = decode(self._body("/get_capabilities", timeout_s), dict[str, Any], what="what an agent can")
        deltas = ", ".join(f"{delta['base']} -> {delta['version']}" for delta in can.get("deltas", ()))
        why_none = can.get("why_no_delta") or "no receiver has asked for one"
        kept = (("digest", now.model_digest), ("publisher", now.incarnation), ("deltas", deltas or f"none: {why_none}"))
        rows = (
            (each.receiver_id, f"{each.run_id}/{each.version}", "all of it" if each.ok else "ended early")
            for each in reversed(ended.ended[-_MOST_TRANSFERS:])
        )
        tables = [table(f"Publication of {now.model_id}", ("what", "is"), kept)]
        if book.receivers:
            who = [
                (
                    each.receiver_id, each.version or "nothing yet",
                    f"{each.received_bytes / 1e6:.1f} MB",
                    "" if each.bytes_per_s is None else f"{each.bytes_per_s / 1e6:.1f} MB/s",
                    str(each.num_failed or ""),
                    f"{seconds_text(max(0.0, now_s() - each.since_s))} ago",
                )
                for each in book.receivers[:_MOST_TRANSFERS]
            ]  # fmt: skip
            heads = ("receiver", "has", "sent", "rate", "ended early", "registered")
            tables.append(table(f"Receivers, {book.num_registered} in all", heads, who))
        if ended.ended:
            tables.append(table("Last transfers", ("receiver", "version", "got"), rows))
        return Seen(
            facts=tuple(_of_agent(now, ended)),
            tables=tables,
            raw={"version": now, "can": can, "receivers": book, "ended": ended},
        )

    def _ask_engine(self, timeout_s: float) -> Seen:
        deadline = Deadline(timeout_s)
        if self._engine is None:
            try:
                self._engine = engine_at(self._url, token=self._token, verify=self._verify, timeout_s=timeout_s)
            except ConfigError as error:  # of what answers there: the URL is one
                if self._odd is not None:
                    raise EngineError(self._odd, peer=self._url) from None
                what = error.message.replace(or_another_part(error.peer or ""), "")
                raise EngineError(f"{what}; nor does {_RUNS} run there", peer=error.peer) from None
        reply = described(self._engine, DescribeRequest(), deadline)
        return Seen(facts=tuple(engine_facts(self._engine, reply)), tables=(), raw=reply)


def whom_to_ask(url: str, *, token: str | None, verify: bool | str, timeout_s: float) -> str | None:
    """Of a rollout service where an engine was meant: how to learn of its engines. None: no service answers there."""
    if "+" in url.partition("://")[0]:
        return None
    try:
        with contextlib.closing(RolloutClient(url, token=token, verify=verify)) as client:
            models = client.call("GET", "/status", ServiceStatus, timeout_s=timeout_s).models
    except WeightSyncError:
        return None
    engines = sorted({who for model in models.values() for who in model.engines})
    with_url = [who for who in engines if "://" in who]
    inside = [who for who in engines if "://" not in who]
    ways = [f"give the URLs of its engines, {', '.join(with_url)}"] if with_url else []
    if inside:
        ways.append(
            f"{', '.join(inside)} can't be asked from outside, like every module of its own process: what each serves, "
            f"and whether it is proved, is in weightsync status {url}"
        )
    return "; ".join(ways) or None


def refuse_a_service(url: str, *, token: str | None, verify: bool | str, timeout_s: float) -> None:
    """Raises ConfigError where a rollout service answers there: it has engines, and is none."""
    if (instead := whom_to_ask(url, token=token, verify=verify, timeout_s=timeout_s)) is not None:
        raise ConfigError(f"{url} is a rollout service, and no engine: {instead}")


def described(handle: EngineHandle, request: DescribeRequest, deadline: Deadline) -> EngineReply:
    """What an engine says of itself. One that is paused while no session is open is asked again a moment later: each
    sync leaves it so between its commit and its resume."""

    def ask() -> EngineReply:
        return handle.call(EngineOp.DESCRIBE, request, timeout_s=deadline.check("answer", peer=handle.engine_id))

    reply = ask()
    if not reply.left_paused:
        return reply
    time.sleep(min(_PAUSE_S, deadline.remaining_s / 2))
    later = ask()
    return msgspec.structs.replace(later, left_paused=later.left_paused and later.version == reply.version)


def engine_facts(handle: EngineHandle, reply: EngineReply) -> Iterator[Fact]:
    """What an engine says of itself, the worst first."""
    if reply.unhealthy or not reply.intact:
        why = reply.unhealthy or "its weights are half-loaded"
        yield Fact(level="wrong", text=f"{why}: the next version that is loaded in full heals it")
    if reply.left_paused:
        paused, route = "It is paused", "/resume"
        if isinstance(handle, SGLangServerEngine):
            paused, route = "It is paused (or starts, or is unhealthy)", "/continue_generation"
        yield Fact(
            level="wrong",
            text=f"{paused}, no version is being loaded, and nothing ends that: its trainer ended before it resumed "
            f"it, or somebody paused it by hand. The next push resumes it, or curl -X POST {handle.engine_id}{route} "
            "where it does not sleep",
        )
    kind = type(handle).__name__.removesuffix("Engine").replace("Http", "engine server")
    takes = "whole tensors and patches" if "patch" in reply.accepts else "whole tensors"
    if "lora" in reply.artifacts:  # a server is not asked for its options, and its handle says both of any
        started = " where it was started with LoRA" if isinstance(handle, TwoKinds) else ""
        takes += f", and adapters{started}" if "model" in reply.artifacts else " of adapters"
    serves = f"serves {reply.version or 'no version yet'}" + ("" if reply.serving else ", paused or refusing")
    workers = f"{reply.world_size} worker{'s' * (reply.world_size != 1)}"
    yield Fact(level="ok" if reply.serving else "busy", text=f"{kind}, {workers}, takes {takes}, {serves}")


def _of_model(name: str, model: ModelStatus) -> Iterator[Fact]:
    last, nobody = f"{model.run_id}/{model.version}", model.engines and not any(model.engines.values())
    serves = f"{name} serves {last}" if not nobody else f"{name} serves nothing now; its last was {last}"
    serves = f"{name}: no version yet" if model.version is None else serves
    for who, why in {**model.sender_errors, **model.errors}.items():
        yield Fact(level="wrong", text=f"{serves}; {who} failed", detail=why)
    others = [who for who, version in model.engines.items() if version != last]
    if others and model.version is not None and model.state == "idle":
        yield Fact(level="wrong", text=f"{name} is not served by {', '.join(others)} now")
    for who in model.ended:
        yield Fact(level="ok", text=f"{name}: the trainer at {who} has ended")
    if model.state in ("pulling", "loading"):
        so_far = f"{seconds_text(max(0.0, now_s() - model.since_s))} so far" if model.since_s is not None else ""
        moved = str(model.progress) if model.progress is not None and model.progress.is_long else ""
        wanted = f" version {model.wanted}" if model.wanted is not None else ""
        yield Fact(level="busy", text=f"{name}: {model.state}{wanted}", detail="; ".join(filter(None, (so_far, moved))))
    gone = model.version is not None and nobody
    yield Fact(
        level="busy" if gone else "ok",
        text=serves,
        detail=str(model) if model.pull_s is not None and model.version is not None else "",
    )


def _of_lease(service: ServiceStatus) -> Iterator[Fact]:
    lease = service.lease
    if lease is not None and lease.why_none is not None:
        is_new = all(model.version is None for model in service.models.values())
        level: Level = "wrong" if lease.failed or not is_new else "busy"
        yield Fact(level=level, text="Its engines answer nobody", detail=lease.why_none)
    elif lease is not None:
        yield Fact(level="ok", text=f"Its engines may answer for {seconds_text(lease.left_s)} without another word")


def _of_agent(now: AgentVersion, ended: EndedTransfers) -> Iterator[Fact]:
    if now.coming is not None:
        yield Fact(level="busy", text=f"Proving {now.model_id} {now.coming_run_id}/{now.coming}")
    if now.version is None:
        yield Fact(level="ok", text=f"Nothing of {now.model_id} is published yet")
    else:
        served = f"{ended.newest} transfers since the agent started"
        yield Fact(level="ok", text=f"Publishes {now.model_id} {now.run_id}/{now.version}", detail=served)
