"""GatheredTransfer: what a framework gathers tensor by tensor, on training rank 0, is published or pushed.

All training ranks walk one iterator in step and rank 0 alone sends: so nothing is sent before the iterator's end.
`trl` and `skyrl` are this by the names of these frameworks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weightsync.adapters.host_copy import HostCopy
from weightsync.errors import ConfigError, InvalidRequestError
from weightsync.trainer.offload_steps import OffloadReport
from weightsync.types import SyncReport, Version
from weightsync.types.deadline import check_wait_s
from weightsync.verbs.publishing import Publisher, publish
from weightsync.verbs.pushing import Pusher, push
from weightsync.verbs.settings import loaded

_logger = logging.getLogger(__name__)


class GatheredTransfer:
    """The weights' way from a framework's trainer to its inference servers. In training rank 0 alone; not thread-safe.

    Versions are counted from 1 on.

    Args:
        model_id: the name that rollout hosts ask for.
        to: URLs of rollout services (`weightsync serve`), or of a controller, that are told of each version.
        engines: URLs that are pushed to, instead of publishing.
        wait_s: how long `wait_served` waits until those in `to`, or in `publish.to` of a configuration, who are alive
            serve the version, so that a framework counts an answer as of the version that made it; 0: it does not. Who
            is away gets a second, and catches up by itself.
        settings: further arguments of `weightsync.publish`, or of `weightsync.push`: token, dtype, config, ...

    Attributes:
        report: of the last version.
        not_serving: who of these did not serve the last version when `wait_served` returned, and why, by URL.

    Raises:
        ConfigError: both `to` and `engines`; `engines` and a controller that orders pushes; `wait_s` is no number of
            seconds; or the configuration is wrong.
    """

    def __init__(
        self,
        model_id: str | None = None,
        *,
        to: str | Iterable[str] | None = None,
        engines: str | Iterable[str] | None = None,
        wait_s: float = 120.0,
        **settings: Any,
    ) -> None:
        if to is not None and engines is not None:
            raise ConfigError("to= publishes and engines= pushes: give one of the two")
        if engines is not None:
            _refuse_controller(settings.get("controller"))
        try:
            check_wait_s("wait_s", wait_s, may_be_0=True)
        except InvalidRequestError as error:
            raise ConfigError(error.message) from None
        self._model_id = model_id
        self._to = to if to is None or isinstance(to, str) else list(to)
        self._engines = engines if engines is None or isinstance(engines, str) else list(engines)
        self._wait_s = wait_s
        self._settings = settings
        self._copy = HostCopy()
        self._weights: dict[str, torch.Tensor] = {}
        self._publisher: Publisher | None = None
        self._pusher: Pusher | None = None
        self.report: OffloadReport | SyncReport | None = None
        self.not_serving: Mapping[str, str] = {}

    @property
    def endpoint(self) -> str | None:
        """URL of the trainer's agent, which hosts that nobody tells are given; None before the first version."""
        return None if self._publisher is None else self._publisher.endpoint

    @property
    def version(self) -> Version | None:
        """The last one that was sent; None before the first."""
        return None if self.report is None else self.report.version

    def send(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Walks the iterator to its end, and sends what it gave.

        Args:
            iterator: names and whole tensors, on any device. It is walked to its end also where something fails.

        Raises:
            ConfigError, AuthError: with the first weights: a setting makes no sense, or a host has no such model.
            SyncFailedError: engines that are pushed to failed. They serve their old version, or refuse to serve.
            WeightSyncError: nothing was sent; engines serve their old version.
        """
        self._weights.clear()
        self._weights.update(self._copy.take(iterator))
        if self._engines is not None:
            if self._pusher is None:
                _refuse_controller(loaded(self._settings.get("config")).push.controller)
                given = {"model_id": self._model_id, **self._settings}
                self._pusher = push(self._weights, self._engines, alone=True, **given)
            self.report = self._pusher.step()
        else:
            if self._publisher is None:
                self._publisher = publish(self._weights, self._model_id, to=self._to, alone=True, **self._settings)
            self.report = self._publisher.step()
        _logger.info("%s", self.report)

    def wait_served(self) -> None:
        """Returns when the version is served; see `wait_s`."""
        if self._publisher is None or not self._publisher.to:
            return
        if isinstance(self.report, OffloadReport) and not self.report.published:
            self.not_serving = {"the trainer": f"it was not published: {self.report.why}"}
            _logger.warning("%s was not published, training goes on: %s", self.version, self.report.why)
            return
        self.not_serving = self._publisher.wait_served(self._wait_s)
        for who, why in self.not_serving.items():
            _logger.warning("%s does not serve %s yet, training goes on: %s", who, self.version, why)

    def close(self, *, wait: bool = True) -> None:
        """Ends what is under way, and gives the copy back; hosts go on with the last version. Idempotent.

        Weights that are sent after it begin a new run.

        Args:
            wait: until hosts have the last version.
        """
        publisher, pusher = self._publisher, self._pusher
        self._publisher = self._pusher = None
        try:
            if publisher is not None:
                publisher.close(wait=wait)
            if pusher is not None:
                pusher.close()
        finally:  # a close may still send
            self._weights.clear()
            self._copy = HostCopy()


def _refuse_controller(controller: str | None) -> None:
    if controller is not None:
        raise ConfigError(
            f"the controller {controller} orders pushes at some steps, and a framework takes each version that it "
            "sends for served: leave controller out, or publish to it: to="
        )
