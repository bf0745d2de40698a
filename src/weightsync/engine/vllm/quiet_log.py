"""Keeps out of vLLM's log what is no failure: a state that a worker has told.

vLLM's routes give nothing of a worker back but its error, so a worker whose state is asked for raises it
(`handles.vllm_messages.other_state`). vLLM logs every error of a call with its traceback, in worker, core and
server: some fifty lines for each look at a healthy engine.
"""

from __future__ import annotations

import logging

from weightsync.errors import StateError
from weightsync.handles.vllm_messages import error_in_text

_LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core", "uvicorn.error")


class _ToldState(logging.Filter):
    """Lets through what is no told state. Real errors of ours, and those of others, are logged as ever."""

    def filter(self, record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        error = None if raised is None else error_in_text(str(raised))
        return not (isinstance(error, StateError) and error.details.get("answers") == "expect")


def keep_told_states_out() -> None:
    """Puts the filter before the loggers that would say it, once in a process."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _ToldState) for each in logger.filters):
            logger.addFilter(_ToldState())
