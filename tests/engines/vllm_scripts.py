"""What tests run in an interpreter of its own; `vllm_support.run_script` starts it and reads the last line."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.engines.vllm_support import RESULT, llm_logprobs, llm_next_token, llm_options


def oracle(checkpoints: list[str], prompts: list[list[int]], long_prompt: list[int]) -> list[dict[str, Any]]:
    """What fresh engines say, one after the other."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # starts in a quarter of the time
    from vllm import LLM

    told = []
    for checkpoint in checkpoints:
        llm = LLM(**llm_options(checkpoint))
        told.append({"prompts": llm_logprobs(llm, prompts), "next": llm_next_token(llm, long_prompt)})
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return told


SCRIPTS: dict[str, Callable[..., Any]] = {"oracle": oracle}


def main() -> None:
    """Runs one script and leaves at once: engines that are torn down at exit can hang."""
    result = SCRIPTS[sys.argv[1]](*json.loads(sys.argv[2]))
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
