"""`python -m bench`: measures rows, prints a table, writes results/latest.json and a dated copy."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import bench
from bench.harness import RESULTS, BenchArgs, Row, write_results

_EPILOG = """\
Each row is a ratio: seconds of the step over seconds of its yardstick, both medians of the same run, so that
figures of different machines can be compared. For most rows the yardstick is one memcpy of the model's bytes
(one plain copy_ call between touched buffers). Smaller is better; 'ok' says that the target is met.

  python -m bench                     every row, 1 GiB model
  python -m bench digest              one row
  python -m bench --gib 0.1           quick look; small sizes live in caches and flatter or distort the ratios

Run it on a quiet machine: another process that uses memory moves the ratios by tens of percent.
A new benchmark is a module here with ROWS (row name -> one sentence) and run(args) -> list of Row.
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    modules, missing = _discover()
    rows = {row: module for module in modules for row in module.ROWS}
    sentences = "\n".join(f"  {row:<16}{module.ROWS[row]}" for row, module in rows.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measures how fast the parts of weightsync are. Rows:\n{sentences}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="row", help="rows to measure (default: all)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model in GiB (default: 1.0)")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each step; the median counts (default: 7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of latest.json (default: bench/results)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a row misses its target")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.rows) - set(rows))
    if unknown:
        reasons = "".join(f"; not loaded: {name} ({why})" for name, why in missing.items())
        parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join(rows)}{reasons}")
    if given.gib <= 0 or given.repeats < 1:
        parser.error("--gib is above 0 and --repeats at least 1")
    wanted = frozenset(given.rows or rows)
    args = BenchArgs(gib=given.gib, repeats=given.repeats, rows=wanted)
    for name, why in missing.items():
        print(f"bench/{name}.py was skipped: {why}", file=sys.stderr)
    done: list[Row] = []
    print(f"{'row':<18}{'ratio':>9}{'target':>9}  ok", flush=True)
    for module in modules:
        if wanted & set(module.ROWS):
            for row in module.run(args):
                print(f"{row.row:<18}{row.ratio:>9.3f}{row.target:>9.3f}  {'yes' if row.ok else 'NO'}", flush=True)
                done.append(row)
    print(f"written to {write_results(done, given.out)}")
    return 1 if given.check and not all(row.ok for row in done) else 0


def _discover() -> tuple[list[ModuleType], dict[str, str]]:
    """The benchmark modules, and those that this environment can't import with the reason."""
    found, missing = [], {}
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name == "__main__":
            continue
        try:
            module = importlib.import_module(f"bench.{info.name}")
        except ImportError as error:
            missing[info.name] = str(error)
            continue
        if hasattr(module, "ROWS") and hasattr(module, "run"):
            found.append(module)
    return found, missing


if __name__ == "__main__":
    sys.exit(main())
