"""The bench itself: hosts are apart, links have their bandwidth and are cut, and nothing outlives the test."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weightsync.errors import InvalidRequestError
from weightsync.testing import host_reaper
from weightsync.testing.hosts import Host, Hosts

MIB = 1 << 20


def joined(near: Host, far: Host) -> tuple[socket.socket, socket.socket]:
    """A connection from `near` to `far`: both ends, in this process."""
    with far.call(socket.create_server, (far.address, 0)) as server:
        ours = near.call(socket.create_connection, server.getsockname(), 10.0)
        theirs, _ = server.accept()
    theirs.settimeout(10.0)
    return ours, theirs


def seconds_to_move(sender: socket.socket, receiver: socket.socket, num_bytes: int) -> float:
    """From the first byte sent to the last one received."""
    begun_s = time.monotonic()
    thread = threading.Thread(target=sender.sendall, args=(bytes(num_bytes),), daemon=True)
    thread.start()
    missing = num_bytes
    while missing:
        missing -= len(receiver.recv(min(missing, MIB)))
    thread.join(10.0)
    return time.monotonic() - begun_s


def ends_within(pid: int, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while Path(f"/proc/{pid}/ns/net").is_symlink() and time.monotonic() < end_s:
        try:
            os.readlink(f"/proc/{pid}/ns/net")
        except OSError:  # a zombie has none
            return True
        time.sleep(0.01)
    return time.monotonic() < end_s


def test_hosts_are_apart(two: Hosts) -> None:
    trainer, rollout = two
    show = ["sh", "-c", "hostname; cat /etc/hostname; touch /dev/shm/mine; ls /dev/shm; pwd"]
    assert trainer.run(show).stdout.split() == ["trainer", "trainer", "mine", os.getcwd()]
    assert rollout.run(["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/mine").exists()
    assert socket.gethostname() != "trainer"
    assert rollout.run(["getent", "hosts", "trainer"]).stdout.split() == [trainer.address, "trainer"]
    with trainer.call(socket.create_server, ("127.0.0.1", 0)) as server, pytest.raises(ConnectionRefusedError):
        rollout.call(socket.create_connection, server.getsockname(), 5.0)


def test_two_benches_have_the_same_addresses_and_do_not_meet(bench: Callable[..., Hosts]) -> None:
    one, other = bench(1)[0], bench(2)[1]
    with one.call(socket.create_server, (one.address, 0)) as server, pytest.raises(ConnectionRefusedError):
        other.call(socket.create_connection, server.getsockname(), 5.0)


def test_a_link_has_its_bandwidth_each_way(two: Hosts) -> None:
    """Seen red with the limit on one of the two devices alone."""
    trainer, rollout = two
    ours, theirs = joined(trainer, rollout)
    with ours, theirs:
        assert min(seconds_to_move(ours, theirs, MIB) for _ in range(3)) < 0.5  # no limit: some milliseconds
        before = trainer.traffic()
        seconds_to_move(ours, theirs, MIB)
        moved = trainer.traffic().since(before)
        assert MIB <= moved.sent_bytes < 1.2 * MIB
        assert moved.received_bytes < 0.2 * MIB
        trainer.limit(40)
        for sender, receiver in ((ours, theirs), (theirs, ours)):  # the link's two directions
            assert 0.25 < seconds_to_move(sender, receiver, 2 * MIB) < 4.0  # 0.37 s less the first burst
        trainer.limit(None)
        assert min(seconds_to_move(ours, theirs, MIB) for _ in range(3)) < 0.5


@pytest.mark.parametrize("how", ["part", "link_down"])
def test_what_is_cut_is_silent_and_goes_on_when_mended(two: Hosts, how: str) -> None:
    trainer, rollout = two
    ours, theirs = joined(trainer, rollout)
    with ours, theirs:
        ours.sendall(b"a")
        assert theirs.recv(1) == b"a"
        if how == "part":
            two.part([trainer], [rollout])
        else:
            trainer.link_down()
        ours.sendall(b"b")
        theirs.settimeout(0.3)
        with pytest.raises(TimeoutError):
            theirs.recv(1)
        with pytest.raises(TimeoutError):
            rollout.call(socket.create_connection, (trainer.address, 1), 0.3)
        two.heal()
        theirs.settimeout(10.0)
        assert theirs.recv(1) == b"b"


def hears(near: Host, far: Host) -> bool:
    """Whether a datagram comes from `near` to `far`."""
    with (
        far.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as listener,
        near.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        listener.bind((far.address, 0))
        listener.settimeout(0.5)
        sender.sendto(b"?", listener.getsockname())
        try:
            return listener.recv(1) == b"?"
        except TimeoutError:
            return False


def test_a_partition_is_of_the_pairs_and_directions_that_it_names(bench: Callable[..., Hosts]) -> None:
    """Seen red where both directions are cut always, and where one is."""
    hosts = bench(3)
    one, two, three = hosts
    pairs = list(itertools.permutations(hosts, 2))

    def deaf() -> set[tuple[str, str]]:
        return {(near.name, far.name) for near, far in pairs if not hears(near, far)}

    with hosts.parted([one], [two]):
        assert deaf() == {("host-1", "host-2"), ("host-2", "host-1")}
    hosts.part([two], [three], one_way=True)
    assert deaf() == {("host-2", "host-3")}
    hosts.part([three])
    assert deaf() == {(near.name, far.name) for near, far in pairs if three in (near, far)}
    hosts.heal()
    assert deaf() == set()


def test_a_host_that_loses_power_has_no_process(two: Hosts) -> None:
    trainer, rollout = two
    lost = trainer.popen(["sh", "-c", "sleep 100 & sleep 100"])
    kept = rollout.popen(["sleep", "100"])
    deadline_s = time.monotonic() + 10
    while len(trainer.pids()) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    trainer.kill()
    assert lost.wait(5) == -signal.SIGKILL
    assert trainer.pids() == []
    assert kept.poll() is None
    assert trainer.run(["echo", "back"]).stdout == "back\n"
    two.close()
    assert kept.wait(5) == -signal.SIGKILL


@pytest.mark.alone  # whoever makes hosts sweeps, also a test beside it
@pytest.mark.parametrize("reaper_too", [False, True])
def test_a_killed_owner_leaves_nothing(two: Hosts, reaper_too: bool) -> None:
    """Seen red without the reaper, and without the sweep."""
    script = (
        "import os, sys, time; from weightsync.testing.hosts import Hosts\n"
        "hosts = Hosts(1); inside = hosts[0].popen(['sleep', '1000'])\n"
        "print(inside.pid, hosts._reaper.pid, hosts.switch_pid, flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    inside, reaper, switch = map(int, owner.stdout.readline().split())
    if reaper_too:
        os.kill(reaper, signal.SIGKILL)
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    if reaper_too:
        assert not ends_within(inside, 0.2)
        host_reaper.sweep()
    assert ends_within(inside, 10.0)
    assert ends_within(switch, 10.0)
    assert two[0].run(["echo", "here"]).stdout == "here\n"  # other owners' hosts are left alone


def test_a_name_is_given_once() -> None:
    with pytest.raises(InvalidRequestError, match="different names"):
        Hosts(["a", "a"])
