"""What is wrong with a configuration, in words: the key and value as the user wrote them, and what may stand there."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from weightsync._config_foreign import (
    FOREIGN_KEYS,
    FOREIGN_ROOTS,
    MAX_PROBLEMS,
    KeyPath,
    Origin,
    Problem,
    close_choices,
    dotted,
    short,
    shown,
)
from weightsync.errors import ConfigError
from weightsync.types.deadline import MAX_WAIT_S

_MUST = {
    "advertise": "a host name, or in `serve` an http:// or https:// URL",
    "anchor_every": "a whole number of versions, 1 to 256",
    "base_url": "an http:// or https:// URL",
    "chunk_bytes": "a whole number of bytes above 0",
    "controller": "an http:// or https:// URL",
    "commit_policy": "'each', 'all' or 'quorum(n)' with n from 1 on",
    "engines": "URLs of engines; in `serve` a mapping from each model to such a list",
    "guard_s": "a finite number of seconds, 0 or more",
    "last_wait_s": "a finite number of seconds, 0 or more",
    "lease_s": "from 0.1 to 3600 seconds",
    "models": "a list of names",
    "port": "a port from 0 to 65535",
    "retries_s": "a list of seconds, 0 or more",
    "run_id": "a name of at most 256 printable characters",
    "sets": "a list of lists of names",
    "sources": "a list of http:// or https:// URLs, or places in stores as s3://bucket/run",
    "staleness_threshold": "a whole number of versions, 1 or more",
    "store": "a place in an object store: s3://, gs://, az:// or file:///, and a path",
    "to": "a list of http:// or https:// URLs",
    "upload_bytes_s": "a finite number of bytes a second, above 0",
    "validate_freq": "a whole number of training steps, 0 (no validation) or more",
}


class ContradictionError(ValueError):
    """Settings that are right one by one and can't hold together; read by `problems_of` alone.

    Attributes:
        found: for each contradiction the keys (relative to the section), their values, and what to do.
    """

    def __init__(self, found: list[tuple[tuple[str, ...], tuple[object, ...], str]]) -> None:
        super().__init__("contradiction")
        self.found = found


def choices_of(annotation: object) -> list[str]:
    """The literal values that a field of this type may have; "null" last where None is one of them."""
    if annotation is types.NoneType:
        return ["null"]
    if get_origin(annotation) is Literal:
        return [repr(value) for value in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in choices_of(argument)]


def must_be(key: str, annotation: object) -> str:
    """What a key may hold where it isn't a choice, in words and units."""
    if key in _MUST:
        text = _MUST[key]
    elif bool in (annotation, *get_args(annotation)):
        text = "true or false"
    elif annotation is float or any(get_args(each)[:1] == (float,) for each in get_args(annotation)):  # with its bounds
        text = "a finite number of seconds above 0"
    elif get_origin(annotation) is Mapping or _is_section(annotation):
        text = "a mapping of keys to values"
    else:
        text = "text that is not empty"
    return f"{text}, or null" if types.NoneType in get_args(annotation) else text


def config_error(problems: Sequence[Problem]) -> ConfigError:
    head = "the configuration is wrong" if len(problems) == 1 else f"the configuration has {len(problems)} problems"
    lines = [problem.text for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    text = f"{head}: {lines[0]}" if len(lines) == 1 else "\n  - ".join([f"{head}:", *lines])
    return ConfigError(text, keys=[problem.key for problem in problems])


def problem_of(keys: tuple[str, ...], values: tuple[object, ...], why: str) -> Problem:
    """A contradiction of settings that were loaded before, in our own names."""
    text = " with ".join(map(shown, keys, values))
    theirs = [".".join(path) for path, ours in FOREIGN_KEYS.items() if ".".join(ours) == keys[0] and path != ours]
    also = f" (it may stand there as {theirs[0]})" if theirs else ""
    return Problem(key=keys[0], text=f"{text}: {why}{also}")


def problems_of(error: ValidationError, root: type[BaseModel], origins: Mapping[KeyPath, Origin]) -> list[Problem]:
    """What pydantic found, in the names and values that the user wrote."""
    problems: dict[tuple[str, ...], Problem] = {}
    for item in error.errors(include_url=False):
        path = tuple(map(str, item["loc"]))
        raised = item.get("ctx", {}).get("error")
        if isinstance(raised, ContradictionError):
            for keys, values, why in raised.found:
                paths = [(*path, *key.split(".")) for key in keys]
                written = [_origin(each, value, origins) for each, value in zip(paths, values, strict=True)]
                text = " with ".join(shown(each.name, each.value) for each in written)
                whose = written[0].name.partition(".")[0]
                alone = f"; or load the framework's weight_sync tree alone, without {whose}"
                also = alone if whose in FOREIGN_ROOTS and whose != paths[0][0] else ""
                problems[(*path, *keys)] = Problem(key=written[0].name, text=f"{text}: {why}{also}")
        else:
            written_here = _origin(path, item["input"], origins)
            text = f"{shown(written_here.name, written_here.value)}: {_why(item, root, path)}"
            problems[path] = Problem(key=written_here.name, text=text)
    return list(problems.values())


def _origin(path: KeyPath, value: object, origins: Mapping[KeyPath, Origin]) -> Origin:
    found = origins.get(path)
    if found is None and path[:2] in origins:  # inside dtype_overrides
        return Origin(name=f"{origins[path[:2]].name}[{path[2]!r}]", value=value)
    return found or Origin(name=dotted(path), value=value)


def _why(item: ErrorDetails, root: type[BaseModel], path: KeyPath) -> str:
    section, key = root, path[0]
    if len(path) > 1 and path[0] in root.model_fields and _is_section(root.model_fields[path[0]].annotation):
        section, key = cast(type[BaseModel], root.model_fields[path[0]].annotation), path[1]
    fields = section.model_fields
    if key not in fields:
        return f"is not a key;{close_choices(key, fields)} keys here are {', '.join(fields)}"
    if item["type"] == "literal_error":
        choices = choices_of(fields[key].annotation)
        hint = close_choices(
            given if isinstance(given := item["input"], str) else short(given),
            [choice.strip("'") for choice in choices],
        )
        return f"is not a choice;{hint} choices are {', '.join(choices)}"
    if item["type"] == "less_than_equal" and item["ctx"]["le"] == MAX_WAIT_S:
        return f"must be at most {MAX_WAIT_S:.0f} seconds, a week"
    return f"must be {must_be(key, fields[key].annotation)}"


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
