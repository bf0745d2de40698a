"""What every actor of ours answers to whoever started it: where it is, the user's own methods, its end.

What weightsync's processes say to each other does not come through here: they speak HTTP. An answer is a pair of a
typed error, as data, and a value. No exception of ours is ever pickled.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from weightsync.cluster.ray_calls import here, is_restarted, kill, load_ray, running_ray, words_of
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    MissingDependencyError,
    UnsupportedError,
    WeightSyncError,
    as_weightsync_error,
    error_from_dict,
)
from weightsync.memory import reclaim_dead
from weightsync.memory.segment import unlink_own
from weightsync.types import Deadline, in_seconds

ASKS, URGENT = "asks", "urgent"
"""Concurrency groups: the user's methods, and what never waits for them."""
_NUM_URGENT = 8
_CLOSE_S, _UNLINK_S = 5.0, 4.0
_AGAIN_S = 2.0  # between two tries of Ray's to start an actor again
_FOR_GOOD = (ConfigError, MissingDependencyError, UnsupportedError)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Answer = tuple[dict[str, Any] | None, Any]


class Whereabouts(NamedTuple):
    """Where an actor runs.

    Attributes:
        node_id: the node, as Ray names it.
    """

    node_id: str
    node_ip: str
    pid: int


class Address(NamedTuple):
    """Where an actor's HTTP server listens."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"Address(url={self.url!r})"


class StartedActor:
    """Base of the actors' classes. Methods answer with an `Answer` and raise nothing.

    What fails in a constructor is kept and told, typed, to everybody who asks.

    Args:
        name: for messages.
        kind: of the error of a user's code that raised none of ours.
        facts: of such an error, e.g. its peer or rank.
    """

    num_asks: ClassVar[int] = 0
    """Threads that call the user's methods."""

    @classmethod
    def start(cls, *args: Any, bundle: tuple[Any, int] | None = None, **options: Any) -> Any:
        """Starts an actor of this class and returns Ray's handle at once. Its answer to `ready` says when it is built.

        Args:
            args: of the constructor. A factory among them is a function of a module that Ray's workers can import, or
                one of `__main__`.
            bundle: placement group and number of a bundle.
            options: Ray's own; num_cpus is 0 unless told otherwise. With max_restarts Ray starts the actor anew when it
                dies, and it takes part again under the same handle.
        """
        ray = running_ray()
        groups = {URGENT: _NUM_URGENT} | ({ASKS: cls.num_asks} if cls.num_asks else {})
        if bundle is not None:
            options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=bundle[0], placement_group_bundle_index=bundle[1]
            )
        return ray.remote(concurrency_groups=groups)(cls).options(**{"num_cpus": 0, **options}).remote(*args)

    def __init__(self, name: str, *, kind: type[WeightSyncError] = EngineError, **facts: Any) -> None:
        self._name = name
        self._kind = kind
        self._facts = facts
        self._failed: Answer | None = None
        self._address = Address("", "")
        self._built: dict[str, Any] = {}
        self._closing = contextlib.ExitStack()

    def ready(self) -> Answer:
        """Answers its `Whereabouts` once it is built."""
        return self._failed or answer([*here(), os.getpid()])

    def listen(self) -> Answer:
        """Answers the `Address` of its server."""
        return self._failed or answer(list(self._address))

    def ask(self, part: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        """Calls a method of what a user's factory built as `part`; answers what it returned."""

        def step() -> Any:
            if part not in self._built:
                known = ", ".join(map(repr, self._built)) or "nothing (closed)"
                raise InvalidRequestError(f"{self._name} has no {part!r} here, but {known}")
            return user_method(self._built[part], method)(*args, **options)

        return self._answer(f"{method} failed", step)

    def close(self) -> Answer:
        """Closes what was built, where it can be closed; gives back what dead processes of this host held in shared
        memory. Idempotent."""
        closing, self._closing, self._built = self._closing, contextlib.ExitStack(), {}
        with unlinked_in_time():
            for step in (closing.close, reclaim_dead):
                with contextlib.suppress(Exception):  # the process is about to end
                    step()
        return answer()

    def _answer(self, what: str, step: Callable[[], Any]) -> Answer:
        """What `step` returned; or its error, in which `what` stands before the words of one that is not ours."""
        if self._failed is not None:
            return self._failed
        try:
            return answer(step())
        except Exception as error:
            return self._typed(error, what).to_dict(), None

    @contextlib.contextmanager
    def _starting(self, what: str) -> Iterator[None]:
        """Surrounds a constructor's work. What fails is answered to whoever asks. Where Ray has started the actor
        again, and what fails may be over soon, the process ends: Ray tries again, as often as `max_restarts` says."""
        try:
            yield
        except Exception as error:
            failed = self._typed(error, what)
            self._failed = (failed.to_dict(), None)
            self.close()
            is_taken = getattr(failed.__cause__, "errno", None) in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            is_for_good = isinstance(failed, _FOR_GOOD) and not is_taken  # a port may be free again soon
            if not is_for_good and is_restarted():
                _logger.error("%s, which was started again, ends, for Ray to try again: %s", self._name, failed)
                time.sleep(_AGAIN_S)
                unlink_own()
                os._exit(1)

    def _typed(self, error: Exception, what: str) -> WeightSyncError:
        return as_weightsync_error(error, self._kind, what, **self._facts)

    def _keep(self, part: str, built: Any) -> None:
        """What a user's factory built: asked under this name, closed at the end."""
        self._built[part] = built
        for each in (getattr(built, "engine", None), built):
            self._closing.callback(_close, each)


class ActorHandle:
    """One of our actors, as whoever started it sees it. Thread-safe; may be sent to other actors, as a copy.

    Args:
        name: for messages.
    """

    def __init__(self, actor: Any, *, name: str) -> None:
        self.actor = actor
        self.name = name

    def ready(self, *, timeout_s: float) -> Whereabouts:
        """Waits until it is built.

        Raises:
            EngineUnreachableError: the actor died, e.g. as its factory can't be imported over there.
            DeadlineExceededError: it is not there in time: not scheduled, or still being built.
            WeightSyncError: what building it raised.
        """
        return self.urgent("ready", kind=Whereabouts, timeout_s=timeout_s)

    def urgent(self, method: str, *args: Any, kind: type[_T], timeout_s: float) -> _T:
        """Calls an urgent method of the actor, which answers a `kind`. See `ready` for errors; a method that has not
        answered in time goes on over there."""
        reply = self.get(self.submit(method, *args, group=URGENT), method, timeout_s=timeout_s)
        return value_of(reply, kind, peer=self.name, what=method)

    def address(self, *, timeout_s: float = 10.0) -> Address:
        """Where its server listens; see `ready` for errors."""
        return self.urgent("listen", kind=Address, timeout_s=timeout_s)

    def submit(self, method: str, *args: Any, group: str, **options: Any) -> Any:
        """Calls a method in a concurrency group of the actor; the reference of its answer, at once.

        Raises:
            UnsupportedError: the actor has no such method: it is an actor of another kind.
        """
        try:
            return getattr(self.actor, method).options(concurrency_group=group).remote(*args, **options)
        except (AttributeError, ValueError, TypeError) as error:
            raise UnsupportedError(
                f"{self.name} can't be asked for {method}: {words_of(error)}", peer=self.name
            ) from error

    def get(self, ref: Any, what: str, *, timeout_s: float) -> Any:
        """What a method returned; nothing about it is trusted. Here Ray's exceptions become ours.

        Raises:
            DeadlineExceededError: no answer in time; the call goes on over there.
            UnsupportedError: the actor has no such method, can't take this call, or returned what Ray can't carry.
            WeightSyncError: of `_lost`: the actor, its worker process or its node is gone, or was never started.
        """
        ray = load_ray()
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceededError(
                f"{self.name} did not answer {what} within {in_seconds(timeout_s)}", peer=self.name
            ) from error
        except ray.exceptions.RayTaskError as error:  # our actors answer with typed errors and raise nothing
            raise UnsupportedError(f"{self.name} can't answer {what}: {words_of(error)}", peer=self.name) from error
        except ray.exceptions.RaySystemError as error:  # of values: what was returned can't be unpickled here
            raise UnsupportedError(
                f"the answer of {self.name} to {what} can't be read: {words_of(error)}", peer=self.name
            ) from error
        except ray.exceptions.RayError as error:
            raise self._lost(f"during {what}: {words_of(error)}") from error

    def replace(self, actor: Any) -> None:
        """From here on calls go to another actor; those under way end as they may."""
        self.actor = actor  # one assignment: other threads see the old one or the new one

    def _ask(self, part: str, method: str, args: tuple[Any, ...], options: dict[str, Any], timeout_s: float) -> Any:
        reply = self.get(self.submit("ask", part, method, args, options, group=ASKS), method, timeout_s=timeout_s)
        return value_of(reply, None, peer=self.name, what=method)

    def _lost(self, words: str) -> WeightSyncError:
        return EngineUnreachableError(f"the actor of {self.name} is gone {words}", peer=self.name)


def answer(value: Any = None) -> Answer:
    return None, value


def value_of(reply: Any, kind: type[_T] | None, *, peer: str, what: str) -> _T:
    """The value of an answer.

    Args:
        reply: what the actor returned; nothing about it is trusted.
        kind: type of the value; None: the user's own, whatever it is.
        what: to what, for messages.

    Raises:
        EngineError: it is no answer of ours.
        WeightSyncError: the error that it tells, typed.
    """
    if not isinstance(reply, tuple) or len(reply) != 2 or not isinstance(reply[0], Mapping | None):
        raise EngineError(f"{peer} answered {what} with a {type(reply).__name__} that is no answer of ours", peer=peer)
    error, value = reply
    if error is not None:
        raise error_from_dict(error, peer=peer)
    if kind is None:
        return value  # type: ignore[no-any-return]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as wrong:
        raise EngineError(f"{peer} answered {what} with what is no answer of ours: {wrong}", peer=peer) from wrong


def user_method(built: Any, method: str) -> Callable[..., Any]:
    """A public method of what a user's factory built.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    found = None if method.startswith("_") else getattr(built, method, None)
    if not callable(found):
        raise InvalidRequestError(f"a {type(built).__name__} has no public method {method!r}")
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def unlinked_in_time() -> Iterator[None]:
    """Surrounds what a process does that `end` kills soon: a long load, say, may outlast that."""
    late = threading.Timer(_UNLINK_S, unlink_own)
    late.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread is left
        late.start()
    try:
        yield
    finally:
        late.cancel()


def end(handles: Sequence[ActorHandle], **how: Any) -> None:
    """Lets actors give back what outlives a process, all at once, then ends them. One that is gone is no error.

    Args:
        how: options of their `close`.
    """
    closing = []
    for handle in handles:
        with contextlib.suppress(WeightSyncError):
            closing.append((handle, handle.submit("close", group=URGENT, **how)))
    deadline = Deadline(_CLOSE_S)
    for handle, ref in closing:
        with contextlib.suppress(WeightSyncError):
            handle.get(ref, "close", timeout_s=deadline.remaining_s)
    for handle in handles:
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            kill(handle.actor)


def _close(built: Any) -> None:
    with contextlib.suppress(Exception):
        getattr(built, "close", lambda: None)()
