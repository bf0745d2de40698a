"""Several hosts on one machine, for tests: each has a network, a shared memory and a host name of its own.

A host is a set of Linux namespaces (network, mounts, host name), joined to the others by a switch in a namespace of its
own. Links have a bandwidth in each direction, go down and come up; any sets of hosts can be parted. Nothing of the
machine's own network is changed, and benches do not see each other: all have the same addresses, 10.78.0.0/24. Only
processes hold the namespaces, so nothing is left when these are gone: `Hosts.close` ends them, and where the owner is
killed its reaper does, or whoever makes a bench next. What hosts share: the files, except `/dev/shm` and the tables of
names in `/etc`, and the process ids. No name server answers: a name that is not in `/etc/hosts` is unknown at once.

Needs root on Linux and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from weightsync.errors import InvalidRequestError, StateError, UnsupportedError
from weightsync.testing import host_reaper as reaper
from weightsync.testing import namespaces
from weightsync.testing.namespaces import Place, why_not
from weightsync.types.closing import Closing
from weightsync.types.deadline import Deadline

__all__ = ["Host", "Hosts", "Place", "Traffic", "why_not"]

NETWORK = "10.78.0"
"""The first three parts of every host's address; the switch is .254."""
MOST_HOSTS = 250
_SWITCH = f"{NETWORK}.254"
_SETUP_S = 30.0
_OWN_NAME = {"address": "{address} {name}", "loopback": "127.0.1.1 {name}", "nothing": ""}
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes over a host's link since it was made, with headers and what was sent twice; loopback is no part of it."""

    received_bytes: int
    sent_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """What came and went between the two."""
        return Traffic(self.received_bytes - before.received_bytes, self.sent_bytes - before.sent_bytes)


