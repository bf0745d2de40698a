"""`weightsync.push`: training ranks push each version into engines, which are named by their URLs.

with weightsync.push(model, ["vllm+http://host-0:8000", "http://host-1:8123"], token=TOKEN) as push:
    for step in range(steps):
        train(model)
        report = push.step()        # every rank
        print(report)               # v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved

entry   rank 0 asks each URL what it is; every engine is met, and asked whether the model is its own
step    PushSync.sync_weights under the next number: returns when every engine serves it, or raises
end     the transfer group is left; engines go on serving

With a controller (`sync_method: push`) it says at which steps all ranks push; `step` returns None at the others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from weightsync.clients.controller import ControllerClient
from weightsync.config import WeightSyncConfig, select_strategy
from weightsync.errors import (
    ConfigError,
    ExtractError,
    StateError,
    TrainerRankError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.extract.base import WeightExtractor
from weightsync.handles.by_url import read_engine_url
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.sglang import SGLangEngine
from weightsync.net.routes import address_towards
from weightsync.trainer.push import TIME_OUTS, PushSync
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import EngineHandle, SyncReport
from weightsync.types.closing import Closing
from weightsync.types.process import of_one_process
from weightsync.types.push_orders import PushOrder
from weightsync.verbs.engines import EngineLike, close_all, handle_of, urls_of
from weightsync.verbs.lora import BaseLike, lora_choice
from weightsync.verbs.order_taker import OrderTaker
from weightsync.verbs.settings import (
    ConfigSource,
    check_once,
    check_options,
    loaded,
    token_of,
    with_extract,
    with_transfer,
)
from weightsync.verbs.weights import TrainerWeights, extractor_from

_MARGIN_S = 30.0
_logger = logging.getLogger(__name__)


def push(
    weights: TrainerWeights,
    engines: EngineLike | Sequence[EngineLike] | None = None,
    *,
    token: str | None = None,
    model_id: str | None = None,
    dtype: str | torch.dtype | None = None,
    name_map: Callable[[str], str | None] | None = None,
    bridge: Any = None,
    adapter: str | None = None,
    merge: bool = False,
    base: BaseLike = None,
    strategy: str | None = None,
    delta: bool | None = None,
    controller: str | None = None,
    config: ConfigSource = None,
    verify: bool | str = True,
    alone: bool = False,
    **options: Any,
) -> Pusher:
    """Meets the engines. Every training rank calls it, at the same point, and uses it as a context manager.

    Where an argument is not given, `config` says it, and where that does not, the default.

    Args:
        weights: see `weightsync.publish`.
        engines: URLs, handles or modules; rank 0 alone reads them. `push.engines` of the configuration, or its
            `inference_service.base_url`.
        token: bearer token of the engines and of the controller; the variable WEIGHTSYNC_TOKEN where not given.
        model_id: which model; `inference_service.model_tag`, or "default".
        dtype: the engines' dtype, of floating-point weights, as a name or torch's own; "bfloat16" where nothing is
            said, "keep" for the trainer's.
        name_map: from the trainer's name to the engine's; None drops a tensor.
        bridge: of Megatron, see `extractor_for`.
        adapter, merge, base: of a PEFT model, see `weightsync.publish`.
        strategy: "broadcast", "sglang", "cuda_ipc" or "packed_cuda_ipc"; chosen by itself where not given.
        delta: what has changed alone is sent.
        controller: URL of a controller whose `sync_method` is "push": a step is pushed where it orders that;
            `push.controller` of the configuration.
        config: a YAML file, a mapping or a `WeightSyncConfig`.
        verify: see `JsonClient`, of the engines.
        alone: this process pushes by itself, see `PushSync`; no other rank calls it.
        options: further arguments of `PushSync`: transfer_timeout_s, run_id, require_all_engines, recorder, codec, ...

    Raises:
        ConfigError: a setting makes no sense, on any rank; or a URL has no engine that can be pushed to.
        AuthError: an engine, or the controller, refuses the token.
        EngineUnreachableError: nobody answers at an engine's URL.
        NoEnginesError, SyncFailedError: an engine does not answer, or its model has other names, shapes or dtypes.
        WeightSyncError: the weights can't be extracted, or another rank failed. Nothing is left open.
    """
    check_options(push, options, PushSync)
    lora = lora_choice(weights, adapter=adapter, merge=merge, base=base)
    times = {key: options.pop(key, None) for key in TIME_OUTS}
    settings = with_transfer(with_extract(loaded(config), dtype=dtype), strategy=strategy, delta=delta, **times)
    settings = settings if lora is None else lora.settings(settings, dtype_given=dtype is not None)
    settings = settings.for_method("push")
    timeout_s = settings.transfer.join_timeout_s + _MARGIN_S
    ranks = TrainingRanks(timeout_s=timeout_s, alone=alone)
    opened = contextlib.ExitStack()
    handles: list[EngineHandle] = []
    made: list[EngineHandle] = []  # of these, ours to close
    opened.callback(close_all, made)
    error: WeightSyncError | None = None
    extractor: WeightExtractor | None = None
    chosen: dict[str, Any] = {}
    client: EngineFanout | None = None
    try:
        try:
            if lora is None:
                extractor = extractor_from(weights, settings, name_map=name_map, bridge=bridge)
            else:
                assert isinstance(weights, torch.nn.Module)
                extractor = lora.extractor(weights, settings, ranks, name_map=name_map, timeout_s=timeout_s)
            extractor.metadata(settings.extract.dtype)
            if ranks.rank == 0:
                configured = urls_of(settings.inference_service, settings.push.engines)
                listed = _listed(configured if engines is None else engines)
                bearer = token_of(token)
                for number, engine in enumerate(listed):
                    name = f"module-{number}"
                    handles.append(handle_of(engine, name=name, token=bearer, verify=verify, made=made))
                chosen = _chosen(settings, listed, handles)
                client = EngineFanout(handles)
                if (url := controller or settings.push.controller) is not None:
                    ControllerClient(url, token=bearer, verify=verify).close()  # raises where the URL is none
        except Exception as caught:
            error = as_weightsync_error(caught, ConfigError, "the push can't begin", rank=ranks.rank)
        first = ranks.settle(error, chosen=chosen, controller=controller or settings.push.controller)[0]
        assert extractor is not None
        model = settings.inference_service.model_tag if model_id is None else model_id
        if first["controller"] is not None:  # when, and how often, is what it reads from the same file
            whens = ("sync_mode", "staleness_threshold", "validate_freq")
            settings = settings.model_copy(update={key: getattr(WeightSyncConfig(), key) for key in whens})
        sync = PushSync.from_config(
            with_transfer(settings, **first["chosen"]).model_copy(update={"push": type(settings.push)()}),
            extractor,
            client,
            model_id=model,
            alone=alone,
            **options,
        )
        taker = None
        if (url := first["controller"]) is not None:
            taker = OrderTaker(
                url, model, token=token_of(token), verify=verify, timeout_s=timeout_s, alone=alone
            )  # fmt: skip
            opened.callback(taker.close)
            taker.meet()
        pusher = Pusher(sync, opened, taker, bind=None if lora is None else functools.partial(lora.bind, extractor))
    except BaseException:
        opened.close()
        raise
    finally:
        ranks.close()
    pusher.begin()
    return pusher


@of_one_process
class Pusher(Closing):
    """What `push` gives. Every rank has one, and calls `step` and `close` in the same order."""

    def __init__(
        self,
        sync: PushSync,
        opened: contextlib.ExitStack,
        taker: OrderTaker | None = None,
        *,
        bind: Callable[[], None] | None = None,
    ) -> None:
        self._bind = bind
        self._sync = sync
        self._opened = opened
        self._taker = taker
        self._number = 0
        self._closed = False
        self._is_owed = False  # the newest version was not due, and was not pushed

    @property
    def run_id(self) -> str:
        """Name of this trainer's run."""
        return str(self._sync.run_id)

    @property
    def sync(self) -> PushSync:
        """What is below, for those who need more."""
        return self._sync

    def begin(self) -> None:
        """Meets the engines, and asks each whether the model is its own; `push` calls it. Every rank."""
        try:
            self._sync.initialize()
            self._sync.check()
        except BaseException:
            self.close()
            raise

    def step(self, version: int | None = None) -> SyncReport | None:
        """Pushes the weights as they are now, and returns when every engine serves them. Every rank, between two steps.

        Args:
            version: its number; one more than the last, from 1 on, where not given. Numbers rise.

        Returns:
            What was done; None where a controller has not ordered a push, or does not answer.

        Raises:
            SyncFailedError: engines failed; `causes` says which and why. They serve their old version, or refuse to
                serve. The next step starts over with those that answer. Where a controller keeps rollout waiting for
                it, its retries were made before.
            TrainerRankError: a rank is gone: restart the job.
            StateError: this push is closed.
            WeightSyncError: as for its kind; as with SyncFailedError. A controller refuses what it is told: another run
                has taken over.
        """
        if self._closed:
            raise StateError("this push is closed: step() belongs into its with block")
        number = self._number + 1 if version is None else version
        try:
            return self._pushed(number) if self._taker is None else self._ordered(number, self._taker)
        finally:
            if type(number) is int:
                self._number = max(self._number, number)  # a number that failed half-way is not used again

    def _pushed(self, number: int) -> SyncReport:
        error: WeightSyncError | None = None
        if self._bind is not None:
            try:
                self._bind()
            except Exception as caught:  # told to all ranks where they agree
                error = as_weightsync_error(caught, ExtractError, "the adapter can't be pushed")
        return self._sync.sync_weights(number, error=error)

    def _ordered(self, number: int, taker: OrderTaker, *, last: bool = False) -> SyncReport | None:
        order = taker.next(self._sync.run_id, number, last=last)
        self._is_owed = order is None
        report: SyncReport | None = None
        while order is not None:
            try:
                report = self._taken(number, taker, order)
            except TrainerRankError:  # nobody is left to agree with
                raise
            except WeightSyncError:
                if (order := taker.next(self._sync.run_id, number, again=True)) is None:
                    raise
            else:  # a controller may want those that were left out
                order = taker.next(self._sync.run_id, number, again=True) if report.lost else None
        return report

    def _taken(self, number: int, taker: OrderTaker, order: PushOrder) -> SyncReport:
        outcome: SyncReport | WeightSyncError = TransferAbortedError("the trainer was interrupted")
        try:
            outcome = self._pushed(number)
            return outcome
        except WeightSyncError as error:
            outcome = error
            raise
        finally:
            taker.done(order, outcome)

    def close(self, *, wait: bool = True) -> None:
        """Leaves the transfer group and closes what was opened; engines go on serving. Every rank. Idempotent.

        Args:
            wait: whether a last version that was not due is pushed before: the weights as they are now. Where that
                fails, a warning says so.
        """
        self._closed = True
        with self._opened:
            try:
                if wait and self._is_owed and self._taker is not None:
                    self._push_the_last(self._taker)
            finally:
                self._sync.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def _push_the_last(self, taker: OrderTaker) -> None:
        self._is_owed, number = False, self._number
        try:
            report = self._ordered(number, taker, last=True)
        except WeightSyncError as failed:
            _logger.warning("the last version, %d, was not pushed: %s", number, failed)
        else:
            if report is None:
                why = "the controller ordered no push of it, or a validation still runs"
                _logger.warning("the last version, %d, was not pushed: %s", number, why)


