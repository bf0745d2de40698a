"""Errors cross process borders as data: nothing is lost, nothing hostile gets through, nothing is executed."""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    GroupJoinError,
    LoadError,
    ManifestMismatchError,
    SyncFailedError,
    TransferAbortedError,
    TransferError,
    WeightSyncError,
    as_weightsync_error,
    error_from_dict,
    is_consequence,
)


def kinds(root: type[WeightSyncError] = WeightSyncError) -> list[type[WeightSyncError]]:
    found = [root]
    for child in root.__subclasses__():
        found += kinds(child)
    return sorted((kind for kind in found if kind.__module__ == "weightsync.errors"), key=lambda kind: kind.__name__)


quiet = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
keys = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda key: key not in {"rank", "peer", "version", "parameter", "state_left", "message", "self", "causes"}
)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_survives_the_border(kind: type[WeightSyncError]) -> None:
    facts: dict[str, Any] = {"rank": 2, "peer": "e", "version": "r/3", "parameter": "a.b", "state_left": "old"}
    error = kind("it broke", **facts, missing_ranks=[1, 2], bytes_left=5)
    again = error_from_dict(json.loads(json.dumps(error.to_dict())), peer="somebody else")
    assert type(again) is kind
    assert again.message == "it broke"
    assert {key: getattr(again, key) for key in facts} == facts
    assert again.details["missing_ranks"] == [1, 2]
    assert again.to_dict() == error.to_dict()
    assert str(again) == str(error)
    assert again.http_status == kind.http_status
    assert 400 <= kind.http_status < 600


@quiet
@given(st.sampled_from(kinds()), st.text(), st.dictionaries(keys, values, max_size=4))
def test_any_details_come_back(kind: type[WeightSyncError], text: str, details: dict[str, Any]) -> None:
    error = kind(text, **details)
    again = error_from_dict(msgspec.json.decode(msgspec.json.encode(error.to_dict())))
    assert type(again) is kind
    assert again.message == text
    assert {key: again.details[key] for key in details} == details


def test_causes_keep_their_types_and_their_engines() -> None:
    error = SyncFailedError(
        "update failed",
        version="r/1",
        causes={
            "one": LoadError("bad", parameter="w"),
            "two": SyncFailedError("nested", causes={"x": GroupJoinError("alone", missing_ranks=[3])}),
        },
    )
    again = error_from_dict(json.loads(json.dumps(error.to_dict())))
    assert isinstance(again, SyncFailedError)
    assert type(again.causes["one"]) is LoadError
    assert again.causes["one"].parameter == "w"
    nested = again.causes["two"]
    assert isinstance(nested, SyncFailedError)
    assert nested.causes["x"].details["missing_ranks"] == [3]
    assert "bad" in str(again)
    assert "alone" in str(again)


def test_a_cause_that_the_message_has_is_not_said_twice() -> None:
    gone = EngineUnreachableError("can't connect", peer="e")
    error = SyncFailedError(f"1 of 2 failed: e: {gone}", causes={"e": gone, "f": LoadError("bad")}, version="r/1")
    assert str(error) == "1 of 2 failed: e: can't connect [peer=e] [version=r/1] (f: LoadError: bad)"
    assert "peer=e" in str(error_from_dict(json.loads(json.dumps(error.to_dict()))))


@pytest.mark.parametrize(
    "detail",
    [object(), {1: {2, 3}}, (1, 2), float("inf"), float("nan"), b"bytes", ValueError("x"), 1 << 80, "\ud800"],
    ids=["object", "sets", "tuple", "inf", "nan", "bytes", "error", "bigint", "surrogate"],
)
def test_any_detail_can_be_written_as_strict_json(detail: Any) -> None:
    """An error that can't be answered is a call that hangs (a worker's pipe) or a bare 500 (the server)."""
    body = LoadError("x", detail=detail).to_dict()
    msgspec.json.encode(body)
    json.dumps(body, allow_nan=False)
    assert type(error_from_dict(body)) is LoadError


def test_a_message_that_is_no_unicode_can_be_written() -> None:
    """Names of files come with lone surrogates in them."""
    assert msgspec.json.encode(LoadError("no such file: caf\udce9", peer="\udce9").to_dict())


