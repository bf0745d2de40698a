"""SGLang's plug-in of ours: the middleware for adapters before its HTTP server, the proof behind each load of a worker.

SGLang (0.5.23) calls `register` in each of its processes (entry points of the group `sglang.srt.plugins`). It does
nothing unless `WEIGHTSYNC_SGLANG_LORA=1` says so: whoever installs this library beside SGLang has not asked for a
middleware in its server. In a release that has not the two functions it says so, and does nothing.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from typing import Any

from weightsync.handles.lora_messages import SGLANG_VARIABLE

_SERVER = ("sglang.srt.entrypoints.http_server", "_setup_and_run_http_server")
_WORKER = ("sglang.srt.managers.scheduler", "Scheduler", "load_lora_adapter")

_logger = logging.getLogger(__name__)


def register() -> None:
    """What SGLang calls. The server's process runs the HTTP server; those that it starts are workers, and those that
    are forked have its hooks."""
    if os.environ.get(SGLANG_VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from weightsync.engine.sglang_lora.worker import proved_load

    hooks: list[tuple[tuple[str, ...], Any, Any]] = [(_WORKER, proved_load, HookType.AROUND)]
    if multiprocessing.parent_process() is None:
        hooks.append((_SERVER, before_serving, HookType.BEFORE))
    if missing := [".".join(target) for target, _, _ in hooks if not _is_there(target)]:
        _logger.warning("this release of SGLang has no %s: weightsync gives it no adapters", ", ".join(missing))
        return
    for target, hook, kind in hooks:
        HookRegistry.register(".".join(target), hook, kind)


def before_serving(server_args: Any, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    """Puts the middleware outside of all of SGLang's own, so what it asks inside passes SGLang's check of keys."""
    if getattr(server_args, "tokenizer_worker_num", 1) != 1:
        _logger.warning("weightsync gives adapters to an SGLang with one tokenizer process alone; this one has more")
        return
    if not getattr(server_args, "enable_lora", False):
        _logger.warning("%s is set, and SGLang was started without --enable-lora", SGLANG_VARIABLE)
        return
    from weightsync.engine.sglang_lora.middleware import SGLangLoraMiddleware

    app = importlib.import_module(_SERVER[0]).app
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: SGLangLoraMiddleware(build(), tokenizer_manager)
    _logger.info("weightsync's middleware for adapters stands before this server")


def _is_there(target: tuple[str, ...]) -> bool:
    try:
        found: Any = importlib.import_module(target[0])
    except ImportError:
        return False
    for name in target[1:]:
        found = getattr(found, name, None)
    return callable(found)
