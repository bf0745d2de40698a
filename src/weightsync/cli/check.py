"""`weightsync check`: whether an engine would take a model's weights, before a training run."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.inspect import header_of
from weightsync.cli.shared import MAX_S, Token, Verify, told
from weightsync.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    ManifestMismatchError,
    StateError,
    SyncFailedError,
    WeightSyncError,
    WrongArtifactError,
    WrongBaseError,
)

if TYPE_CHECKING:
    from weightsync.types import Adapter, EngineHandle, TensorSpec


def check(
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|FILE|URL", help="A checkpoint (*.safetensors), an adapter's folder, or a trainer's agent."
        ),
    ],
    engine: Annotated[
        str, typer.Option(metavar="URL", help="vllm+http://..., sglang+http://..., or http://..., which is asked.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What the trainer is going to send floating-point weights as; keep: as they are. bfloat16 where "
            "nothing is said, keep for an adapter."
        ),
    ] = None,
    model_id: Annotated[str, typer.Option(help="The model's name, where the engine has one.")] = "default",
    staleness: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="Of an adapter: how many versions old answers may be; vLLM's slots are counted."
        ),
    ] = 1,
    token: Token = None,
    verify: Verify = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Also where the engine has a trainer that has not ended in order, or a host: a sync under way is "
            "aborted, and the next one joins anew.",
        ),
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="Seconds that each of its answers has.")] = 30.0,
) -> None:
    """Asks an engine whether a model's names, shapes and dtypes are its own; nothing moves, and it goes on serving.

    The engine is shown what a trainer would send, as at the beginning of a sync, and answers before a byte moves. What
    differs is counted; each reason stands once, with its first three tensors, and with the closest name that it has. A
    checkpoint's names are those that a trainer sends without a name_map. Of an adapter it is also asked whether it
    takes adapters, and one of this rank and base. An engine whose trainer has not ended in order, or that a host has
    loaded (weightsync serve), is left alone: --anyway asks it between two syncs.

    Exit codes: 0: it would take them. 1: it would not, does not answer, or is left alone. 2: a wrong option or token,
    or no such file.

    Example: weightsync check --model ./checkpoint --engine vllm+http://127.0.0.1:8000
    """
    with told():
        from weightsync.cli.faces import refuse_a_service
        from weightsync.handles.by_url import engine_at
        from weightsync.handles.sglang import SGLangEngine

        specs, adapter = _specs(model, token=token, verify=verify or True, dtype=dtype, timeout_s=timeout_s)
        try:
            handle = engine_at(engine, token=token, verify=verify or True, timeout_s=timeout_s)
        except ConfigError:
            refuse_a_service(engine, token=token, verify=verify or True, timeout_s=timeout_s)
            raise
        try:
            if isinstance(handle, SGLangEngine):
                raise ConfigError(
                    f"{handle.engine_id} is SGLang, which names no tensor before it loads: it can be asked nothing"
                )
            _ask(handle, specs, adapter, model_id, anyway=anyway, timeout_s=timeout_s)
            if adapter is not None:
                _check_slots(handle, model_id, staleness, timeout_s=timeout_s)
        except (ManifestMismatchError, WrongArtifactError, WrongBaseError, EngineError) as error:
            error.peer = error.peer or handle.engine_id
            raise
        finally:
            handle.close()  # type: ignore[attr-defined]
        total = sum(spec.nbytes for spec in specs)
        what = "it" if adapter is None else f"the adapter of {adapter}"
        print(f"{handle.engine_id} would take {what}: {len(specs)} tensors, {total / 1e6:.1f} MB")


def _specs(
    model: str, *, token: str | None, verify: bool | str, dtype: str | None, timeout_s: float
) -> tuple[Sequence[TensorSpec], Adapter | None]:
    """What a trainer of that model would send, and of an adapter its configuration.

    Raises:
        ConfigError: there is no such checkpoint, or the dtype is none.
        WeightSyncError: the agent does not answer.
    """
    if model.startswith(("http://", "https://")):
        if dtype is not None:
            raise ConfigError("--dtype is for a checkpoint: an agent says itself as what its trainer sends")
        from weightsync.clients.agent import AgentClient

        with contextlib.closing(AgentClient(model, token=token, verify=verify)) as client:
            manifest = client.manifest(timeout_s=timeout_s).publication.manifest
        return manifest.tensors, manifest.adapter
    from weightsync.types import TensorSpec
    from weightsync.types.dtypes import CASTABLE, target_dtype

    headers = _headers(Path(model))
    adapter = _adapter_beside(Path(model), headers)
    dtype = dtype or ("bfloat16" if adapter is None else "keep")
    wanted = None if dtype == "keep" else dtype
    if wanted is not None and wanted not in CASTABLE:
        raise ConfigError(f"--dtype is one of {', '.join(sorted(CASTABLE))} or keep, not {dtype!r}")
    specs = [
        TensorSpec(
            name=spec.name, dtype=spec.dtype if wanted is None else target_dtype(spec.dtype, wanted), shape=spec.shape
        )
        for spec in headers
    ]
    return specs, adapter


def _adapter_beside(path: Path, specs: Sequence[TensorSpec]) -> Adapter | None:
    """The adapter of a folder that PEFT has written; None: it is a model's."""
    from weightsync.plan.peft_config import adapter_in_folder

    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return adapter_in_folder(file.read_bytes(), specs)
    except InvalidRequestError as error:
        raise ConfigError(f"{file}: {error.message}") from None