def test_an_unknown_name_becomes_an_engine_error_that_keeps_it() -> None:
    """A newer peer never breaks an older one, and no name is ever looked up anywhere but in our list."""
    for name in ("FutureError", "os.system", "weightsync.errors.LoadError", "__class__", "KeyError", "", "WeightSync"):
        error = error_from_dict({"error": name, "message": "m"}, peer="p")
        assert type(error) is EngineError
        assert error.details["remote_error"] == name
        assert error.peer == "p"


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    really = builtins.__import__

    def noted(name: str, importer: Any = None, *rest: Any, **more: Any) -> Any:
        """The library's own imports are noted; a collection of garbage may import what it likes meanwhile."""
        if str((importer or {}).get("__name__")).startswith("weightsync"):
            imported.append(name)
        return really(name, importer, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", noted)
    error_from_dict({"error": "antigravity.LoadError", "details": {"__reduce__": ["os.system", "true"]}})
    assert imported == []
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"error": None},
        {"error": ["LoadError"]},
        {"error": {"LoadError": 1}},
        {"error": "LoadError", "message": None},
        {"error": "LoadError", "message": {"a": 1}},
        {"error": "LoadError", "details": None},
        {"error": "LoadError", "details": [1, 2]},
        {"error": "LoadError", "details": "text"},
        {"error": "LoadError", "details": {"message": "again", "rank": 3, "peer": 4, "causes": {}}},
        {"error": "LoadError", "details": {"self": 1}},
        {"error": "LoadError", "details": {"kind": 1, "error": 2, "details": 3, "args": 4, "": 5, "a b": 6}},
        {"error": "SyncFailedError", "details": {"causes_by_engine": [1]}},
        {"error": "SyncFailedError", "details": {"causes_by_engine": None}},
        {"error": "SyncFailedError", "details": {"causes_by_engine": {"e": 1, "f": None, "g": []}}},
        {"error": "SyncFailedError", "details": {"causes_by_engine": {"e": {}}, "causes": 5, "self": 1}},
        {"error": "GroupJoinError", "rank": "none", "details": {"missing_ranks": {"a": 1}}},
    ],
    ids=lambda body: json.dumps(body)[:70],
)
def test_a_hostile_body_is_still_an_error_of_ours(body: dict[str, Any]) -> None:
    error = error_from_dict(body, peer="p")
    assert isinstance(error, WeightSyncError)
    assert isinstance(str(error), str)
    json.dumps(error.to_dict())
    is_consequence(error)


@quiet
@given(
    st.dictionaries(
        st.sampled_from(["error", "message", "rank", "peer", "version", "details", "x"]),
        values | st.sampled_from(["LoadError", "SyncFailedError"]) | st.dictionaries(
            st.sampled_from(["self", "message", "rank", "causes", "causes_by_engine", "kind"]), values, max_size=3
        ),
    )
)  # fmt: skip
def test_no_body_at_all_breaks_the_reader(body: dict[str, Any]) -> None:
    error = error_from_dict(body)
    assert isinstance(error, WeightSyncError)
    assert isinstance(error_from_dict(error.to_dict()), WeightSyncError)


def test_causes_nested_a_thousand_deep_end_somewhere() -> None:
    body: dict[str, Any] = {"error": "LoadError", "message": "the first"}
    for _ in range(1000):
        body = {"error": "SyncFailedError", "details": {"causes_by_engine": {"e": body}}}
    assert isinstance(error_from_dict(body), SyncFailedError)


def test_a_huge_body_gives_an_error_of_a_size_that_can_be_read() -> None:
    """The text of an engine's error goes into logs and into other errors: 10 MB of it help nobody."""
    error = error_from_dict({"error": "LoadError", "message": "x" * 10_000_000, "details": {"y": "z" * 10_000_000}})
    assert len(str(error)) < 100_000


def test_what_follows_from_something_else() -> None:
    assert is_consequence(TransferError("the connection broke"))
    assert is_consequence(TransferAbortedError("a newer init"))
    for cause in (
        GroupJoinError("alone"),
        LoadError("x"),
        DigestMismatchError("x"),
        DeadlineExceededError("x"),
        EngineUnreachableError("x"),
        ValueError("x"),
        KeyboardInterrupt(),
    ):
        assert not is_consequence(cause), cause


