"""CatchingUp: how a rollout service comes to serve what the answer to a heartbeat tells it to.

Engines that have it already are asked first; else an agent that has it is named to the model, which pulls it.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.host.agent_state import Claim
from weightsync.host.fleet_model import FleetModel
from weightsync.memory import boot_s
from weightsync.observe.told_once import ToldOnce
from weightsync.types import Version
from weightsync.types.fleet import AbsentVersion, ModelVersion

_ASK_AGAIN_S = 5.0

_logger = logging.getLogger(__name__)


class _Adopting(NamedTuple):
    """Engines of a model are asked whether they serve a version already.

    Attributes:
        version, answer: which, and whether they do.
        again_s: they are not asked again before.
        first: it is the first time: nothing is fetched meanwhile.
    """

    version: Version
    answer: Future[bool]
    again_s: float
    first: bool


class CatchingUp:
    """Of one service. The thread of its heartbeats alone uses it, but for `named`.

    Attributes:
        named: the agent that its fleet has named last, by model.
    """

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self._claims: dict[str, Claim] = {}
        self._troubles: dict[str, ToldOnce] = {}
        self._told: dict[str, Claim] = {}  # of these its fleet was told that they were denied
        self._adopting: dict[str, _Adopting] = {}

    def told_absent(self, model_id: str) -> AbsentVersion | None:
        """What it was told to catch up with and is not there, as its fleet is told; None: nothing."""
        claim = self._claims.get(model_id)
        if claim is None or claim.denied is None:
            return None
        self._told[model_id] = claim
        of = ModelVersion(model_id=model_id, run_id=claim.version.run_id, version=claim.version.number)
        return AbsentVersion(of=of, newest=claim.denied.newest)

    def go(self, model: FleetModel, wanted: ModelVersion, digest: str | None) -> None:
        """Begins to catch up with that, or goes on.

        Args:
            digest: of it, where some other instance has told; engines that serve it already can be asked then.
        """
        if model.serves(wanted.of):
            return
        wanted = msgspec.structs.replace(wanted, sender_endpoint=wanted.sender_endpoint.rstrip("/"))
        self.named[model.model_id] = wanted.sender_endpoint
        model.add_sender(wanted.sender_endpoint)
        if digest is not None and self._adopts(model, wanted, digest):
            return
        model.gate.release("the fleet has gone on", older_than=wanted.of)
        model.gate.allow(wanted.of)
        claim = self._claims.get(model.model_id)
        untold = claim is not None and claim.denied is not None and self._told.get(model.model_id) is not claim
        if claim is None or claim.version != wanted.of or (claim.error is not None and not untold):
            troubles = self._troubles.setdefault(model.model_id, ToldOnce(_logger))
            try:
                self._claims[model.model_id] = model.claimed(wanted.of, wanted.sender_endpoint)
                troubles.over()
            except WeightSyncError as error:
                words = "model %s: it can't catch up to %s: %s"
                troubles.say((wanted.run_id, type(error)), words, model.model_id, wanted.of, error)

    def _adopts(self, model: FleetModel, wanted: ModelVersion, digest: str) -> bool:
        """Whether the engines are being asked if they serve it already, which costs no transfer, and needs no trainer.
        A process that was started anew knows nothing of them."""
        before, now_s = self._adopting.get(model.model_id), boot_s()
        first = before is None or before.version != wanted.of
        lacks = before is not None and before.answer.done() and model.served is None and now_s >= before.again_s
        if before is None or first or lacks:  # an engine that did not answer in time may do so later
            ask = functools.partial(model.adopt, wanted.of, wanted.sender_endpoint, digest)
            answer = in_thread(ask, name="weightsync-adopt")
            before = self._adopting[model.model_id] = _Adopting(wanted.of, answer, now_s + _ASK_AGAIN_S, first)
        return before.first and not before.answer.done()
