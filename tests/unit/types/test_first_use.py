"""Messages are decoded by many threads; the first use of a type must not be a race."""

from __future__ import annotations

import subprocess
import sys

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