def test_a_failed_sync_is_a_consequence_only_if_all_its_causes_are() -> None:
    lost = TransferError("lost")
    assert is_consequence(SyncFailedError("x", causes={"a": lost, "b": SyncFailedError("y", causes={"c": lost})}))
    assert not is_consequence(SyncFailedError("x", causes={"a": lost, "b": LoadError("bad")}))
    assert not is_consequence(SyncFailedError("x"))


def test_a_url_is_not_read_twice() -> None:
    """Seen red: each error of a client named its server in the message and behind it."""
    url = "http://host:1"
    assert str(EngineError(f"can't connect to {url}", peer=url)) == f"can't connect to {url}"
    error = EngineError(f"can't connect to {url}", peer=url, version=1)
    assert (str(error), error.peer) == (f"can't connect to {url} [version=1]", url)
    assert error.to_dict()["peer"] == url
    assert str(EngineError("refused", peer=url)) == f"refused [peer={url}]"
    assert str(EngineError("engine 0 failed", peer="0")) == "engine 0 failed [peer=0]", "a word may mean anything"
    other = f"not {url}0, {url}.a or {url}:2"
    assert str(EngineError(other, peer=url)) == f"{other} [peer={url}]", "seen red: these are others"
    assert str(EngineError(f"{url}: refused", peer=url)) == f"{url}: refused"
    assert str(error_from_dict({"message": "x", "peer": 5})) == "x [peer=5]", "seen red with a TypeError"


def test_a_cause_does_not_name_its_engine_again() -> None:
    """Seen red: one engine's address stood three times in a line."""
    url = "http://host:1"
    misfit = ManifestMismatchError("1 differs", peer=url, parameter="w")
    error = SyncFailedError(f"begin failed on {url}", causes={url: misfit})
    for each in (error, error_from_dict(error.to_dict())):
        assert str(each) == f"begin failed on {url} (ManifestMismatchError: 1 differs [parameter=w])"
    two = SyncFailedError(f"begin failed on {url}, e", causes={url: misfit, "e": LoadError("bad", peer="f")})
    assert str(two) == (
        f"begin failed on {url}, e ({url}: ManifestMismatchError: 1 differs [parameter=w]; e: LoadError: bad [peer=f])"
    )
    outer = SyncFailedError("failed", causes={"e": error})
    assert str(outer) == f"failed (e: SyncFailedError: {error})"


def test_what_is_typed_stays_what_it_is() -> None:
    typed = ConfigError("x")
    assert as_weightsync_error(typed, LoadError, "no") is typed
    wrapped = as_weightsync_error(KeyError("w"), LoadError, "loading failed", rank=1)
    assert type(wrapped) is LoadError
    assert wrapped.rank == 1
    assert "KeyError" in wrapped.message
    assert isinstance(wrapped.__cause__, KeyError)


@pytest.mark.parametrize("where", ["message", "peer", "state_left", "detail", "name", "cause"])
def test_what_an_error_says_moves_no_terminal(where: str) -> None:
    """A server's own words end on an operator's terminal and in logs. Seen red: commands printed them as they came."""
    odd = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\u202eb\ud800é権"
    error = {
        "message": WeightSyncError(odd),
        "peer": WeightSyncError("m", peer=odd),
        "state_left": WeightSyncError("m", state_left=odd),
        "detail": WeightSyncError("m", detail=odd),
        "name": WeightSyncError("m", **{odd: 1}),
        "cause": SyncFailedError("m", peer=odd, causes={odd: LoadError(odd)}),
    }[where]
    told = error_from_dict(error.to_dict())
    for each in (error, told):
        assert all(char.isprintable() for char in str(each)), ascii(str(each))
        assert "é権" in str(each)
        assert "\\x1b[2J" in str(each)
    assert told.message == error.to_dict()["message"], "as data it is what it was"
    assert str(ConfigError("two things:\n  - a\n  - b")).count("\n") == 2
