"""The tables of the documentation that the code writes: keys, arguments, strategies, and what was measured."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import releases
import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import documents
import weightsync
from weightsync import _config_foreign as foreign
from weightsync import _config_problems as problems
from weightsync import _config_reads as reads
from weightsync import config as schema
from weightsync.cli import app
from weightsync.errors import ConfigError

_BENCH = Path(__file__).resolve().parents[1] / "bench"
_QUOTE = "'"
_MACHINES = {
    "AMD 25/17": ("2026-11-27-amd-evening.json",),
    "Intel 6/207": ("2026-11-25-intel.json", "2026-11-26-intel-again.json"),
    "Intel 6/167": ("2026-11-22-intel.json", "2026-11-22-intel-again.json"),
}
"""What was measured where, below bench/results, on 2 virtual cores; a later file's rows replace an earlier one's."""


def keys_table(prefix: str, section: type[BaseModel]) -> str:
    """The keys of a section with values, defaults and meanings."""
    rows = []
    for key, field in section.model_fields.items():
        if key in schema.SECTIONS:
            continue
        choices = ", ".join(f"`{choice.strip(_QUOTE)}`" for choice in problems.choices_of(field.annotation))
        words = problems.must_be(key, field.annotation)
        values = f"globs, each with one of {choices}" if key == "dtype_overrides" else choices
        shown = values if _is_choice(field) else words
        rows.append((f"`{prefix}{key}`", shown, _default(field), _read_with(f"{prefix}{key}"), str(field.description)))
    return _markdown(("key", "values", "default", "read with", "meaning"), rows)


def _read_with(key: str) -> str:
    """The methods with which a key is read; with the others it is refused."""
    methods = reads.read_with(key)
    return "all" if methods == reads.METHODS else ", ".join(f"`{method}`" for method in methods)


def strategy_table() -> str:
    """What `select_strategy` answers for every combination."""
    rows = []
    for backend, colocated, use_cuda_ipc in itertools.product(
        ("gloo", "nccl", "cuda_ipc"), (False, True), (None, True, False)
    ):
        common = {"backend": backend, "colocated": colocated, "use_cuda_ipc": use_cuda_ipc}
        answers = [
            _answer(common),
            _both(_answer({**common, "pack_weights": True}), _answer({**common, "training_backend": "megatron"})),
            *(_answer({**common, "strategy": name}) for name in ("broadcast", "cuda_ipc", "packed_cuda_ipc")),
        ]
        asked = "null" if use_cuda_ipc is None else _yes(use_cuda_ipc)
        rows.append((f"`{backend}`", _yes(colocated), asked, *answers))
    named = (f"named `{name}`" for name in ("broadcast", "cuda_ipc", "packed_cuda_ipc"))
    packed = "nothing named, `pack_weights` or `megatron`"
    return _markdown(("backend", "colocated", "use_cuda_ipc", "nothing named", packed, *named), rows)


_CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"transfer": {"strategy": "broadcast", "backend": "cuda_ipc"}},
    {"transfer": {"strategy": "broadcast", "use_cuda_ipc": True}},
    {"transfer": {"strategy": "broadcast", "backend": "nccl", "colocated": True}},
    {"transfer": {"strategy": "cuda_ipc", "use_cuda_ipc": False}},
    {"transfer": {"backend": "cuda_ipc", "use_cuda_ipc": False}},
    {"transfer": {"backend": "nccl", "colocated": True, "use_cuda_ipc": False}},
    {"transfer": {"strategy": "cuda_ipc", "pack_weights": True}},
    {"transfer": {"strategy": "packed_cuda_ipc", "pack_weights": False}},
    {"transfer": {"strategy": "cuda_ipc", "master_addr": "10.0.0.5"}},
    {"transfer": {"delta": True, "colocated": True}},
    {"extract": {"group_by_module": True}, "transfer": {"training_backend": "megatron"}},
    {"sync_method": "disk"},
    {"sync_method": "tinker", "inference_service": {"backend": "vllm"}},
    {"sync_method": "disk", "sync_weight_path": "/weights", "inference_service": {"backend": "embedded"}},
    {"fleet": {"models": ["actor"]}, "inference_service": {"model_tag": "critic"}},
    {"staleness_threshold": 3},
    {"sync_method": "pull", "fleet": {"straggler_s": 5.0}},
    {"sync_method": "pull", "fleet": {"barrier_timeout_s": 60.0}},
    {"sync_method": "pull", "transfer": {"backend": "nccl"}},
    {"sync_method": "disk", "sync_weight_path": "/weights", "generator": {"use_cuda_ipc": True}},
)


def contradictions_table() -> str:
    """What is refused, in the words of the errors themselves."""
    rows = []
    for tree in _CONTRADICTIONS:
        theirs = {key: tree[key] for key in foreign.FOREIGN_ROOTS if key in tree and key not in schema.SECTIONS}
        own = {key: value for key, value in tree.items() if key not in theirs}
        try:
            schema.WeightSyncConfig.load({"weight_sync": own, **theirs} if theirs else own)
        except ConfigError as error:
            combination, _, why = error.message.partition(": ")[2].partition(": ")
            rows.append((" with ".join(f"`{each}`" for each in combination.split(" with ")), why))
        else:
            raise AssertionError(f"{tree} is not refused")
    return _markdown(("refused", "in these words"), rows)


def foreign_table() -> str:
    """The names of other frameworks and what they set."""
    notes = {
        "use_flashrl": "true groups by module; false says nothing",
        "weight_transfer_threshold_cuda_ipc_GB": f"a GB is {foreign.BYTES_A_GB} bytes",
        "training_backend": "`fsdp2` is taken for `fsdp`",
    }
    rows = [
        (f"`{'.'.join(theirs)}`", f"`{'.'.join(ours)}`", notes.get(theirs[-1], ""))
        for theirs, ours in foreign.FOREIGN_KEYS.items()
    ]
    return _markdown(("their key", "our key", "note"), rows)


def arguments_table(called: Callable[..., Any]) -> str:
    """The arguments of a function or a class with their defaults, in the words of its docstring."""
    meant = _meanings(inspect.getdoc(called) or "")
    rows = []
    for name, parameter in inspect.signature(called).parameters.items():
        if name in ("self", "cls") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = parameter.default
        if default is not parameter.empty and (callable(default) or repr(default).startswith("<")):
            shown = "see there"
        else:
            shown = "" if default is parameter.empty else f"`{default!r}`"
        rows.append((f"`{name}`", shown, meant.get(name, "").replace("|", "\\|")))
    return _markdown(("argument", "default", "meaning"), rows)


def commands_table() -> str:
    """What each command does, in one sentence."""
    rows = [(f"`weightsync {name}`", each.get_short_help_str(500)) for name, each in _commands().items()]
    return _markdown(("command", "it"), rows)


def command_options_table() -> str:
    """The arguments and options of each command, in the words of its `--help`."""
    rows = []
    for command, each in _commands().items():
        for option in each.params:
            name = (
                (option.metavar or option.name.upper())
                if option.param_type_name == "argument"
                else " / ".join([*option.opts, *option.secondary_opts])
            )
            default = "" if option.default is None or callable(option.default) else f"`{option.default}`"
            variable = f" Variable: `{option.envvar}`." if option.envvar else ""
            rows.append((f"`{command}`", f"`{name}`", default, f"{option.help}{variable}".replace("|", "\\|")))
    return _markdown(("command", "option", "default", "meaning"), rows)


def _commands() -> Mapping[str, Any]:
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return commands


def _meanings(docstring: str) -> dict[str, str]:
    """What a Google docstring says of each argument; `a, b: text` counts for both."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    found: dict[str, str] = {}
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    for names, text in entries:
        for name in names.split(","):
            found[name.strip()] = re.sub(r"\s+", " ", text).strip()
    return found


