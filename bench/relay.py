"""Relaying: many rollout hosts at the cost of one, each on a network of its own.

`relay_fanout`: 12 hosts and a trainer in network namespaces, links of 200 Mbit/s in each direction, a 64 MiB model:
seconds from the trainer's `offload` until all of them serve the version, over the same of one host alone. Each is a
rollout service with a torch module, in a process of its own.

`relay_fanout_delta`: the same for a version of which 1 % has changed. `detail` of both has the trainer's egress over
the bytes of the version (as its link counts them, headers and acknowledgements included), the same without relaying,
and how busy the cores were: where they are busy all the time, the machine is what is measured.

`--gib` does not matter. Needs root on Linux. `python -m bench.relay --plot docs/relay.png` draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, BenchArgs, Row, facts
from bench.relay_hosts import Actor, following, load_all, trainer_main
from weightsync.testing.hosts import Hosts, why_not

if (_reason := why_not()) is not None:
    raise ImportError(_reason)

ROWS = {
    "relay_fanout": "12 hosts that relay serve a 64 MiB model over 200 Mbit/s each, over one host alone",
    "relay_fanout_delta": "the same for a 1 % delta",
}
NUM_HOSTS = 12
_MIB = 64.0
_MBIT = 200.0
_TARGET = 2.0
_FULL_EVERY = 3
_TIMEOUT_S = 300.0


def run(args: BenchArgs) -> list[Row]:
    """Measures both rows."""
    load_all()
    num_rounds = max(1, min(3, args.repeats // 2))
    found = {
        "alone": _fleet(1, relay=True, num_rounds=num_rounds),
        "relayed": _fleet(NUM_HOSTS, relay=True, num_rounds=num_rounds),
        "not relayed": _fleet(NUM_HOSTS, relay=False, num_rounds=1),
    }
    rows = []
    for row, kind in (("relay_fanout", "full"), ("relay_fanout_delta", "delta")):
        detail = {name: fleet[kind] for name, fleet in found.items()}
        ratio = detail["relayed"]["seconds"] / detail["alone"]["seconds"]
        rows.append(
            Row(
                row=row,
                ratio=ratio,
                target=_TARGET,
                detail={**facts(args), "num_hosts": NUM_HOSTS, "mib": _MIB, "mbit": _MBIT, **detail},
            )
        )
    return rows


def _fleet(num_hosts: int, *, relay: bool, num_rounds: int) -> dict[str, dict[str, Any]]:
    """What fulls and deltas cost on so many hosts; the first of each does not count."""
    rounds: dict[str, list[dict[str, Any]]] = {"full": [], "delta": []}
    with Hosts(num_hosts + 1, mbit=_MBIT) as hosts, contextlib.ExitStack() as stack:
        trainer = Actor(hosts[0], trainer_main, hosts[0].address, _MIB, "bench", 5.0, _FULL_EVERY)
        stack.callback(trainer.close)
        endpoint = trainer.ask("endpoint")
        actors = stack.enter_context(following(list(hosts)[1:], _MIB, endpoint, relay=relay, pull_timeout_s=_TIMEOUT_S))
        for actor in actors:
            actor.ask("status")  # it has started
        for version in range(_FULL_EVERY * (num_rounds + 1)):
            kind, said = _version(version, hosts, trainer, actors)
            rounds[kind].append(said)
    return {kind: _median(said[1:] if len(said) > 1 else said) for kind, said in rounds.items()}


def _version(version: int, hosts: Hosts, trainer: Actor, actors: list[Actor]) -> tuple[str, dict[str, Any]]:
    before, busy = hosts[0].traffic(), _busy()
    begun_s = time.monotonic()
    published = trainer.ask("publish", version, True)
    for actor in actors:
        actor.tell("wait", version, _TIMEOUT_S)
    came = [actor.answer(_TIMEOUT_S + 30) for actor in actors]
    cores = [after - was for after, was in zip(_busy(), busy, strict=True)]
    is_delta = all(how["num_deltas"] for _, how in came)
    size_bytes = published["delta_bytes"] if is_delta else _MIB * (1 << 20)
    served_s = sorted(served - begun_s for served, _ in came)
    sent_bytes = hosts[0].traffic().since(before).sent_bytes
    return "delta" if is_delta else "full", {
        "seconds": served_s[-1],
        "first_s": served_s[0],
        "served_s": served_s,
        "size_bytes": size_bytes,
        "egress": sent_bytes / size_bytes,
        "agent_blocks": sum(how["from"].get("agent", 0) for _, how in came) / size_bytes,
        "busy": cores[0] / max(1e-9, cores[1]),
    }


def _median(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The round whose time is the median."""
    middle = statistics.median_low([each["seconds"] for each in said])
    return next(each for each in said if each["seconds"] == middle) | {"num_rounds": len(said)}


def _busy() -> tuple[float, float]:
    """Ticks in which the cores were busy, and all of them."""
    ticks = [int(part) for part in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _plot(path: Path, source: Path) -> None:
    """Draws when how many hosts serve the version, relayed or not, for a full and a delta."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["row"]: row["detail"] for row in json.loads(source.read_text())}
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axes, row, title in zip(panels, ROWS, ("64 MiB in full", "1 % delta"), strict=True):
        detail = rows[row]
        for name, color in (("relayed", "C0"), ("not relayed", "C3"), ("alone", "0.5")):
            times = detail[name]["served_s"]
            label = f"{name}: the trainer sends {detail[name]['egress']:.1f} models"
            axes.step([0.0, *times], range(len(times) + 1), where="post", color=color, label=label)
        axes.set(xlabel="seconds from offload", ylabel="hosts that serve it", title=title)
        axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="PNG", required=True, help="draw what was measured")
    parser.add_argument("--source", type=Path, default=RESULTS / "latest.json", help="what to draw")
    given = parser.parse_args()
    _plot(given.plot, given.source)


if __name__ == "__main__":
    _main()
