"""`weightsync trace` and `weightsync status` of a real fleet: a controller, a rollout service, and an agent."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

import weightsync
from tests.multiproc.pull_kit import wait_until
from weightsync.cli import app
from weightsync.control.build import build_controller
from weightsync.observe import Recorder

TOKEN = "a-token-for-tests-only"
ENV = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "WEIGHTSYNC_TOKEN": TOKEN}
LONG_S = 60.0


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 16)).to(torch.bfloat16)


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)), env=ENV)
    return result.exit_code, result.output


def traced(url: str, out: Path) -> list[str]:
    """The names of all phases."""
    code, text = run("trace", url, "--out", out)
    assert code == 0, text
    return [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]


def test_one_file_of_a_fleet_on_one_time_axis(tmp_path: Path) -> None:
    """What one process does after another's word lies after it, though each has a clock of its own."""
    out, mine = tmp_path / "trace.json", Recorder("trainer/rank-0")
    config = {
        "sync_method": "pull",
        "sync_mode": "fully-async",
        "fleet": {"models": ["actor"], "lease_s": 5.0, "port": 0},
    }
    with (
        build_controller(config, token=TOKEN) as built,
        weightsync.serve(
            {"actor": model()}, controller=built.url, lease=str(tmp_path / "lease"), token=TOKEN, port=0
        ) as service,
        weightsync.publish(model(), "actor", to=built.url, token=TOKEN, port=0, recorder=mine) as publisher,
    ):
        of = built.controller
        wait_until(lambda: [each.state for each in of.status().instances] == ["live"], "it takes part", LONG_S)
        for version in (1, 2):
            with mine.phase("train"):
                publisher.step()
            wait_until(lambda: of.rollout_service_state("actor").rollout_model_version == version, "served", LONG_S)  # noqa: B023
        wait_until(lambda: traced(built.url, out).count("train") == 2, "the agent shows its trainer's phases", LONG_S)
        for url, says in (
            (built.url, "serve"), (service.url, "actor serves"), (publisher.endpoint, "Publishes actor"),
        ):  # fmt: skip
            code, text = run("status", url)
            assert code == 0, text
            assert says in text
    trace = json.loads(out.read_text())
    assert trace["otherData"]["unreachable"] == []
    clocks = {each["process"].split()[0]: each for each in trace["otherData"]["clocks"]}
    assert set(clocks) == {"controller", "service", "agent"}
    assert all(each["error_s"] < 1.0 for each in clocks.values())
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans.setdefault(event["name"], []).append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    assert {"train", "offload", "prove", "serve", "pull", "load", "sync", "transfer"} <= set(spans)
    bound_s = clocks["agent"]["error_s"] + clocks["service"]["error_s"]
    proved, pulled = sorted(spans["prove"]), sorted(spans["pull"])
    assert len(proved) == 2
    for (_, end_s), (start_s, _) in zip(proved, pulled[-2:], strict=True):
        assert start_s >= end_s - bound_s, "nothing is fetched before it is proved"