def measured_table() -> str:
    """Rows of the speed table that were measured on all machines; those over the target are bold."""
    figures = [_figures(files) for files in _MACHINES.values()]
    rows = []
    for row, (sentence, target) in _bench_rows().items():
        if all(row in ratios for ratios in figures):
            cells = [_cell(ratios[row], target) for ratios in figures]
            rows.append((f"`{row}`: {sentence}", *cells, f"{target:g}"))
    return _markdown(("row", *_MACHINES, "at most"), rows)


def _bench_rows() -> dict[str, tuple[str, float]]:
    """Sentence and target of each row, read from bench/*.py without running them."""
    rows: dict[str, tuple[str, float]] = {}
    for file in sorted(_BENCH.glob("*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        named = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
        if "ROWS" in named:
            sentences = ast.literal_eval(named["ROWS"])
            of_all = ast.literal_eval(named["_TARGET"]) if "_TARGET" in named else None
            targets = ast.literal_eval(named["_TARGETS"]) if of_all is None else dict.fromkeys(sentences, of_all)
            rows |= {row: (sentence, targets[row]) for row, sentence in sentences.items()}
    return rows


def _figures(files: Sequence[str]) -> dict[str, float]:
    """The ratio of each row."""
    read = [json.loads((_BENCH / "results" / file).read_text(encoding="utf-8")) for file in files]
    return {each["row"]: each["ratio"] for each in itertools.chain(*read)}


def _cell(ratio: float, target: float) -> str:
    return f"**{ratio:.2f}**" if ratio > target else f"{ratio:.2f}"


def before_after_table() -> str:
    """What a sync costs in a framework by its own means and by ours."""
    told = json.loads((Path(__file__).parent / "before-after.json").read_text(encoding="utf-8"))
    rows = []
    for framework, ways in told["frameworks"].items():
        for way, found in ways.items():
            sent = f"{found['bytes'] / 1e6:.1f} MB" if found["bytes"] else "none: mapped"
            still = f"{found['stood_still_s'] * 1e3:.0f} ms"
            tokens = f"{found['tokens_per_s']:.0f}" if "tokens_per_s" in found else ""
            load = f"{found['load_before']:.0f}"
            rows.append((_WAYS[framework, way], f"{found['sync_s']:.2f} s", still, sent, tokens, load))
    return _markdown(("way", "sync", "engine stood still", "sent", "tokens a second", "load before"), rows)


_WAYS = {
    ("trl", "checkpoint"): "TRL: safetensors, and vLLM's own `reload_weights`",
    ("trl", "push"): "TRL, weightsync pushes",
    ("trl", "publish"): "TRL, weightsync publishes, in full",
    ("trl", "deltas"): "TRL, weightsync publishes, by deltas",
    ("verl", "nixl"): "verl: its NIXL engine, in host memory",
    ("verl", "mapped"): "verl, weightsync, on the trainer's host",
    ("verl", "deltas"): "verl, weightsync, by deltas",
}


TABLES: dict[str, Callable[[], str]] = {
    **{f"releases-{kind}": functools.partial(releases.table, kind) for kind in releases.NAMES},
    "before-after": before_after_table,
    "controller-keys": lambda: keys_table("", schema.WeightSyncConfig),
    "transfer-keys": lambda: keys_table("transfer.", schema.TransferConfig),
    "extract-keys": lambda: keys_table("extract.", schema.ExtractConfig),
    "fleet-keys": lambda: keys_table("fleet.", schema.FleetConfig),
    "publish-keys": lambda: keys_table("publish.", schema.PublishConfig),
    "push-keys": lambda: keys_table("push.", schema.PushConfig),
    "serve-keys": lambda: keys_table("serve.", schema.ServeConfig),
    "inference-service-keys": lambda: keys_table("inference_service.", schema.InferenceServiceConfig),
    "foreign-keys": foreign_table,
    "strategies": strategy_table,
    "contradictions": contradictions_table,
    "publish-arguments": lambda: arguments_table(weightsync.publish),
    "push-arguments": lambda: arguments_table(weightsync.push),
    "serve-arguments": lambda: arguments_table(weightsync.serve),
    "weight-manager-arguments": lambda: arguments_table(weightsync.WeightManager),
    "push-sync-arguments": lambda: arguments_table(weightsync.PushSync),
    "rollout-config-arguments": lambda: arguments_table(weightsync.RolloutConfig),
    "commands": commands_table,
    "command-options": command_options_table,
    "measured": measured_table,
    "documents": documents.tables,
}


def _is_choice(field: FieldInfo) -> bool:
    return bool(set(problems.choices_of(field.annotation)) - {"null"})


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default == {}:
        return "empty"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{yaml.safe_dump(default).splitlines()[0]}`"


def _answer(transfer: dict[str, object]) -> str:
    try:
        return f"`{schema.select_strategy(schema.WeightSyncConfig.load({'transfer': transfer}))}`"
    except ConfigError:
        return "refused"


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
