"""Notifier: tells rollout services, or controllers, of each version, and waits for nobody until it is asked to.

The services find versions without this, too, where they know an agent (`sources`): a notification only wakes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from weightsync.handles.fanout import in_thread
from weightsync.trainer.told import FIRST_CALL_S, Told
from weightsync.trainer.told_peers import includes
from weightsync.types import Deadline, Version

_AWAY_S = 1.0  # of a wait for one that did not serve the version before


class Notifier:
    """Tells all of them. Training rank 0 alone has one. Thread-safe.

    Args:
        urls: of rollout services, or of controllers; each is asked which it is.
        token, verify: see `JsonClient`.

    Raises:
        ConfigError: a URL is none.
    """

    def __init__(self, urls: Sequence[str], *, model_id: str, token: str | None, verify: bool | str) -> None:
        self._hosts = [Told(url, model_id=model_id, token=token, verify=verify) for url in urls]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(host.url for host in self._hosts)

    def meet(self) -> None:
        """Asks each once who it is, for some seconds at most; who does not answer is logged.

        Raises:
            AuthError: one refuses the token.
            ConfigError: one has no such model, or is neither a rollout service nor a controller.
        """
        asked = [in_thread(host.meet, name="weightsync-meet") for host in self._hosts]
        wait_for(asked, timeout=FIRST_CALL_S + 1.0)
        for each in asked:
            error = each.exception() if each.done() else None
            if error is not None:
                raise error

    def start(self, endpoints: Sequence[str]) -> None:
        """From here on they are told of versions.

        Args:
            endpoints: of the trainer's agents, the first rank's host's first.
        """
        for host in self._hosts:
            host.start(endpoints)

    def announce(self, version: Version) -> None:
        """There is a new version. Returns at once."""
        for host in self._hosts:
            host.announce(version)

    def why_not(self) -> dict[str, str]:
        """Why who was told does not serve it, or can't be told, as each was found last, by URL. It does not wait."""
        return {host.url: why for host in self._hosts if (why := host.why_not) is not None}

    def serving(self, version: Version) -> frozenset[str]:
        """URLs of those who served that version, or a newer one of its run, when they were asked last."""
        return frozenset(host.url for host in self._hosts if includes(host.served, version))

    def begin_wait(
        self, version: Version, timeout_s: float, *, away: Collection[str] = ()
    ) -> Callable[[float], Mapping[str, str] | None]:
        """Begins to wait until those who are alive serve that version, or a newer one of its run.

        Args:
            version: which.
            timeout_s: for each of them.
            away: URLs of those who get a second.

        Returns:
            What waits for the outcome, for at most the seconds that it is given: why each of the others does not serve
            it, by URL; None where that is not known yet. It is known after `timeout_s`, and some seconds.
        """
        waits: dict[str, Future[str | None]] = {}
        for host in self._hosts:
            seconds = min(_AWAY_S, timeout_s) if host.url in away else timeout_s
            wait = functools.partial(host.wait_served, version, Deadline(seconds))
            waits[host.url] = in_thread(wait, name="weightsync-wait")

        def outcome(seconds: float) -> Mapping[str, str] | None:
            if wait_for(waits.values(), timeout=seconds).not_done:
                return None
            return {url: why for url, wait in waits.items() if (why := _outcome(wait)) is not None}

        return outcome

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        for host in self._hosts:
            host.close()


def _outcome(wait: Future[str | None]) -> str | None:
    error = wait.exception()
    return wait.result() if error is None else str(error) or type(error).__name__