def _headers(path: Path) -> list[TensorSpec]:
    """The tensors of a checkpoint, from the headers of its files."""
    from weightsync.extract.checkpoint_files import checkpoint_files

    if not path.exists():
        raise ConfigError(f"--model is a folder or a file of safetensors, or an agent's URL: {path} is not there")
    files = checkpoint_files(path) if path.is_dir() else (path,)
    found: dict[str, TensorSpec] = {}
    for file in files:
        for name, spec in header_of(file)[0].items():
            if name in found:
                raise ConfigError(f"{path} has {name!r} twice", parameter=name)
            found[name] = spec
    return list(found.values())


def _ask(
    handle: EngineHandle,
    specs: Sequence[TensorSpec],
    adapter: Adapter | None,
    model_id: str,
    *,
    anyway: bool,
    timeout_s: float,
) -> None:
    """Opens a session and aborts it.

    Raises:
        ManifestMismatchError: the engine's model is another.
        StateError: it has a trainer, or a host.
        WeightSyncError: it does not answer, or fails.
    """
    from weightsync.transfer.base import init_requests
    from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy
    from weightsync.types import AbortRequest, BeginRequest, DescribeRequest, EngineOp, Manifest, TensorTable, Version
    from weightsync.types.engine import CHECK_RUN
    from weightsync.update.artifacts import check_takes

    told_of = handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=timeout_s)
    is_in_use = adapter is None and told_of.run_id is not None and not told_of.run_id.startswith(CHECK_RUN)
    if is_in_use and not anyway:  # an adapter's check aborts nothing
        raise StateError(
            f"{handle.engine_id} has weights of {told_of.run_id}, and whoever brought them, its trainer or a host that "
            "follows it, has not said that it is done: a sync that is under way would be aborted. Say --anyway "
            "where none is: nothing that is served changes, and the next sync joins anew",
            state_left="nothing was asked",
        )
    run_id = f"{CHECK_RUN}-{uuid.uuid4().hex[:8]}"
    manifest = Manifest(
        version=Version(run_id=run_id, number=0), model_id=model_id, tensors=TensorTable.of(specs),
        artifact="model" if adapter is None else "lora", adapter=adapter,
    )  # fmt: skip
    try:
        check_takes(manifest, {handle.engine_id: told_of})
    except SyncFailedError as error:
        raise error.causes[handle.engine_id] from None
    session = f"check-{uuid.uuid4().hex[:8]}"
    sizes = {handle.engine_id: told_of.world_size}
    info, _ = PackedCudaIpcTransferStrategy().create_init_info(sizes)
    requests = init_requests(info, sizes, run_id=run_id, model_id=model_id, artifact=manifest.artifact)
    begin = BeginRequest(session=session, manifest=manifest, deadline_s=timeout_s)
    handle.call(EngineOp.INIT, requests[handle.engine_id], timeout_s=timeout_s)
    failed: list[WeightSyncError] = []
    try:
        handle.call(EngineOp.BEGIN, begin, timeout_s=timeout_s)
    finally:
        for name in (session, info.group_name):
            request = AbortRequest(session=name, reason="nothing but a check")
            try:
                handle.call(EngineOp.ABORT, request, timeout_s=timeout_s)
            except WeightSyncError as error:
                failed.append(error)
    if failed:
        raise failed[0]


def _check_slots(handle: EngineHandle, model_id: str, staleness: int, *, timeout_s: float) -> None:
    """Whether a vLLM has room for the versions of an adapter that are under way at once.

    Raises:
        ConfigError: it has not.
    """
    from weightsync.handles.two_kinds import TwoKinds

    if not isinstance(handle, TwoKinds):
        return
    slots = handle.adapters(timeout_s=timeout_s)
    others = slots.others + sum(each.model_id != model_id for each in slots.adapters)
    needed, free = max(2, staleness + 1), slots.max_loras - others
    if free < needed:
        raise ConfigError(
            f"{handle.engine_id} has {slots.max_loras} slots for adapters, {others} of them taken by others, and "
            f"staleness {staleness} needs {needed}: start it with --max-loras {others + needed} or more"
        )
    wait = "" if free > staleness + 1 else f"; with {free + 1} no load would wait for an answer to end"
    print(f"{free} of its {slots.max_loras} slots are free, {needed} are needed{wait}")
