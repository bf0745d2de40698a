"""CommitPolicy: what is read, what is refused, and how many it needs."""

from __future__ import annotations

import pytest

from weightsync.control.policy import CommitPolicy
from weightsync.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "policy", "needed"),
    [
        ("each", CommitPolicy(kind="each"), 5),
        ("all", CommitPolicy(kind="all"), 5),
        ("quorum(1)", CommitPolicy(kind="quorum", quorum=1), 1),
        ("quorum(20)", CommitPolicy(kind="quorum", quorum=20), 20),
    ],
)
def test_policies(text: str, policy: CommitPolicy, needed: int) -> None:
    assert CommitPolicy.parse(text) == policy
    assert policy.num_needed(5) == needed


@pytest.mark.parametrize(
    "text",
    ["", "ALL", " all", "all ", "quorum", "quorum()", "quorum(0)", "quorum(-1)", "quorum(01)", "quorum(1.5)",
     "quorum(2", "quorum(2) ", "quorum(2)\n", "quorum(\u0661)", "quorum(12345678)", "majority"],
    ids=repr,
)  # fmt: skip
def test_policies_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="commit_policy is 'each', 'all' or 'quorum"):
        CommitPolicy.parse(text)
