"""`weightsync trace`: one Perfetto file of a controller, its rollout services, their agents and trainers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from weightsync.cli.shared import MAX_S, Token, Verify, plain, told
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    StateError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from weightsync.clients.timeline import ClockOffset, TimelineClient
    from weightsync.types import PhaseRecord
    from weightsync.types.timeline import Timeline

_MOST_FACES = 1000
_TOO_MANY = "it was not asked: a trace has at most {} processes; name fewer URLs, or some of them with --no-follow"
_SILENT = (AuthError, ConfigError, DeadlineExceededError, EngineUnreachableError)
"""What does not say that something else answers there."""
_NO_TIMELINE = (
    "is an engine's URL, and engines keep no timeline: the trainer of a push writes its own, by "
    'write_chrome_trace(push.sync.recorder.records(), "push.json") of weightsync.observe; of a pull, give the URL of '
    "the rollout service beside the engine"
)


def trace(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="A controller, rollout services or agents, in any number.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("trace.json"),
    token: Token = None,
    verify: Verify = None,
    follow: Annotated[bool, typer.Option(help="Go on to a controller's services, and to a service's agents.")] = True,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="Seconds that each has to answer.")] = 10.0,
) -> None:
    """Writes what all of them did last, on one time axis, into one file for ui.perfetto.dev or chrome://tracing.

    A controller leads to its rollout services, a service to its agents, and an agent shows what its trainer did, too.
    Clocks are aligned: each one's distance is measured as NTP does, and stands in the file (`otherData.clocks`) with
    its error bound. Who can't be reached is named; the file has the others.

    The token goes to the URLs that you give, and on to those that they name where they ask for one themselves.

    An engine keeps no timeline. A push is recorded by its trainer, which writes it by write_chrome_trace
    (docs/observing.md).

    Exit codes: 0: everybody is in the file. 1: somebody is missing in it, or nobody answers, and there is none. 2: a
    wrong option, URL or token. A trainer that has ended, also in order, is missing: its agent and what that recorded
    are gone. The file has the others then.

    Example: weightsync trace http://127.0.0.1:8700 --out trace.json
    """
    with told():
        from weightsync.observe import write_chrome_trace

        asker = _Asker(token=token, verify=verify or True, timeout_s=timeout_s)
        found, missing = asker.all_of(urls, follow=follow)
        if not found:
            raise next(iter(missing.values()))
        records = [record for face in found for record in face.records]
        about = {
            "clocks": [face.about() for face in found],
            "unreachable": [{"url": url, "error": str(error)} for url, error in missing.items()],
        }
        try:
            write_chrome_trace(records, out, about=about)
        except OSError as broke:
            raise ConfigError(f"--out {out} can't be written: {broke.strerror}") from broke
        for face in found:
            print(plain(str(face)))
        for url, error in missing.items():
            print(plain(f"missing: {url}: {type(error).__name__}: {error}"))
        print(f"{out}: {len(records)} phases of {len(found)} processes; open it in ui.perfetto.dev")
        raise typer.Exit(1 if missing else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Face:
    """One that answered.

    Attributes:
        url: where.
        timeline: what it said.
        offset: of its clock from ours.
        asks_token: whether it answers nobody without a token.
    """

    url: str
    timeline: Timeline
    offset: ClockOffset
    asks_token: bool

    @property
    def title(self) -> str:
        """Its row in the trace; a slash would end the name of a process."""
        return f"{self.timeline.kind} {self.timeline.name} ({urlsplit(self.url).netloc})".replace("/", "|")

    @property
    def records(self) -> list[PhaseRecord]:
        """Its phases by our clock."""
        ahead_s = self.offset.ahead_s
        return [
            msgspec.structs.replace(
                record, track=f"{self.title}/{record.track}", start_s=record.start_s - ahead_s,
                end_s=record.end_s - ahead_s,
            )
            for record in self.timeline.phases
        ]  # fmt: skip

    def about(self) -> dict[str, object]:
        """What the file says of it."""
        return {
            "process": self.title, "url": self.url, "ahead_s": self.offset.ahead_s, "error_s": self.offset.error_s,
            "num_phases": len(self.timeline.phases), "num_dropped": self.timeline.num_dropped,
        }  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.title}: {len(self.timeline.phases)} phases, clock {1e3 * self.offset.ahead_s:+.1f} ms "
            f"(give or take {1e3 * self.offset.error_s:.1f} ms)"
        )


class _Asker:
    """Asks round after round: whom the last round has named."""

    def __init__(self, *, token: str | None, verify: bool | str, timeout_s: float) -> None:
        self._token = token
        self._verify = verify
        self._timeout_s = timeout_s

    def all_of(self, urls: Sequence[str], *, follow: bool) -> tuple[list[_Face], dict[str, WeightSyncError]]:
        """Those that answer, in the order they were found, and why the others don't.

        Raises:
            ConfigError: one of `urls` is none.
            AuthError: one of them refuses the token.
        """
        from weightsync.handles.fanout import in_thread

        given = list(dict.fromkeys(url.rstrip("/") for url in urls))
        tokens: dict[str, str | None] = dict.fromkeys(given, self._token)  # of all that are known
        found: list[_Face] = []
        missing: dict[str, WeightSyncError] = {}
        asked: Mapping[str, str | None] = tokens
        while asked:
            calls = {url: in_thread(lambda u=url, t=token: self._face(u, t), name="weightsync-trace")  # type: ignore[misc]
                     for url, token in asked.items()}  # fmt: skip
            named: dict[str, str | None] = {}
            for url, call in calls.items():
                error = call.exception()
                if error is None:
                    face = call.result()
                    found.append(face)
                    for peer in face.timeline.peers if follow else ():
                        named.setdefault(peer.rstrip("/"), self._token if face.asks_token else None)
                elif not isinstance(error, WeightSyncError) or (
                    url in given and isinstance(error, ConfigError | AuthError)
                ):
                    raise error
                else:
                    missing[url] = error
            new = [(url, token) for url, token in named.items() if url not in tokens]
            room = max(0, _MOST_FACES - len(tokens))
            asked = dict(new[:room])
            missing |= {url: StateError(_TOO_MANY.format(_MOST_FACES)) for url, _ in new[room:]}
            tokens = {**tokens, **asked}
        return found, missing

    def _face(self, url: str, token: str | None) -> _Face:
        if "+" in url.partition("://")[0]:
            raise ConfigError(f"{url} {_NO_TIMELINE}")
        with contextlib.closing(self._client(url, token)) as client:
            try:
                offset = client.offset(timeout_s=self._timeout_s)
            except _SILENT:
                raise
            except WeightSyncError:
                from weightsync.handles.by_url import runs_at

                if runs_at(url, token=token, verify=self._verify, timeout_s=self._timeout_s) is not None:
                    raise ConfigError(f"{url} {_NO_TIMELINE}") from None
                raise
            return _Face(
                url=url, timeline=client.timeline(timeout_s=self._timeout_s), offset=offset,
                asks_token=token is not None and self._refuses_strangers(url),
            )  # fmt: skip

    def _refuses_strangers(self, url: str) -> bool:
        """Whom anybody may talk to, anybody may have told whom to name: no token goes there."""
        with contextlib.closing(self._client(url, None)) as stranger:
            try:
                stranger.clock(timeout_s=self._timeout_s)
            except AuthError:
                return True
        return False

    def _client(self, url: str, token: str | None) -> TimelineClient:
        from weightsync.clients.timeline import TimelineClient

        return TimelineClient(url, token=token, verify=self._verify)
