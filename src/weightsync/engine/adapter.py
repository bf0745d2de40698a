"""AdapterEngine: an engine of an adapter whose base is another engine's of this process: of both, never a mixed pair.

base     takes versions of the model by itself; its pause waits for generations of the adapter too
adapter  a version is committed where its base is served, or staged beside it: of a set, either may come first
between  whoever generates waits until both have come; the pair that answers is one that was published together
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.live_base import LiveBase
from weightsync.engine.worker import EngineWorker
from weightsync.errors import ConfigError, NotServingError, WrongBaseError
from weightsync.load.base import WeightLoader
from weightsync.load.merged import MergedAdapterLoader
from weightsync.memory import LeaseReader
from weightsync.types import Base, Deadline, Manifest, Version

_LOOK_S = 0.002
"""So often whoever generates looks whether the other half has come."""


class _AttachedBase(LiveBase):
    """The base of an adapter as its own engine says it."""

    def __init__(self, worker: EngineWorker) -> None:
        super().__init__()
        self._worker = worker

    def check(self, manifest: Manifest, loader: WeightLoader) -> None:
        """Nothing: its base may be on its way."""

    def check_commit(self, manifest: Manifest, loader: WeightLoader) -> None:
        base = None if manifest.adapter is None else manifest.adapter.base
        coming = self._worker.coming
        if base is None or self.fits(base, loader) or (coming is not None and _is(base, coming)):
            return
        raise WrongBaseError(
            f"the adapter is one of {base}, and {self.said(loader)} is served here",
            version=str(manifest.version),
            state_left="nothing was changed; the old adapter is served on",
        )

    def fits(self, base: Base, loader: WeightLoader) -> bool:
        """Whether that is the base that is served."""
        served = self._worker.served
        if served is not None:
            return _is(base, served)
        return base.version is None and base.model_digest == (self._digest or self.digest(loader))

    def said(self, loader: WeightLoader) -> str:
        """What is served, in words."""
        served = self._worker.served
        return f"a base of digest {self.digest(loader)}" if served is None else f"base {served.version}"


def _is(base: Base, manifest: Manifest) -> bool:
    return base.version in (None, manifest.version) and base.model_digest in (None, manifest.model_digest)


class AdapterEngine(EmbeddedEngine):
    """Serves an adapter on what a base's engine serves. Generate inside its `generation`, which holds both.

    Args:
        loader: of the adapter; it leaves the base's tensors alone, as `PeftAdapterLoader` does.
        base: of the model that it is one of: an engine of one worker, of this process.
        engine_id, lease: see `EmbeddedEngine`.

    Raises:
        ConfigError: the loader writes the base's own tensors, or the base's engine has not one worker in this process.
    """

    def __init__(
        self,
        loader: WeightLoader,
        base: EmbeddedEngine,
        *,
        engine_id: str = "adapter",
        lease: LeaseReader | None = None,
    ) -> None:
        if isinstance(loader, MergedAdapterLoader):
            raise ConfigError(
                "a MergedAdapterLoader writes the base's own tensors, which the base's engine loads too: make the "
                "module a PEFT model and load it by PeftBaseLoader and PeftAdapterLoader, or publish base and adapter "
                "as one model (merge=True)"
            )
        self._base_engine = base
        self._on = _AttachedBase(_worker_of(base))
        self._loader = loader
        self._own = EngineWorker(loader, track=engine_id, base=self._on)
        super().__init__([self._own], engine_id=engine_id, lease=lease)

    @contextlib.contextmanager
    def generation(self, *, timeout_s: float = 30.0) -> Iterator[Version | None]:
        """As that of `EmbeddedEngine`; gives the adapter's version, whose base is served as long as the body runs.

        Raises:
            NotServingError: besides its reasons, the adapter's base is not there after `timeout_s`: nothing ran.
        """
        deadline, look = Deadline(timeout_s), threading.Event()
        while True:
            with self._base_engine.generation(timeout_s=deadline.remaining_s), contextlib.ExitStack() as own:
                try:  # whoever waited here would hold up a pause of the base
                    version = own.enter_context(super().generation(timeout_s=0.0))
                except NotServingError as error:
                    if error.state_left != "paused":
                        raise
                    why, state = f"this engine has been paused for over {timeout_s:g} s", "paused"
                else:
                    base = self._bound_to()
                    if base is None or self._on.fits(base, self._loader):
                        yield version
                        return
                    why = (
                        f"adapter {version} is one of {base}, and {self._on.said(self._loader)} is served: the other "
                        "half of the set has not come"
                    )
                    state = "waiting for the base, or for the adapter's next version"
            if deadline.expired:
                raise NotServingError(why, state_left=state)
            look.wait(_LOOK_S)

    def _bound_to(self) -> Base | None:
        served = self._own.served
        return None if served is None or served.adapter is None else served.adapter.base


def _worker_of(engine: EmbeddedEngine) -> EngineWorker:
    """The only worker of an engine, of this process.

    Raises:
        ConfigError: it has several, or one elsewhere.
    """
    only = next(iter(engine._workers)) if len(engine._workers) == 1 else None
    if not isinstance(only, EngineWorker):
        raise ConfigError(f"engine {engine.engine_id} has not one worker in this process: no adapter can be on it")
    return only
