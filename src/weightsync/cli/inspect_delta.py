"""What an agent's newest delta changes: fetched as a receiver fetches it, and counted tensor by tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.cli.shared import own_name, plain
from weightsync.clients.agent import AgentClient
from weightsync.codec.delta_format import Form
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import plan_units
from weightsync.errors import ConfigError, MissingDependencyError, StateError
from weightsync.host.agent_calls import Agents, Granted
from weightsync.host.delta_pull import fetch_blobs
from weightsync.observe.picture import write_heat_png
from weightsync.types import Deadline
from weightsync.types.publication import DeltaBase

_TIMEOUT_S = 60.0
_BAR = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartChange:
    """How much of one part changes.

    Attributes:
        name: the tensor's.
        dtype: its.
        num_elements: that this source has of it.
        num_changed: of these; in units that are sent whole an estimate: their share of the unit's.
    """

    name: str
    dtype: str
    num_elements: int
    num_changed: float

    @property
    def density(self) -> float:
        """Share that changes."""
        return self.num_changed / max(1, self.num_elements)


def show_delta(url: str, *, token: str | None, verify: bool | str, picture: Path | None, as_json: bool) -> None:
    """Prints it, and draws it where a file is given.

    Raises:
        ConfigError: the URL is no agent's, or the picture can't be drawn or written.
        StateError: it has no delta now.
        WeightSyncError: it does not answer.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--delta asks an agent for the delta it has: give its URL (http://HOST:PORT), not {url!r}")
    facts, parts = _fetch(url, token, verify)
    if picture is not None:
        try:
            write_heat_png(
                [(part.name, part.density) for part in parts], picture,
                title=f"Share of elements that change from version {facts['base']} to {facts['version']}",
            )  # fmt: skip
        except MissingDependencyError as error:
            raise ConfigError(error.message) from error
        except OSError as broke:
            raise ConfigError(f"--picture {picture} can't be written: {broke.strerror}") from broke
    if as_json:
        print(json.dumps({**facts, "tensors": [dataclasses.asdict(part) for part in parts]}))
        return
    _print(facts, parts)
    if picture is not None:
        print(f"picture: {picture}")


def _fetch(url: str, token: str | None, verify: bool | str) -> tuple[dict[str, Any], list[PartChange]]:
    deadline = Deadline(_TIMEOUT_S)
    with contextlib.closing(AgentClient(url, token=token, verify=verify)) as client:
        model_id = client.get_version().model_id
        can = client.capabilities()
    if not (kept := can["deltas"]):
        raise StateError(f"{url} has no delta now: {can.get('why_no_delta') or 'no receiver has asked for one'}")
    newest = kept[-1]
    agents = Agents(
        receiver_id=own_name("inspect"), model_id=model_id, token=token, verify=verify, transport=None, num_streams=1,
        stall_s=10.0,
    )  # fmt: skip
    try:
        base = DeltaBase(run_id=newest["run_id"], version=newest["base"], digest=newest["base_digest"])
        granted = Granted(endpoint=url, grant=agents.grant(url, None, deadline, mode="delta", base=base))
        grant = granted.grant
        if not grant.delta:
            agents.give_up({grant.source: granted})
            raise StateError(f"{url} has published another version meanwhile: try again")
        blobs = fetch_blobs(
            agents, granted,
            lambda source, blocks, into, arrived: source.read(blocks, into, arrived, deadline=deadline),
            lambda count: None,
        )  # fmt: skip
        agents.acknowledge({grant.source: granted})
    finally:
        agents.close()
    source = grant.publication.sources[grant.source]
    parts = sorted(grant.publication.parts_of(grant.source), key=lambda part: (part.offset, part.nbytes))
    spans = [(part.offset - source.data_start, part.nbytes, part.dtype) for part in parts]
    reader = DeltaReader(blobs[-1], plan_units(spans))
    counts = _counts(reader, [start for start, _, _ in spans], [nbytes for _, nbytes, _ in spans])
    widths = _widths(reader, [start for start, _, _ in spans])
    changes = [
        PartChange(
            name=part.name if part.box is None else f"{part.name}@{part.box.offset}", dtype=part.dtype,
            num_elements=part.nbytes // width, num_changed=count,
        )
        for part, count, width in zip(parts, counts, widths, strict=True)
    ]  # fmt: skip
    whole = source.data_end - source.data_start
    facts = {
        **newest, "model_id": model_id, "ratio": newest["nbytes"] / max(1, whole),
        "density": newest["num_changed"] / max(1, newest["num_elements"]),
        "forms": {form.name.lower(): sum(reader.form(i) is form for i in range(len(reader.units))) for form in Form},
    }  # fmt: skip
    return facts, changes


def _widths(reader: DeltaReader, starts: Sequence[int]) -> list[int]:
    ends = [unit.start for unit in reader.units]
    found = np.maximum(0, np.searchsorted(ends, starts, side="right") - 1)
    return [max(1, reader.units[int(index)].kind.width_bytes) if reader.units else 1 for index in found]


def _counts(reader: DeltaReader, starts: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Changed elements of each part, in order of their starts."""
    counts = np.zeros(len(starts))
    edges = np.asarray([*starts, starts[-1] + sizes[-1]]) if starts else np.zeros(1, np.int64)
    for index, unit in enumerate(reader.units):
        total = reader.num_changed(index)
        if not total:
            continue
        if reader.form(index) is Form.PLANES:
            positions, _ = reader.steps(index)
            places = unit.start + positions.astype(np.int64) * unit.kind.width_bytes
            counts += np.diff(np.searchsorted(places, edges))
        else:
            low, high = np.maximum(edges[:-1], unit.start), np.minimum(edges[1:], unit.start + unit.nbytes)
            counts += total * np.maximum(0, high - low) / unit.nbytes
    return [float(count) for count in counts]


def _print(facts: dict[str, Any], parts: Sequence[PartChange]) -> None:
    from weightsync.cli.tables import console, table

    most = max((part.density for part in parts), default=0.0) or 1.0
    rows = (
        (
            part.name, part.dtype, str(part.num_elements), f"{100 * part.density:.4f}",
            "█" * round(_BAR * part.density / most),
        )
        for part in parts
    )  # fmt: skip
    out, title = console(), plain(f"{facts['model_id']} {facts['base']} -> {facts['version']}")
    heads = ("tensor", "dtype", "elements", "changed %", "")
    out.print(table(title, heads, rows, right=("elements", "changed %")))
    out.print(
        f"{facts['num_changed']} of {facts['num_elements']} elements change ({100 * facts['density']:.3f} %); "
        f"{facts['nbytes']} bytes, {100 * facts['ratio']:.3f} % of a full; made in {facts['seconds']:.3f} s",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    out.print(f"units: {', '.join(f'{count} {form}' for form, count in facts['forms'].items())}", highlight=False)
