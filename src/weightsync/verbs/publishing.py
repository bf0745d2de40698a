"""`weightsync.publish`: the trainer publishes each version at the cost of one copy, and rollout hosts fetch it.

with weightsync.publish(model, "actor", to=["http://host-0:9000"], token=TOKEN) as publisher:
    for step in range(steps):
        train(model)
        publisher.step()            # every rank

entry   extractor and settings are checked, the agent starts, whoever is in `to` is asked who he is
step    WeightManager.offload under the next number; rank 0's notifier tells `to`, in threads of its own
end     all ranks wait until rank 0 knows that those who are alive serve the last version; then it is withdrawn
error   nothing is waited for: the agent ends, and memory is given back
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    ExtractError,
    InvalidRequestError,
    StateError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.extract.base import training_rank
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.net.routes import address_towards
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.plan_cache import Weights
from weightsync.trainer.publisher import OffloadReport, WeightManager
from weightsync.trainer.ranks import TrainingRanks
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Version
from weightsync.types.closing import Closing
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process
from weightsync.verbs.canary import TOLERANCE
from weightsync.verbs.last_version import LastVersion
from weightsync.verbs.lora import BaseLike, LoraChoice, lora_choice
from weightsync.verbs.settings import ConfigSource, as_list, check_options, loaded, token_of, with_extract
from weightsync.verbs.storing import Storing, sink_config
from weightsync.verbs.weights import TrainerWeights, extractor_from

_OF_CHUNKS = frozenset({"extract.chunk_bytes", "extract.group_by_module"})

_logger = logging.getLogger(__name__)


def publish(
    weights: TrainerWeights,
    model_id: str | None = None,
    *,
    to: str | Sequence[str] | None = None,
    token: str | None = None,
    dtype: str | torch.dtype | None = None,
    name_map: Callable[[str], str | None] | None = None,
    bridge: Any = None,
    adapter: str | None = None,
    merge: bool = False,
    base: BaseLike = None,
    canary: Sequence[int] | None = None,
    canary_tolerance: float = TOLERANCE,
    host: str | None = None,
    port: int | None = None,
    advertise: str | None = None,
    last_wait_s: float | None = None,
    store: str | None = None,
    sign_key: str | None = None,
    config: ConfigSource = None,
    verify: bool | str = True,
    **options: Any,
) -> Publisher:
    """Begins to publish a model. Every training rank calls it, at the same point, and uses it as a context manager.

    Where an argument is not given, `config` says it, and where that does not, the default.

    Args:
        weights: a module (plain, FSDP2, DDP, DeepSpeed), Megatron's model chunks, a mapping of names to tensors, which
            may be others at each step, or an extractor. Of a PEFT model its adapter alone is published.
        model_id: the name that rollout hosts ask for; `inference_service.model_tag`, or "default".
        to: URLs of rollout services that are told of each version, or the URL of a controller; nobody needs to be:
            hosts that know this agent's URL find new versions by themselves.
        token: bearer token of the agents and of whoever is in `to`; the variable WEIGHTSYNC_TOKEN where not given.
        dtype: the engines' dtype, of floating-point weights, as a name or torch's own; "bfloat16" where nothing is
            said, "keep" for the trainer's.
        name_map: from the trainer's name to the engine's; None drops a tensor.
        bridge: of Megatron, see `extractor_for`.
        adapter: of a PEFT model with several, which.
        merge: publishes a PEFT model's base with the adapter merged into it; the trainer's weights are not touched.
        base: what the adapter is bound to, see `verbs.lora.BaseLike`; this trainer's base where not given.
        canary: token ids of a prompt: before each step the PEFT model is asked for their log-probabilities (on every
            rank), and each engine that takes adapters has to say the same before it serves the version.
        canary_tolerance: how far an engine's may be from the trainer's.
        host: where the agents listen: loopback, or where `to` names other machines this one's address towards them.
            Beyond loopback only with a token.
        port: of the agents; 8765, 0: the system's choice.
        advertise: host name by which rollout hosts reach the agents; `host`.
        last_wait_s: how long the end of the block waits at most until the last version is served (fetched, where
            `to` is left out), and with a store as
            long before that, until it is stored; 60, 0: not at all.
        store: place in an object store that versions are written to too, by a process of its own: s3://bucket/run,
            gs://, az:// or file:///folder. The trainer never waits for it; where it is slow, versions are passed by.
        sign_key: file with the secret key (`weightsync keygen`) that what is written there is signed with.
        config: a YAML file, a mapping or a `WeightSyncConfig`.
        verify: see `JsonClient`, of whoever is in `to`.
        options: further arguments of `WeightManager`: guard_s, run_id, timeout_s, delta_budget_bytes, certificate, ...

    Raises:
        ConfigError: a setting makes no sense, on any rank; whoever is in `to` has no such model, or is an engine; the
            port is taken.
        AuthError: whoever is in `to` refuses the token.
        EngineUnreachableError: an agent did not start.
        RunClaimedError: another trainer writes into that place of the store.
        StoreAuthError: the store refuses the credential.
        WeightSyncError: the weights can't be extracted. Nothing is left running.
    """
    check_options(publish, options, WeightManager)
    lora = lora_choice(
        weights, adapter=adapter, merge=merge, base=base, canary=canary, canary_tolerance=canary_tolerance
    )
    settings = with_extract(loaded(config), dtype=dtype)
    settings = (settings if lora is None else lora.settings(settings, dtype_given=dtype is not None)).for_method("pull")
    chosen = settings.publish
    urls = as_list(to, chosen.to, name="to")
    token = token_of(token)
    given = {"model_id": model_id, "port": port, "advertise": advertise}
    no_route: ConfigError | None = None  # told to all ranks when they begin
    if (host := host or chosen.host) is None:
        try:
            host = address_towards(urls, instead="say where the agent listens with host=")
        except ConfigError as caught:
            no_route = caught
        host = host or "127.0.0.1"
    manager = WeightManager.from_config(
        settings.model_copy(update={"publish": chosen.model_copy(update={"to": ()})}),
        host=host,
        token=token,
        **{key: value for key, value in given.items() if value is not None},
        **options,
    )
    wait_s = chosen.last_wait_s if last_wait_s is None else last_wait_s
    try:
        check_wait_s("last_wait_s", wait_s, may_be_0=True)
    except InvalidRequestError as error:
        raise ConfigError(error.message) from None
    sink = sink_config(
        settings, store=store, sign_key=sign_key, model_id=manager.model_id, token=token,
        certificate=options.get("certificate"),
    )  # fmt: skip
    notifier = Notifier(urls, model_id=manager.model_id, token=token, verify=verify)
    storing = None if sink is None else Storing(manager, sink)
    publisher = Publisher(manager, notifier, last_wait_s=wait_s, storing=storing, lora=lora)

    def offloaded() -> Weights:
        made: Weights
        if lora is None:
            made = _as_offloaded(weights, settings, name_map=name_map, bridge=bridge)
        else:
            assert isinstance(weights, torch.nn.Module)
            ranks = TrainingRanks(timeout_s=manager.timeout_s, alone=manager.alone)
            try:
                made = lora.extractor(weights, settings, ranks, name_map=name_map, timeout_s=manager.timeout_s)
            finally:
                ranks.close()
        if no_route is not None:
            raise no_route
        return made

    publisher.begin(offloaded)
    return publisher


@of_one_process
class Publisher(Closing):
    """What `publish` gives. Every rank has one, and calls `step` and `close` in the same order."""

    def __init__(
        self,
        manager: WeightManager,
        notifier: Notifier,
        *,
        last_wait_s: float,
        storing: Storing | None = None,
        lora: LoraChoice | None = None,
    ) -> None:
        self._storing = storing
        self._lora = lora
        self._manager = manager
        self._notifier = notifier
        self._last_wait_s = last_wait_s
        self._weights: Any = None
        self._number = 0
        self._newest: Version | None = None
        self._missed = False
        self._closed = False
        self._not_serving: Mapping[str, str] = {}  # of the last wait
        self._waited_for: Version | None = None

    @property
    def run_id(self) -> str:
        """Name of this trainer's run."""
        return self._manager.run_id

    @property
    def model_id(self) -> str:
        return self._manager.model_id

    @property
    def endpoint(self) -> str:
        """URL of the first rank's host's agent: what rollout hosts are given as a source."""
        return self._manager.endpoint

    @property
    def to(self) -> tuple[str, ...]:
        """URLs of who is told of each version, as an argument or the configuration named them."""
        return self._notifier.urls

    @property
    def version(self) -> Version | None:
        """The newest version that was published; None before the first."""
        return self._newest

    @property
    def not_serving(self) -> Mapping[str, str]:
        """On rank 0: who of `to` does not serve what was published, and why, by URL: as the last wait found it, where
        it has not caught up since, or as each said when it was asked, every 5 s while it is behind. Where nobody was
        told: as the last wait found it, who has pulled of late and has not fetched the newest, by name. It does not
        wait."""
        return {**self._notifier.why_not(), **self._away()}

    @property
    def manager(self) -> WeightManager:
        """What is below, for those who need more."""
        return self._manager

    @property
    def store(self) -> SinkProcess | None:
        """What writes into the object store, on rank 0: `newest`, and `error` where it has trouble; else None."""
        return None if self._storing is None else self._storing.sink

    def begin(self, weights: Callable[[], Any]) -> None:
        """Starts the agents, and meets whoever is told; `publish` calls it. Every rank; nothing is left where it fails.

        Args:
            weights: makes what `WeightManager.offload` takes.
        """
        try:
            error: WeightSyncError | None = None
            try:
                self._weights = weights()
                if self._manager.alone or training_rank() == 0:
                    self._notifier.meet()
            except Exception as caught:  # told to all ranks, once there is somebody who can
                error = as_weightsync_error(caught, ConfigError, "the weights can't be published")
            self._manager.start(error=error, deltas=self._storing is not None)
            if self._manager.is_first_rank:
                self._notifier.start(self._manager.endpoints)
            if self._storing is not None:
                self._storing.begin()
        except BaseException:
            self._leave()
            raise

    def step(self, version: int | None = None) -> OffloadReport:
        """Publishes the weights as they are now, and returns when they may change again. Every rank, between two steps.

        Args:
            version: its number; one more than the last, from 1 on, where not given. Numbers rise.

        Returns:
            What was done. Where all memory was still read, nothing was published, and the trainer goes on: the next
            step, or the end of the block, brings the newest weights.

        Raises:
            StateError: this publisher is closed.
            VersionError: a version that is not above the last. Nothing was changed.
            TrainerRankError: a rank is gone.
            WeightSyncError: extraction or a copy failed on some rank, told on every rank; nothing was published.
        """
        if self._closed:
            raise StateError("this publisher is closed: step() belongs into its with block")
        number = self._number + 1 if version is None else version
        error: WeightSyncError | None = None
        if self._lora is not None:
            try:
                self._lora.bind(self._weights)
            except Exception as caught:  # told to all ranks where they agree
                error = as_weightsync_error(caught, ExtractError, "the adapter can't be published")
        try:
            report = self._manager.offload(self._weights, number, error=error)
        finally:
            self._number = max(self._number, self._manager.newest)  # one that failed half-way is not used again
        self._missed = not report.published
        if report.published:
            self._newest = report.version
            if self._manager.is_first_rank:
                self._notifier.announce(report.version)
        return report

    def close(self, *, wait: bool = True) -> None:
        """Waits until the last version is served, and withdraws it. Every rank. Idempotent.

        Args:
            wait: False: for nobody.

        Raises:
            TrainerRankError: a rank is gone. Memory was given back.
            WeightSyncError: the last step had published nothing, and its weights can't be published now, either.
        """
        if self._closed:
            return
        try:
            if wait and self._manager.newest >= 0:
                self._wait_for_the_last()
        finally:
            self._leave()

    def wait_served(self, timeout_s: float) -> Mapping[str, str]:
        """Waits until the newest version is served by those in `to` who are alive. Every rank.

        Where nobody is in `to`: until those that have pulled of late, or are at their first pull, have fetched it. Who
        was away when it was waited for before gets a second, so that nobody who is down costs the whole time at each
        version.

        Args:
            timeout_s: at most so long, and some seconds.

        Returns:
            On rank 0, why the others do not serve it, by URL. They are told again, and the trainer may go on.

        Raises:
            TrainerRankError: a rank is gone.
            StateError: this publisher is closed.
        """
        if self._newest is None:
            return {}
        if not self._manager.is_first_rank or not timeout_s:
            self._manager.wait_for_first_rank(lambda _: True)
            return {}
        newest = self._newest
        last = LastVersion(self._manager, self._notifier, newest, timeout_s=timeout_s, away=self._away())
        self._waited_for = newest

        def done(seconds: float) -> bool:
            found = last.outcome(seconds)
            self._not_serving = found or {}
            return found is not None

        self._manager.wait_for_first_rank(done)
        return self._not_serving

    def _away(self) -> Mapping[str, str]:
        """Those of the last wait who have not caught up since."""
        right = self._notifier.serving(self._waited_for) if self._waited_for is not None else ()
        return {who: why for who, why in self._not_serving.items() if who not in right}

    def _wait_for_the_last(self) -> None:
        """Every rank: none may take its host's agent away while somebody pulls from it."""
        if self._missed:  # the newest weights are nobody's yet
            self.step()
        self._not_serving = {}
        if self._storing is not None and self._newest is not None and self._last_wait_s:
            self._storing.wait(self._newest, timeout_s=self._last_wait_s)
        for who, why in self.wait_served(self._last_wait_s).items():
            _logger.warning("%s has not got the last version, %s, and it is withdrawn: %s", who, self._newest, why)

    def _leave(self) -> None:
        self._closed = True
        if self._storing is not None:
            self._storing.close()
        self._notifier.close()
        self._manager.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)


def _as_offloaded(
    weights: TrainerWeights, config: WeightSyncConfig, *, name_map: Callable[[str], str | None] | None, bridge: Any
) -> Weights:
    """What `offload` is given: the module or mapping itself, which it reads fastest, where no extractor says more, as
    of chunks, in which what is gathered comes."""
    extractor = extractor_from(weights, config, name_map=name_map, bridge=bridge)
    extractor.metadata(config.extract.dtype)
    plain = type(extractor) in (ModuleWeightExtractor, FSDPWeightExtractor, NamedTensorsExtractor)
    chunked = not extractor.can_shard_locally() and not _OF_CHUNKS.isdisjoint(dict(config.asked()))
    configured = name_map is not None or bool(config.extract.dtype_overrides) or chunked
    if plain and not configured and isinstance(weights, torch.nn.Module | Mapping):
        return weights
    return extractor
