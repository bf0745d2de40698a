"""TinkerMethod: the Tinker service saves what its trainer has for its samplers, and we change over to a client of that.

trained(v)  save_weights_for_sampler("...-v")        submitted at once: weights train on, and this save is in order
sync(v)     wait for its path ─► sampling client of that path ─► path and one token asked for ─► change over
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from weightsync.control.methods.hosted import HostedMethod, ServedWeights
from weightsync.errors import EngineError, StateError, UnsupportedError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.types import Deadline, Version

_SCHEME = "tinker://"
_TURN_S = 10.0
_PATIENCE = 10
"""So many times as long as a sync may take a save is waited for before another is submitted."""


class Pending(Protocol):
    """A future of the SDK's."""

    def result(self, timeout: float | None = None) -> Any: ...


class TinkerServiceHolder(Protocol):
    """Who holds the service's clients for one model. The first two calls are the SDK's own and return at once."""

    def save_weights_for_sampler(self, name: str) -> Pending:
        """A future of an object with `path`. When it returns the save has its place before any step submitted later."""

    def create_sampling_client(self, model_path: str) -> Pending:
        """A future of a client of these weights."""

    def served_path(self, client: Any, *, timeout_s: float) -> str:
        """Which path a client samples with, as the service says; fails where it does not answer."""

    def use(self, client: Any, served: ServedWeights) -> None:
        """From now on `client` is what everybody samples with. One assignment: it can't fail half-way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """A client and what it samples with: they belong together."""

    client: Any
    served: ServedWeights


class TinkerHolder:
    """A `TinkerServiceHolder` over the SDK's clients (tinker 0.38). Thread-safe.

    Whoever samples takes `sampler` anew for each request: its client stays usable while requests on it are under way.

    Args:
        training_client: a `tinker.TrainingClient`.
        service_client: a `tinker.ServiceClient`.
        rest_client: a `tinker.RestClient` of the same service: it says which path a sampler has.
        ttl_seconds: how long the service keeps what is saved, at least 3600; None: for ever.
        probe_tokens: a prompt, of which one token is sampled before a client is used; None: not at all.
    """

    def __init__(
        self,
        training_client: Any,
        service_client: Any,
        rest_client: Any,
        *,
        ttl_seconds: int | None = None,
        probe_tokens: Sequence[int] | None = (0,),
    ) -> None:
        self._training_client = training_client
        self._service_client = service_client
        self._rest_client = rest_client
        self._ttl_seconds = ttl_seconds
        self._probe_tokens = None if probe_tokens is None else list(probe_tokens)
        self._sampler: Sampler | None = None

    @property
    def sampler(self) -> Sampler | None:
        """What to sample with now; None before the first sync."""
        return self._sampler

    def save_weights_for_sampler(self, name: str) -> Pending:
        pending: Pending = self._training_client.save_weights_for_sampler(name, ttl_seconds=self._ttl_seconds)
        # The SDK gives a save its place among the trainer's steps in its own loop, after this call has returned: a step
        # that is submitted meanwhile would come before it (seen with 0.38). What its loop does next comes after that.
        loop = self._training_client.holder.get_loop()
        asyncio.run_coroutine_threadsafe(_nothing(), loop).result(_TURN_S)
        return pending

    def create_sampling_client(self, model_path: str) -> Pending:
        pending: Pending = self._service_client.create_sampling_client(model_path=model_path)
        return pending

    def served_path(self, client: Any, *, timeout_s: float) -> str:
        """See `TinkerServiceHolder`. Samples one token too: a path that is known may still not answer.

        Raises:
            UnsupportedError: this release of the SDK does not say which sampler a client has.
            EngineError: the sampler answered with no token.
        """
        deadline = Deadline(timeout_s)
        try:
            handle = json.loads(base64.urlsafe_b64decode(client.get_sampler_handle()))
            sampler_id = handle["sampling_session_id"]
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise UnsupportedError(
                f"this release of the tinker SDK does not say which sampler a client has: {error!r}; 0.38 does"
            ) from error
        path = self._rest_client.get_sampler(sampler_id).result(timeout=deadline.check("answer about a sampler"))
        if self._probe_tokens is not None:
            kinds = importlib.import_module("tinker.types")
            answer = client.sample(
                prompt=kinds.ModelInput.from_ints(self._probe_tokens),
                num_samples=1,
                sampling_params=kinds.SamplingParams(max_tokens=1),
            ).result(timeout=deadline.check("token of a sampler"))
            if len(answer.sequences) != 1 or len(answer.sequences[0].tokens) != 1:
                raise EngineError("a sampler that was asked for one token gave none")
        return str(path.model_path)

    def use(self, client: Any, served: ServedWeights) -> None:
        self._sampler = Sampler(client=client, served=served)


@dataclasses.dataclass(kw_only=True)
class _Save:
    version: Version
    path: Future[Any] | None = None  # None: it was not submitted, or has failed
    failure: Exception | None = None  # why


class TinkerMethod(HostedMethod[TinkerServiceHolder]):
    """Saves each version as it is trained, changes over to it when asked; see `HostedMethod` for arguments and errors.

    A save has the weights that the trainer has when it is submitted, whatever it is called: so it is submitted in
    `trained`, before the trainer's next step is. One that failed can't be made again, since the trainer has gone on:
    syncs fail until a newer version is trained, which is then served. Where the trainer waits it is made again.

    Args:
        trainer_waits: the trainer submits nothing between telling of a version and the end of its sync, as with
            `sync_mode: sync`. Then a sync submits the save that is missing or has failed.
    """

    service = "tinker"
    calls = ("save_weights_for_sampler", "create_sampling_client", "served_path", "use")

    def __init__(
        self,
        holders: TinkerServiceHolder | Mapping[str, TinkerServiceHolder],
        *,
        timeout_s: float = 600.0,
        trainer_waits: bool = False,
    ) -> None:
        super().__init__(holders, timeout_s=timeout_s)
        self._trainer_waits = trainer_waits
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}  # the newest of each model
        self._past_runs: set[tuple[str, str]] = set()

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        """See `SyncMethod.trained`. Submits the save; what goes wrong with it is said by the sync."""
        holder = self._holders.get(model_tag)
        if holder is not None:
            with self._lock:
                self._note(holder, model_tag, version)

    def _update(
        self, holder: TinkerServiceHolder, model_tag: str, version: Version, deadline: Deadline
    ) -> ServedWeights:
        with self._lock:
            save = self._note(holder, model_tag, version, at_sync=True)
            if save.version.run_id != version.run_id:
                raise VersionError(f"what is trained now is {save.version}", version=str(version))
            if save.path is None:
                if not self._trainer_waits:
                    raise save.failure or StateError(
                        "it was not saved when it was trained, and the trainer may have gone on since: tell `trained`"
                    )
                save.path = self._submit(holder, save.version)
            saved = save.path
        try:
            path = self._until(deadline, "saved weights", saved)
            if not (isinstance(path, str) and path.startswith(_SCHEME) and path.endswith(f"/{_name(save.version)}")):
                raise EngineError(f"weights saved as {_name(save.version)!r} are said to be at {path!r:.200}")
        except Exception as error:
            with self._lock:
                if saved.done() and save.path is saved:  # one that is under way is waited for at the next try
                    save.path, save.failure = None, error
            raise
        client = self._within(
            deadline, "sampling client", lambda: holder.create_sampling_client(path).result(deadline.remaining_s)
        )
        left = deadline.check("answer of the new sampler", peer=self.service)
        found = self._within(deadline, "answer of the new sampler", lambda: holder.served_path(client, timeout_s=left))
        if found != path:
            raise VersionError(f"the new sampler has {found!r:.200} and not {path}", peer=self.service)
        served = ServedWeights(run_id=save.version.run_id, version=save.version.number, path=path)
        holder.use(client, served)
        return served

    def _note(self, holder: TinkerServiceHolder, model_tag: str, version: Version, *, at_sync: bool = False) -> _Save:
        """The newest save, which is this version's where that is newer."""
        save = self._saves.get(model_tag)
        if save is not None:
            if save.version.run_id == version.run_id and not version.is_newer_than(save.version):
                if not at_sync and save.version == version and save.path is None and save.failure is None:
                    self._try(holder, save)  # a sync of it came first
                return save
            if (model_tag, version.run_id) in self._past_runs:
                return save
            if save.version.run_id != version.run_id:
                self._past_runs.add((model_tag, save.version.run_id))
        save = self._saves[model_tag] = _Save(version=version)
        if not at_sync:
            self._try(holder, save)
        return save

    def _try(self, holder: TinkerServiceHolder, save: _Save) -> None:
        try:
            save.path = self._submit(holder, save.version)
        except Exception as error:  # the sync says so
            save.failure = error

    def _submit(self, holder: TinkerServiceHolder, version: Version) -> Future[Any]:
        """Submits a save here and now, in the order of the trainer's steps; its path comes later."""
        pending = holder.save_weights_for_sampler(_name(version))
        given_up_s = _PATIENCE * self._timeout_s
        return in_thread(lambda: pending.result(given_up_s).path, name="weightsync-tinker-save")


async def _nothing() -> None:
    """Has had its turn in an event loop."""


def _name(version: Version) -> str:
    """What a version is saved as. Runs of one spelling in the service's letters stay apart."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", version.run_id)[:80]
    if plain != version.run_id:
        plain += f"-{hashlib.sha256(version.run_id.encode()).hexdigest()[:8]}"
    return f"{plain}-v{version.number}"