class Host:
    """One host of a bench. Made by `Hosts`.

    Attributes:
        name: its host name; all hosts of the bench resolve it.
        address: its IPv4 address.
        place: for processes that go there by themselves.
    """

    def __init__(self, bench: Hosts, number: int, name: str, keeper: subprocess.Popen[bytes]) -> None:
        self._bench = bench
        self._link = f"s{number}"
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.place = Place(keeper.pid)
        self._keeper = keeper
        self._network = reaper.network_of(keeper.pid)

    def __repr__(self) -> str:
        return f"Host({self.name} {self.address})"

    def popen(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in this host, with its options but `preexec_fn`: `pid` is the command's own."""
        folder = options.pop("cwd", None) or Path.cwd()
        inside = ["nsenter", "--target", str(self.place.pid), "--net", "--mount", "--uts", "--"]
        return subprocess.Popen([*inside, "env", "-C", os.fspath(folder), *command], **options)

    def run(
        self, command: Sequence[str | os.PathLike[str]], *, timeout_s: float = 60.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` in this host; its output is text.

        Raises:
            subprocess.CalledProcessError: it failed, and `check` is given.
            subprocess.TimeoutExpired: it took longer; it is killed.
        """
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        with self.popen(command, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, done.args, out, err)
        return done

    def call(self, function: Callable[..., _T], *args: Any, timeout_s: float = 60.0, **options: Any) -> _T:
        """Calls `function` in a thread of this process that is in this host's network, and in that alone: sockets that
        it opens are the host's. For an HTTP request; what starts threads or processes of its own belongs in `popen`.

        Raises:
            TimeoutError: it took longer. The thread goes on.
        """
        kept: list[_T] = []
        failed: list[BaseException] = []

        def job() -> None:
            try:
                namespaces.enter(self.place.pid, ["net"])
                kept.append(function(*args, **options))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=job, name=f"in-{self.name}", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if failed:
            raise failed[0]
        if not kept:
            raise TimeoutError(f"a call in {self.name} did not end within {timeout_s:g} s")
        return kept[0]

    def traffic(self) -> Traffic:
        """Bytes over this host's link so far."""
        lines = Path(f"/proc/{self.place.pid}/net/dev").read_text(encoding="ascii").splitlines()
        counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return Traffic(received_bytes=int(counts[0]), sent_bytes=int(counts[8]))

    def limit(self, mbit: float | None) -> None:
        """Gives the link this bandwidth, in Mbit/s and in each direction; None takes the limit away."""
        for pid, device in ((self.place.pid, "eth0"), (self._bench.switch_pid, self._link)):
            namespaces.limit(pid, device, mbit)

    def link_down(self) -> None:
        """Cuts the link at the switch: this host's device has no carrier, and the others hear nothing of it."""
        self._bench.in_switch(f"link set {self._link} down")

    def link_up(self) -> None:
        """Mends the link. Idempotent."""
        self._bench.in_switch(*_raised(self._link, self.address))

    def pids(self) -> list[int]:
        """The processes that are in this host now."""
        return [pid for pid in reaper.pids_in({self._network}) if pid != self._keeper.pid]

    def kill(self) -> None:
        """Kills every process in this host at once, as a power cut does; the host is there for others.

        Raises:
            StateError: some do not end.
        """
        deadline = Deadline(_SETUP_S)
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if deadline.expired:
                raise StateError(f"processes {pids} of host {self.name} do not end")
            threading.Event().wait(0.002)


class Hosts(Closing):
    """A bench of hosts. Use it as a context, which ends every process in them.

    Args:
        names: of the hosts, or how many: host-1, host-2 …
        mbit: bandwidth of each link, in each direction; None for what the machine gives.
        resolves: what a host's own name resolves to in it: "address", "loopback" (127.0.1.1, as Debian installs it), or
            "nothing". The other hosts' names resolve to their addresses.
        private: folders that each host has for itself, empty at first.

    Raises:
        UnsupportedError: not on this machine, see `why_not`. Nothing was made.
        InvalidRequestError: too many hosts, or two of one name. Nothing was made.
    """

    def __init__(
        self,
        names: int | Iterable[str],
        *,
        mbit: float | None = None,
        resolves: str = "address",
        private: Sequence[str] = ("/dev/shm",),
    ) -> None:
        names = [f"host-{number}" for number in range(1, names + 1)] if isinstance(names, int) else list(names)
        if len(names) > MOST_HOSTS or len(set(names)) < len(names) or resolves not in _OWN_NAME:
            raise InvalidRequestError(
                f"a bench has up to {MOST_HOSTS} hosts of different names, and `resolves` is one of {[*_OWN_NAME]}",
                state_left="nothing was made",
            )
        if reason := why_not():
            raise UnsupportedError(reason, state_left="nothing was made")
        reaper.sweep()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._members: list[Host] = []
            self._keepers: list[subprocess.Popen[bytes]] = []
            self._parted: set[tuple[str, str]] = set()
            self._reaper: subprocess.Popen[bytes] | None = reaper.start()
            switch = self._keeper("--net")
            self.switch_pid = switch.pid
            table = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
            for number, name in enumerate(names, 1):
                keeper = self._keeper("--net", "--mount", "--uts", "--propagation", "private")
                self._members.append(Host(self, number, name, keeper))
            self._connect()
            for host in self._members:
                if mbit is not None:
                    host.limit(mbit)
                others = [f"{address} {other}" for other, address in table.items() if other != host.name]
                own = _OWN_NAME[resolves].format(address=host.address, name=host.name)
                namespaces.furnish(host.place.pid, host.name, [*others, own], private)
            undo.pop_all()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, which: int | str) -> Host:
        """A host by its place in the order, or by its name."""
        return self._members[which] if isinstance(which, int) else next(h for h in self._members if h.name == which)

    def part(self, some: Iterable[Host], others: Iterable[Host] | None = None, *, one_way: bool = False) -> None:
        """Drops in silence whatever `some` and `others` send each other; in `one_way`, what `some` send alone.

        Args:
            some, others: hosts; `others` are all but `some` where not given. Further calls part further pairs.
            one_way: the answers still come through.
        """
        some = list(some)
        others = [host for host in self._members if host not in some] if others is None else list(others)
        pairs = {(a.address, b.address) for a in some for b in others if a is not b}
        pairs |= set() if one_way else {(b, a) for a, b in pairs}
        new = sorted(pairs - self._parted)
        self.in_switch(*(f"rule add pref 10 from {a} to {b} blackhole" for a, b in new))
        self._parted |= set(new)

    def heal(self) -> None:
        """Ends every partition and mends every link. Idempotent."""
        self.in_switch(*(f"rule del pref 10 from {a} to {b} blackhole" for a, b in sorted(self._parted)))
        self._parted.clear()
        self.in_switch(*(line for host in self._members for line in _raised(host._link, host.address)))

    @contextmanager
    def parted(self, some: Iterable[Host], others: Iterable[Host] | None = None) -> Iterator[None]:
        """Parts, and heals at its end."""
        self.part(some, others)
        try:
            yield
        finally:
            self.heal()

    def in_switch(self, *lines: str) -> None:
        """Runs these lines of `ip` in the switch."""
        namespaces.ip(self.switch_pid, lines)

    def close(self) -> None:
        """Kills every process in the hosts; the kernel takes the rest down. Idempotent."""
        if self._reaper is not None:
            reaper.end(self._reaper)
            self._reaper = None
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait(_SETUP_S)
            assert keeper.stdout is not None
            keeper.stdout.close()

    def _keeper(self, *namespaces: str) -> subprocess.Popen[bytes]:
        assert self._reaper is not None
        keeper = reaper.keep(namespaces)
        self._keepers.append(keeper)
        reaper.watch(self._reaper, keeper.pid)
        return keeper

    def _connect(self) -> None:
        lines = ["link set lo up", f"route add blackhole {NETWORK}.0/24"]
        for host in self._members:
            lines.append(f"link add {host._link} type veth peer name eth0 netns {host.place.pid}")
            lines.append(f"addr add {_SWITCH}/32 dev {host._link}")
            lines += _raised(host._link, host.address)
        self.in_switch(*lines)
        namespaces.in_network(self.switch_pid, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        for host in self._members:
            namespaces.ip(
                host.place.pid,
                [
                    "link set lo up",
                    f"addr add {host.address}/32 dev eth0",
                    "link set eth0 up",
                    f"route add default via {_SWITCH} dev eth0 src {host.address} onlink",
                ],
            )


def _raised(link: str, address: str) -> list[str]:
    return [f"link set {link} up", f"route replace {address}/32 dev {link}"]
