"""What has failed in a fleet, of what its controller's status says of its instances and of the last sync."""

from __future__ import annotations

import re
from collections.abc import Sequence

from weightsync.types.control import InstanceStatus

_ONE_FAILED = re.compile(r"\b1 of \d+ instances failed")


def failures_of(instances: Sequence[InstanceStatus], last_error: str | None, *, all_of_them: bool) -> dict[str, str]:
    """What has failed in a fleet; nothing has of an instance that only joins, or is late. A sync that failed for
    nothing but what an instance says itself is not said beside it."""
    failures = {
        each.instance_id: each.why for each in instances if each.why is not None and (each.failed or all_of_them)
    }
    reasons = [words for why in failures.values() if (words := why.rsplit("Error: ", 1)[-1].partition(" [")[0])]
    if last_error is None or (_ONE_FAILED.search(last_error) and any(words in last_error for words in reasons)):
        return failures
    return {"": last_error, **failures}
