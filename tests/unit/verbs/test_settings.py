"""What the three verbs read of their arguments, of a YAML file and of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightsync.errors import ConfigError
from weightsync.verbs.settings import as_list, check_once, loaded, token_of, with_extract, with_transfer

SECRET = "a-token-for-tests-only"


def test_a_yaml_file_feeds_all_three(tmp_path: Path) -> None:
    file = tmp_path / "sync.yaml"
    file.write_text(
        "weight_sync:\n"
        "  inference_service: {model_tag: actor}\n"
        "  publish: {to: ['http://127.0.0.1:9000'], port: 0}\n"
        "  push: {engines: ['vllm+http://127.0.0.1:8000']}\n"
        "  serve: {engines: {actor: ['vllm+http://127.0.0.1:8000']}, sources: ['http://127.0.0.1:8765']}\n"
    )
    config = loaded(str(file))
    assert config.publish.to == ("http://127.0.0.1:9000",)
    assert config.push.engines == ("vllm+http://127.0.0.1:8000",)
    assert config.serve.engines == {"actor": ("vllm+http://127.0.0.1:8000",)}
    assert config.serve.port == 9000


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"publish": {"too": []}}, "did you mean 'to'"),
        ({"publish": {"to": ["host-0:9000"]}}, "a list of http:// or https:// URLs"),
        ({"publish": {"store": "bucket/run"}}, "a place in an object store: s3://"),
        ({"serve": {"sources": ["bucket/run"]}}, "or places in stores as s3://bucket/run"),
        ({"push": {"engines": ["host-0"]}}, "URLs of engines"),
        ({"serve": {"port": 99999}}, "a port from 0 to 65535"),
        ({"publish": {"last_wait_s": -1}}, "0 or more"),
    ],
)
def test_a_wrong_section_is_refused_with_what_it_should_be(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(section)


def test_an_argument_wins_over_the_file_and_what_nobody_has_said_stays_unsaid() -> None:
    config = loaded({"extract": {"dtype": "float32"}, "transfer": {"delta": True}})
    assert with_extract(config, dtype=None).extract.dtype == "float32"
    assert with_extract(config, dtype="float16").extract.dtype == "float16"
    assert with_extract(config, dtype=torch.float16).extract.dtype == "float16"
    assert with_extract(config, dtype="keep").extract.dtype is None
    changed = with_transfer(config, delta=False, strategy=None)
    assert (changed.transfer.delta, changed.transfer.model_fields_set) == (False, {"delta"})
    with pytest.raises(ConfigError, match="is not a choice"):
        with_extract(config, dtype="bf16")


def test_the_token_is_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", SECRET)
    assert token_of("another-token-for-tests") == "another-token-for-tests"
    assert token_of(None) == SECRET
    monkeypatch.delenv("WEIGHTSYNC_TOKEN")
    assert token_of(None) is None


def test_a_list_of_urls_takes_one_and_refuses_the_same_twice() -> None:
    assert as_list("http://a:1/", (), name="to") == ["http://a:1"]
    assert as_list(None, ("http://a:1",), name="to") == ["http://a:1"]
    with pytest.raises(ConfigError, match="twice"):
        as_list(["http://a:1", "http://a:1/"], (), name="to")
    with pytest.raises(ConfigError, match=r"twice.*not shown") as caught:
        as_list(["me:passw0rd@a:1", "me:passw0rd@a:1/"], (), name="to")
    assert "passw0rd" not in str(caught.value)
    assert as_list(["s3://bucket/run@1"], (), name="sources") == ["s3://bucket/run@1"]
    with pytest.raises(ConfigError, match="to has URLs"):
        as_list([1], (), name="to")  # type: ignore[list-item]


@pytest.mark.parametrize(
    "other", ["http://localhost:1", "vllm+http://127.0.0.1:1/", "vllm+http://LOCALHOST:1", "http://[::1]:1"]
)
def test_one_server_under_two_names_of_this_machine_is_refused(other: str) -> None:
    """Seen red: it waited for itself until `join_timeout_s`."""
    others = ["http://localhost:2", "http://localhost:1/b", "https://localhost:1", "http://127.0.0.10:1"]
    check_once(["http://127.0.0.1:1", *others], name="push")
    with pytest.raises(ConfigError, match=r"push has .* twice, the first time as http://127\.0\.0\.1:1"):
        check_once(["http://127.0.0.1:1", other], name="push")
