"""Messages are decoded by many threads; the first use of a type must not be a race."""

from __future__ import annotations

import ast
import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect

import weightsync
from tests.standins.frameworks import provide_nemo_rl

CODE = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from weightsync.types import UpdateRequest
tensor = {"names": ["a"], "dtypes": ["int8"], "shapes": [[1]], "offsets": [0], "bucket_bytes": 1}
body = {"update": {"kind": "broadcast", "session": "s", "seq": 0, **tensor}}
barrier = threading.Barrier(8)
def use():
    barrier.wait()
    msgspec.convert(body, UpdateRequest)
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_the_first_use_in_many_threads_at_once() -> None:
    """Seen to fail (exit code -11): without the decoders that `types/engine.py` makes when it is imported."""
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", CODE], check=False, timeout=60).returncode == 0


WRITTEN_ONLY = {
    "weightsync.adapters.compat.messages",  # names for a message's parts
    "weightsync.codec.model_digest.ShardSum",
    "weightsync.control.methods.network.UpdateWeights",
    "weightsync.control.web.headline.Fact",
    "weightsync.control.web.history.VersionPoint",
    "weightsync.control.web.page.Overview",
    "weightsync.clients.agent.PublishedNow",
    "weightsync.agent.api._Served",
    "weightsync.agent.proved.Proved",
    "weightsync.agent.proved.StoredDelta",
    "weightsync.engine.vllm.spans.Answer",
    "weightsync.engine.vllm.spans.Edge",
    "weightsync.handles.sglang_messages",  # orders to SGLang
    "weightsync.types.spec.HeldTensor",
}
"""What no process reads: it is sent to others, or stays in this process."""


def is_written_only(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__name__}" in WRITTEN_ONLY or kind.__module__ in WRITTEN_ONLY


def parts_of(kind: object) -> Iterator[type]:
    """The structs of which a type is made, itself among them."""
    seen = set[type]()

    def walk(value: Any) -> None:
        if isinstance(value, msgspec.inspect.StructType):
            if value.cls in seen:
                return
            seen.add(value.cls)
        if isinstance(value, tuple | list):
            for each in value:
                walk(each)
        elif isinstance(value, msgspec.inspect.Type | msgspec.inspect.Field):
            for name in value.__struct_fields__:
                walk(getattr(value, name))

    walk(msgspec.inspect.type_info(kind))
    yield from seen


def test_every_type_that_is_read_was_learnt_before() -> None:
    """A message is a part of something that was given to `learn`, or nobody decodes it. Seen red: the orders to push, a
    stored record's signature, and the spans of an answer were learnt by whoever came first."""
    provide_nemo_rl()  # where it is not there: a stand-in
    learnt, known = set[type](), set[type]()
    house = Path(weightsync.__file__).parent
    for file in house.rglob("*.py"):
        tree = ast.parse(text := file.read_text(encoding="utf-8"))
        if "(Message" not in text and "(msgspec.Struct" not in text:
            continue
        names = ("weightsync", *file.relative_to(house).with_suffix("").parts)
        with contextlib.suppress(ModuleNotFoundError):  # verl and SkyRL are not here
            module = importlib.import_module(".".join(names))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and issubclass(made := getattr(module, node.name), msgspec.Struct):
                    known.add(made)
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "learn":
                    kinds = eval(f"[{', '.join(map(ast.unparse, call.args))}]", vars(module))
                    learnt.update(part for kind in kinds for part in parts_of(kind))
    read = {kind for kind in known if not is_written_only(kind)}
    leaves = {kind for kind in read if not read & {*kind.__subclasses__()}}
    assert len(learnt) > 100
    assert not leaves - learnt