def _listed(engines: EngineLike | Sequence[EngineLike]) -> list[EngineLike]:
    """One may stand for itself.

    Raises:
        ConfigError: there is none.
    """
    listed = list(engines) if isinstance(engines, list | tuple) else [engines]
    if not listed:
        raise ConfigError(
            "push needs engines: URLs such as 'vllm+http://host-0:8000' (or push.engines of the YAML file)"
        )
    check_once((each for each in listed if isinstance(each, str)), name="push")
    return listed  # type: ignore[return-value]


def _chosen(
    settings: WeightSyncConfig, engines: Sequence[EngineLike], handles: Sequence[EngineHandle]
) -> dict[str, Any]:
    """What the engines decide of the transfer, where nobody has said it."""
    given = settings.transfer.model_fields_set
    chosen: dict[str, Any] = {}
    foreign = [handle.engine_id for handle in handles if isinstance(handle, SGLangEngine)]
    if foreign and len(foreign) < len(handles):
        raise ConfigError(
            f"SGLang takes weights by a strategy of its own, so {', '.join(foreign)} can't share a push with other "
            "engines: give it a push of its own"
        )
    if foreign and "strategy" not in given:
        chosen["strategy"] = "sglang"
    if "master_addr" not in given and "cuda_ipc" not in select_strategy(settings):
        urls = [read_engine_url(each).url for each in engines if isinstance(each, str)]
        towards = address_towards(urls, instead="say transfer.master_addr in the configuration")
        if towards is not None:
            chosen["master_addr"] = towards
    return chosen
