"""A trainer and a receiver over TCP, in a process of their own: which of their shared memory lies on huge pages.

Prints JSON: bytes on huge pages of a plain mapping that asks for them (without the library: what the kernel grants), of
the trainer's segments and of the receiver's staging, and the size of each.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
from pathlib import Path

import torch

from weightsync.host.puller import Puller
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

SIZE_BYTES = 16 << 20
WAIT_S = 60.0


def huge_bytes_of(name: str, pid: int) -> int:
    """Of a process's mappings of files that are called so: what lies on huge pages, as the kernel counts it."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    ours = "".join(part for part in parts if name in part.partition("\n")[0])
    return 1024 * sum(map(int, re.findall(r"^(?:Shmem|File)PmdMapped: +(\d+) kB", ours, re.MULTILINE)))


def granted() -> int:
    """What this kernel gives who asks."""
    fd = os.open("/dev/shm/granted", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, SIZE_BYTES)
    with mmap.mmap(fd, SIZE_BYTES) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, SIZE_BYTES, mmap.PAGESIZE):
            mapped[start] = 1
        found = huge_bytes_of("/dev/shm/granted", os.getpid())
    os.close(fd)
    os.unlink("/dev/shm/granted")
    return found


def main() -> None:
    said = {"size": SIZE_BYTES, "granted": granted()}
    weights = {"w": torch.randn(SIZE_BYTES // 4)}
    with WeightManager("m") as manager:
        for version in (1, 2):
            manager.offload(weights.items(), version)
            manager.wait_published(version, timeout_s=WAIT_S)
        trainers = [name for name in os.listdir("/dev/shm") if name.startswith(f"weightsync-{os.getpid()}-")]
        said["trainer"] = sum(huge_bytes_of(name, os.getpid()) for name in trainers)
        puller = Puller(manager.endpoint, "m", mode="full", receiver_id="r", transport=Transport.TCP)
        with puller.pull(deadline=Deadline(WAIT_S)) as pulled:
            assert pulled.segment not in trainers
            said["staging"] = huge_bytes_of(pulled.segment, os.getpid())
        puller.close()
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
