"""DiskMethod: engines load a version from a folder, all at once; behind an SGLang router, all of its workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weightsync.control.method import Peers, SyncMethod
from weightsync.control.methods.disk_engines import (
    DiskEngine,
    DiskSettings,
    KvCache,
    Running,
    SGLangDisk,
    VllmDisk,
    VllmReloadApi,
)
from weightsync.control.methods.folder import VersionFolder
from weightsync.errors import (
    ConfigError,
    DigestMismatchError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import call_all
from weightsync.handles.probe import Capabilities, Feature, probe, served_models
from weightsync.handles.sglang_api import SGLangApi, SGLangRouter
from weightsync.types import Deadline, Version
from weightsync.types.control import UNNAMED
from weightsync.types.deadline import MAX_WAIT_S, check_wait_s
from weightsync.update.session import unequal

_T = TypeVar("_T")
_PROBE_S = 10.0
_SUMS_S = 60.0
_RESUME_S = 10.0
_GRACE_S = 6.0  # how much longer than its deadline a call may take to say so, and to undo its pause


class DiskMethod(SyncMethod):
    """A `SyncMethod` over a folder of versions. Thread-safe.

    What each URL is it says itself (`clients.probe`): an SGLang router, whose workers are asked for at each sync; an
    SGLang server; a vLLM server in development mode. A sync succeeds where every engine has loaded the version and
    says so; where there are several of one kind, their checksums of live weights have to be the same. Engines that
    fail are named in the error, with the state that each was left in; the others go on with the new version. One that
    was evicted is not asked to load any more; a router that it belongs to has to be told by whoever runs it; where
    that one names it no more at some sync, and again at a later one, it takes part again. Where everybody was evicted,
    whoever answers takes part again with the next version.

    Args:
        folder: where trainers publish.
        urls: by model: of its router, of its server, or of several servers.
        backend, served_model: what the URLs have to be, and to serve, where that is said: "vllm" or "sglang", and the
            model's name in the server's own list.
        running, kv_cache, load_format: see `DiskSettings`.
        engine_root: the folder's root as engines see it, where that is another path.
        token: bearer token for each of `urls`, and for the workers of a router.
        verify: see `JsonClient`.
        timeout_s: how long an engine may take to load. Comparing and resuming have a minute and 10 s more.
        compare_checksums: whether checksums are compared. All engines stay paused until the slowest has loaded then;
            else each goes on by itself.

    Raises:
        NoEnginesError: a model has no URL.
        ConfigError: a setting that can't be.
    """

    peers: Peers

    def __init__(
        self,
        folder: VersionFolder,
        urls: Mapping[str, str | Sequence[str]],
        *,
        backend: str | None = None,
        served_model: str | None = None,
        running: Running = "keep",
        kv_cache: KvCache = "clear",
        load_format: str | None = None,
        engine_root: str | None = None,
        token: str | None = None,
        verify: bool | str = True,
        timeout_s: float = 300.0,
        compare_checksums: bool = True,
    ) -> None:
        self._folder = folder
        self._urls = {tag: (each,) if isinstance(each, str) else tuple(each) for tag, each in urls.items()}
        if not self._urls or not all(self._urls.values()):
            raise NoEnginesError("method disk needs the URL of at least one engine or router for each model")
        self._settings = DiskSettings(running=running, kv_cache=kv_cache, load_format=load_format)
        self._backend = backend
        self._served_model = served_model
        self._engine_root = Path(engine_root) if engine_root is not None else folder.root
        self._token = token
        self._verify = verify
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        self._compare = compare_checksums
        steps_s = self._timeout_s + _RESUME_S + (min(self._timeout_s, _SUMS_S) if compare_checksums else 0.0)
        met_s = _PROBE_S * (1 + 2 * max(map(len, self._urls.values())))
        self.end_within_s = min(MAX_WAIT_S, met_s + steps_s + 4 * _GRACE_S)
        self._lock = threading.Lock()
        self._known: dict[str, Capabilities] = {}
        self._engines: dict[str, DiskEngine[Any]] = {}
        self._named: dict[str, frozenset[str]] = {}  # by model: its engines, as they were listed last
        self._asked: dict[str, Version] = {}  # by model: what was asked for last
        self._evicted: dict[tuple[str, str], Version | None] = {}  # by model and URL: what was asked for last
        self.peers = Peers()

    def initialize(self) -> None:
        """Meets every router and server once.

        Raises:
            ConfigError: one of them lacks what this method needs; says why.
            NoEnginesError: a router has no workers.
            WeightSyncError: one does not answer.
        """
        for tag in self._urls:
            for url in self._members(tag, Deadline(_PROBE_S * len(self._urls[tag]))):
                self._engine(url)

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`. Loads this version where it is there still, else the latest one of its run;
        of the run without a name always the latest, which counts as the number that was asked for.

        Raises:
            InvalidRequestError: there is no such model.
            VersionError: neither is published.
            NoEnginesError: nobody is left to load it.
            SyncFailedError: some failed, or lack what this needs; `causes` says why and what state was left, by URL.
                Where one can't be met, or lacks something, nothing was changed anywhere.
        """
        deadline = Deadline(_PROBE_S * len(self._urls.get(model_tag, ())))
        members = self._members(model_tag, deadline, version)
        self._asked[model_tag] = asked = version
        version = self._resolved(model_tag, asked)
        with self._folder.held(model_tag, version) as folder:
            path = self._engine_root / folder.relative_to(self._folder.root)
            errors: dict[str, WeightSyncError] = {}
            engines = _each({url: functools.partial(self._engine, url) for url in members}, _PROBE_S, errors)
            if errors:
                raise self._told(model_tag, version, members, errors, "nothing was changed")
            self._load(engines, path, version, errors)
        self.peers.note_failed(model_tag)
        if errors:
            served = sorted(set(members) - set(errors))
            left = [f"{', '.join(served)} serve {version}"] if served else []
            left += [f"{url}: {error.state_left or 'not known'}" for url, error in sorted(errors.items())]
            raise self._told(model_tag, version, members, errors, "; ".join(left))
        return asked.number if asked.run_id == UNNAMED else version.number  # a new controller counts from 1 again

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """See `SyncMethod.evict_failed`; and `DiskMethod` for when they take part again."""
        failed = super().evict_failed(model_tag)
        for url in failed:
            self._evicted[model_tag, url] = self._asked.get(model_tag)
        return failed

    def close(self) -> None:
        """Closes all connections. Idempotent."""
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.close()

    # --- who loads ---

    def _members(self, model_id: str, deadline: Deadline, version: Version | None = None) -> tuple[str, ...]:
        """The engines of a model now, less those that were evicted. Where nobody else is left, those that answer take
        part again for a newer version."""
        urls = self._urls.get(model_id)
        if urls is None:
            raise InvalidRequestError(f"no engine of model {model_id!r} is known: {', '.join(self._urls)}")
        found: list[str] = []
        for url in urls:
            if not self.peers.live(model_id, (url.rstrip("/"),)):  # it may be gone, which is known already
                found.append(url.rstrip("/"))
            elif self._capabilities(url).engine == "sglang-router":
                with contextlib.closing(SGLangRouter(url, token=self._token, verify=self._verify)) as router:
                    found += router.workers(timeout_s=min(_PROBE_S, deadline.check("list of workers", peer=url)))
            else:
                found.append(url.rstrip("/"))
        self._forget_gone(model_id, found)
        members = self.peers.live(model_id, dict.fromkeys(found))
        if not members and version is not None:
            newer = [url for url in dict.fromkeys(found) if self._is_newer(model_id, url, version)]
            for url in _each({url: functools.partial(self._engine, url) for url in newer}, _PROBE_S, {}):
                self.peers.readmit(model_id, url)
            members = self.peers.live(model_id, dict.fromkeys(found))
        if not members:
            raise NoEnginesError(f"every engine of model {model_id!r} was evicted")
        return members

    def _forget_gone(self, model_id: str, found: Sequence[str]) -> None:
        """Lets go of engines that no model names any more: a router's workers come and go. One that was evicted and
        is named again later is another process at its address: the old one's failures are not its own."""
        for model, url in tuple(self._evicted):
            if model == model_id and url not in found:
                del self._evicted[model, url]
                self.peers.readmit(model_id, url)
        with self._lock:
            self._named[model_id] = frozenset(found)
            named = frozenset().union(*self._named.values(), *self._urls.values())
            self._known = {url: known for url, known in self._known.items() if url in named}
            gone = [self._engines.pop(url) for url in self._engines.keys() - named]
        for engine in gone:
            engine.close()

    def _is_newer(self, model_id: str, url: str, version: Version) -> bool:
        """Whether that version was not asked for when that engine was evicted."""
        last = self._evicted.get((model_id, url))
        return last is None or last.run_id != version.run_id or last.number < version.number

    def _capabilities(self, url: str) -> Capabilities:
        with self._lock:
            known = self._known.get(url)
        if known is None:
            known = probe(url, token=self._token, verify=self._verify, timeout_s=_PROBE_S)
            self._check_is_meant(known)
            with self._lock:
                self._known[url] = known
        return known

    def _check_is_meant(self, known: Capabilities) -> None:
        """It is what the configuration says, and serves that model.

        Raises:
            ConfigError: it is not, or does not.
        """
        if self._backend is not None and not known.engine.startswith(self._backend):
            raise ConfigError(
                f"inference_service.backend is {self._backend!r}, and {known.url} is {known.engine}",
                peer=known.url,
                state_left="nothing was changed",
            )
        if self._served_model is None:
            return
        served = served_models(known.url, token=self._token, verify=self._verify, timeout_s=_PROBE_S)
        if served is not None and self._served_model not in served and not self._has_loaded(known, served):
            raise ConfigError(
                f"inference_service.model is {self._served_model!r}, and {known.url} serves {', '.join(served)}",
                peer=known.url,
                state_left="nothing was changed",
            )

    def _has_loaded(self, known: Capabilities, served: Sequence[str]) -> bool:
        """Whether it is an SGLang that is called by a folder of this method's models, which it has loaded."""
        folders = tuple(f"{self._engine_root}/{model_id}/" for model_id in self._urls)
        return known.engine.startswith("sglang") and any(name.startswith(folders) for name in served)

    def _engine(self, url: str) -> DiskEngine[Any]:
        """The handle of an engine, made when it is met first.

        Raises:
            ConfigError: it lacks what is needed.
        """
        with self._lock:
            if url in self._engines:
                return self._engines[url]
        known = self._capabilities(url)
        if known.engine not in ("vllm", "sglang"):
            raise ConfigError(
                f"method disk knows vLLM, SGLang and its router, and {url} is none of them: method network tells any "
                "server a path",
                peer=url,
                state_left="nothing was changed",
            )
        known.need(Feature.RELOAD)
        sums = self._compare and known.can(Feature.CHECKSUM)
        made: DiskEngine[Any]
        if known.engine == "vllm":
            made = VllmDisk(VllmReloadApi(url, token=self._token, verify=self._verify), self._settings, sums=sums)
        else:
            made = SGLangDisk(SGLangApi(url, token=self._token, verify=self._verify), self._settings, sums=sums)
        with self._lock:
            return self._engines.setdefault(url, made)

    def _resolved(self, model_id: str, version: Version) -> Version:
        versions = self._folder.versions(model_id)
        if version in versions and version.run_id != UNNAMED:
            return version
        latest = self._folder.latest(model_id)
        if latest is None or latest.run_id != version.run_id or latest.number < version.number:
            named = ", and name its run and number then" if version.run_id == UNNAMED else ""
            raise VersionError(
                f"{self._folder.root} has no {version} of model {model_id!r}; the latest is {latest}: publish a "
                f"version before the controller is told of it{named}",
                version=str(version),
            )
        return latest

    # --- how ---

    def _load(
        self, engines: Mapping[str, DiskEngine[Any]], path: Path, version: Version, errors: dict[str, WeightSyncError]
    ) -> None:
        """Load, compare, resume; who fails a step takes no further one, and is added to `errors`. Comparing and
        resuming have a time of their own: who hangs in a load must not keep the others paused for good.
        """
        compared = self._compare and len(engines) > 1

        def load(engine: DiskEngine[Any]) -> None:
            engine.load(path, version, deadline=Deadline(self._timeout_s))
            if not compared:
                engine.resume(deadline=Deadline(_RESUME_S))

        steps = {url: functools.partial(load, engine) for url, engine in engines.items()}
        loaded = list(_each(steps, self._timeout_s, errors))
        if not compared:
            return
        sums_s = min(self._timeout_s, _SUMS_S)
        sums = _each(
            {url: functools.partial(engines[url].checksum, deadline=Deadline(sums_s)) for url in loaded}, sums_s, errors
        )
        errors.update(_unequal(sums, engines))
        right = [url for url in loaded if url not in errors]
        _each(
            {url: functools.partial(engines[url].resume, deadline=Deadline(_RESUME_S)) for url in right},
            _RESUME_S,
            errors,
        )

    def _told(
        self,
        model_id: str,
        version: Version,
        members: Sequence[str],
        errors: Mapping[str, WeightSyncError],
        state_left: str,
    ) -> SyncFailedError:
        self.peers.note_failed(model_id, errors)
        with self._lock:
            for url in errors:  # it is met anew: what it can may have changed
                self._known.pop(url, None)
            left = [self._engines.pop(url) for url in errors if url in self._engines]
        for engine in left:
            engine.close()
        return SyncFailedError(
            f"{len(errors)} of {len(members)} engines did not load it: {', '.join(sorted(errors))}",
            causes=errors,
            version=str(version),
            state_left=state_left,
        )


def _unequal(
    sums: Mapping[str, tuple[str, ...] | None], engines: Mapping[str, DiskEngine[Any]]
) -> dict[str, WeightSyncError]:
    """Errors of engines whose checksums differ from those of most engines of their kind with as many workers."""
    named = {url: f"{type(engines[url]).__name__} {len(each)}:{each}" for url, each in sums.items() if each is not None}
    return {
        url: DigestMismatchError(
            "engines that loaded the same folder have other checksums of their live weights",
            peer=url,
            state_left="it is paused, with weights that differ from another engine's",
        )
        for url in unequal(named)
    }


def _each(calls: Mapping[str, Callable[[], _T]], timeout_s: float, errors: dict[str, WeightSyncError]) -> dict[str, _T]:
    """Makes all calls at once; results of those that went well, errors of the others into `errors`."""
    results, failed = call_all(calls, what="a step of a load", timeout_s=timeout_s + _GRACE_S)
    errors.update(failed)
    return results
