"""Reads a configuration from wherever it lies, and translates the names that other frameworks use.

Private to `weightsync.config`. It knows which keys exist (the caller tells it), not what they may hold:
the schema checks the values, under the names that the user wrote (`Adapted.origins`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from weightsync.errors import ConfigError

KeyPath = tuple[str, ...]

OWN_ROOTS = ("weight_sync", "weight_sync_controller")
FOREIGN_KEYS: dict[KeyPath, KeyPath] = {
    ("generator", "weight_sync_backend"): ("transfer", "backend"),
    ("generator", "use_cuda_ipc"): ("transfer", "use_cuda_ipc"),
    ("generator", "use_flashrl"): ("extract", "group_by_module"),
    ("generator", "pack_weights"): ("transfer", "pack_weights"),
    ("generator", "weight_transfer_threshold_cuda_ipc_GB"): ("extract", "chunk_bytes"),
    ("trainer", "placement", "colocate_all"): ("transfer", "colocated"),
    ("trainer", "training_backend"): ("transfer", "training_backend"),
    **{
        ("inference_service", key): ("inference_service", key)
        for key in ("model_tag", "model", "weight_type", "backend", "base_url")
    },
}
"""Keys of a whole framework's configuration, and the own key that each one sets."""

FOREIGN_ROOTS = tuple(dict.fromkeys(path[0] for path in FOREIGN_KEYS))
_BOTH = "inference_service"
"""Our own section where it stands bare, and a framework's tree beside the roots."""
BYTES_A_GB = 1 << 30
_TOO_MANY_BYTES = 1 << 63
_SAME_WORD = 0.85  # a key this close to one of ours, in a tree that isn't ours, is a misspelling
_MAX_SHOWN = 100
_MAX_WHY = 400
MAX_PROBLEMS = 20
_ABSENT = object()
_SECRET = re.compile(
    r"token|secret|passw|passphrase|api[_-]?key|private[_-]?key|credential|authorization", re.IGNORECASE
)
_NO_SECRET = re.compile(
    r"(max|min|num|new|total)_(\w+_)?tokens|embed_tokens?|tokeni[sz](er|e)?|tokens?_(id|per|limit)", re.IGNORECASE
)
_IN_URL = re.compile(
    r"(?<=://)(?:[^/\s'\"]*|[^\s'\"/@]*:[^\s'\"]*)(?=@)"
    r"|(?<![\w:/\\.-])[^\s'\"/\\:]+:(?!//)[^\s'\"\\]*(?=@)"  # without a scheme
    r"|(?<=[?&])[\w.-]*(?:sig|signature|token|key|credential)=[^&\s'\"]*",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value was written, for error messages: the user's own key and value."""

    name: str
    value: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: the key as the user wrote it, and the line that says so."""

    key: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    """A configuration in own names.

    Attributes:
        values: nested, not validated yet.
        origins: what the user wrote for each own key that was set.
        problems: what is wrong already.
    """

    values: dict[str, Any]
    origins: dict[KeyPath, Origin]
    problems: list[Problem]


def short(value: object) -> str:
    """`repr` of a value without the secrets in it, cut so that it fits a line."""
    try:
        text = _IN_URL.sub("...", repr(_without_secrets(value))[: 4 * _MAX_SHOWN])
    except Exception:  # a number of 5000 digits, a mapping in a mapping 3000 times over
        text = f"<{type(value).__name__} that can't be written out>"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def shown(name: str, value: object) -> str:
    """What the user wrote: a key and its value, or nothing of the value where that is a secret."""
    return f"{name} = {'...' if _is_secret(name.rpartition('.')[2]) else short(value)}"


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and _SECRET.search(_NO_SECRET.sub("", key)) is not None


def _without_secrets(value: object) -> object:
    if isinstance(value, dict):
        return {key: "..." if _is_secret(key) else _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, tuple):
        return tuple(map(_without_secrets, value))
    plain = value is None or isinstance(value, str | int | float)
    return value if plain or not _is_secret(repr(value)) else type(value)  # a DictConfig, say


def close_choices(word: str, known: Iterable[str]) -> str:
    """ " did you mean 'x' or 'y'?", or nothing where no choice is close."""
    close = difflib.get_close_matches(word[:_MAX_SHOWN], list(known), n=2, cutoff=0.6)
    return f" did you mean {' or '.join(map(repr, close))}?" if close else ""


def read(source: object) -> Mapping[Any, Any]:
    """The mapping that `source` holds: a path to YAML, a mapping or an OmegaConf object.

    Raises:
        ConfigError: it can't be read, or is no mapping.
    """
    if isinstance(source, (str, os.PathLike)):
        return _read_yaml(Path(source))
    if type(source).__module__.partition(".")[0] == "omegaconf":
        return _read_omegaconf(source)
    return _mapping(source, "the configuration")


def adapt(source: Mapping[Any, Any], *, own_keys: Mapping[str, tuple[str, ...]]) -> Adapted:
    """Brings a mapping into own names.

    Args:
        source: own keys bare, or under `weight_sync` or `weight_sync_controller`; beside these, or alone, a
            framework's `generator` and `trainer` trees with anything else in them; beside any of these its
            `inference_service`.
        own_keys: the schema's keys; each with its section's keys, or with none where it isn't a section.
    """
    merge = _Merge(own_keys)
    if not _has_roots(source):
        merge.own_tree(source, prefix=(), typed=True)
        return merge.result()
    for key, tree in source.items():
        if key in OWN_ROOTS:
            merge.own_tree(_tree(tree, str(key)), prefix=(key,), typed=key == "weight_sync_controller")
        elif key in FOREIGN_ROOTS:
            merge.foreign_tree(_tree(tree, str(key)), prefix=(key,))
        else:
            merge.beside(key, tree)
    return merge.result()


class _Merge:
    def __init__(self, own_keys: Mapping[str, tuple[str, ...]]) -> None:
        self.own_keys = own_keys
        self.flat: dict[KeyPath, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []

    def own_tree(self, tree: Mapping[Any, Any], *, prefix: KeyPath, typed: bool) -> None:
        for key, value in tree.items():
            name = dotted((*prefix, key))
            if key == "type" and typed:
                if value != "weight_sync_controller":
                    self.problem(name, value, "the one choice is 'weight_sync_controller'")
            elif key not in self.own_keys:
                self.unknown(name, key, value, self.own_keys)
            elif not self.own_keys[key] or not isinstance(value, Mapping | None):
                self.put((key,), value, Origin(name=name, value=value))
            else:
                for inner, what in (value or {}).items():
                    inner_name = dotted((name, inner))
                    if inner in self.own_keys[key]:
                        self.put((key, inner), what, Origin(name=inner_name, value=what))
                    else:
                        self.unknown(inner_name, inner, what, self.own_keys[key])

    def foreign_tree(self, tree: Mapping[Any, Any], *, prefix: KeyPath) -> None:
        known = {path[len(prefix)]: path for path in FOREIGN_KEYS if path[: len(prefix)] == prefix}
        for key, value in tree.items():
            path = known.get(key)
            if path is None:
                if isinstance(key, str) and difflib.get_close_matches(key, known, n=1, cutoff=_SAME_WORD):
                    self.unknown(dotted((*prefix, key)), key, value, known)
            elif len(path) > len(prefix) + 1:
                self.foreign_tree(_tree(value, dotted((*prefix, key))), prefix=(*prefix, key))
            elif value is not None:
                self.put(FOREIGN_KEYS[path], self.translated(path, value), Origin(name=dotted(path), value=value))

    def translated(self, path: KeyPath, value: Any) -> Any:
        if path[-1] == "weight_transfer_threshold_cuda_ipc_GB":
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 1 <= value * BYTES_A_GB < _TOO_MANY_BYTES:  # NaN fails too
                self.problem(dotted(path), value, f"must be a finite number of GB ({BYTES_A_GB} bytes) above 0")
                return _ABSENT
            return int(value * BYTES_A_GB)
        if path[-1] == "use_flashrl" and value is False:  # a framework has it in each of its configurations
            return _ABSENT
        return "fsdp" if path[-1] == "training_backend" and value == "fsdp2" else value

    def beside(self, key: object, value: object) -> None:
        """A key beside the roots: another part's, unless it looks like ours."""
        roots = (*OWN_ROOTS, *FOREIGN_ROOTS)
        if key in self.own_keys:
            self.problem(str(key), value, f"stands beside {_either(roots)}: put it under 'weight_sync'")
        elif isinstance(key, str) and difflib.get_close_matches(key, roots, n=1, cutoff=_SAME_WORD):
            self.unknown(key, key, value, roots)

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        if value is _ABSENT:
            return
        before = self.origins.get(path)
        if before is None:
            self.flat[path], self.origins[path] = value, origin
        elif type(self.flat[path]) is not type(value) or self.flat[path] != value:
            why = f"{shown(before.name, before.value)} says otherwise for the same setting: keep one of them"
            self.problem(origin.name, origin.value, why)

    def problem(self, name: str, value: object, why: str) -> None:
        self.problems.append(Problem(key=name, text=f"{shown(name, value)}: {why}"))

    def unknown(self, name: str, key: object, value: object, known: Iterable[str]) -> None:
        known = tuple(known)
        hint = close_choices(key if isinstance(key, str) else short(key), known)
        foreign = [dotted(path) for path in FOREIGN_KEYS if path[-1] == key and dotted(path) != name]
        if foreign and not hint:
            hint = f" did you mean {foreign[0]!r}?"
        if _is_secret(key):
            hint += " a token is given by token= or the variable WEIGHTSYNC_TOKEN, and stands in no file;"
        self.problem(name, value, f"is not a key;{hint} keys here are {', '.join(known)}")

    def result(self) -> Adapted:
        values: dict[str, Any] = {}
        for path, value in sorted(self.flat.items(), key=lambda item: -len(item[0])):
            if len(path) == 1:
                values[path[0]] = value
            else:
                values.setdefault(path[0], {})[path[1]] = value
        return Adapted(values=values, origins=self.origins, problems=self.problems)


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"the configuration {short(str(path))} can't be read: {error.strerror}") from error
    except Exception as error:  # YAMLError, and what Python says of a day 45, of 5000 brackets, of a path with a NUL
        why = f"{type(error).__name__}: {error}" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"the configuration {short(str(path))} is not YAML: {why[:_MAX_WHY]}") from error
    return _mapping({} if content is None else content, f"the configuration {short(str(path))}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win; that is a lost setting."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key is text", key_node.start_mark)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {short(key)} comes twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_omegaconf(source: Any) -> Mapping[Any, Any]:
    """Resolves interpolations, but only in what is ours: the rest of a framework's tree may not resolve yet."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.is_dict(source):
        raise ConfigError(f"the configuration is no mapping but a {type(source).__name__}; hand in a DictConfig")
    try:
        if not _has_roots(source):
            return _mapping(OmegaConf.to_container(source, resolve=True, throw_on_missing=True), "the configuration")
        plain: dict[Any, Any] = {}
        for key in source:
            if key in FOREIGN_ROOTS:
                plain[key] = _foreign_omegaconf(source[key], (key,))
            elif key in OWN_ROOTS and OmegaConf.is_config(source[key]):
                plain[key] = OmegaConf.to_container(source[key], resolve=True, throw_on_missing=True)
            else:
                plain[key] = source[key] if key in OWN_ROOTS else "..."
    except OmegaConfBaseException as error:
        raise ConfigError(f"the OmegaConf configuration does not resolve: {error}") from error
    return plain


def _foreign_omegaconf(node: Any, prefix: KeyPath) -> Any:
    if not isinstance(node, Mapping) and not hasattr(node, "keys"):
        return node
    known = {path[len(prefix)]: path for path in FOREIGN_KEYS if path[: len(prefix)] == prefix}
    plain: dict[Any, Any] = {}
    for key in node:
        if key not in known:
            plain[key] = "..."
        elif len(known[key]) == len(prefix) + 1:
            plain[key] = node[key]
        else:
            plain[key] = _foreign_omegaconf(node[key], (*prefix, key))
    return plain


def _has_roots(source: Any) -> bool:
    """Whether our keys are under names of trees; else they are bare."""
    return any(root in source for root in (*OWN_ROOTS, *FOREIGN_ROOTS) if root != _BOTH)


def _tree(value: object, name: str) -> Mapping[Any, Any]:
    return {} if value is None else _mapping(value, name)


def _mapping(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is no mapping of keys to values but {short(value)}")
    return value


def dotted(path: Iterable[object]) -> str:
    """A key in words: one that is text as it stands, where it can be shown."""
    return ".".join(
        each if isinstance(each, str) and len(each) <= _MAX_SHOWN and each.isprintable() else short(each)
        for each in path
    )


def _either(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))
