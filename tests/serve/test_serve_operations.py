"""deploy/prometheus and deploy/grafana: rules, dashboard and a wave of attacks in a real Prometheus."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from serve_client import as_json

from programs import find_tool

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
WINDOWS = {"[5m]": "[4s]", "[15m]": "[5s]"}
"""Short windows for the test; the names of the rules stay."""
PATIENCE = 60.0
"""Seconds to wait on a busy machine."""


def promtool(*words: object, **options: Any) -> str:
    command = [find_tool("promtool"), *map(str, words)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_rules_and_configuration_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    for file in (DEPLOY / "prometheus").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "api-key").write_text("a key")
    assert "5 rules found" in promtool("check", "config", tmp_path / "prometheus.yml")
    promtool("test", "rules", tmp_path / "rules_test.yml")


def test_promtool_finds_nothing_wrong_with_the_metrics(second_look: Any) -> None:
    promtool("check", "metrics", input=second_look.client.get("/metrics").text)


@pytest.fixture
def prometheus(second_look: Any, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus with our configuration and rules, all intervals shortened, that scrapes the server."""
    program = find_tool("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [second_look.url.removeprefix("http://")]
    rules = copy.deepcopy(RULES)
    for rule in rules["groups"][0]["rules"]:
        for window, short in WINDOWS.items():
            rule["expr"] = rule["expr"].replace(window, short)
        if "for" in rule:
            rule["for"] = "1s"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "api-key").write_text("a key")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([program, *flags, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def test_a_wave_of_attacks_raises_an_alert(prometheus: httpx.Client, second_look: Any, photos: list[bytes]) -> None:
    """The server gets images that count as attacked until the alert fires; every panel has data then."""
    results = second_look.client.post("/v1/classify", **as_json(photos, suspicious=True)).json()["results"]
    attacked = [photo for photo, result in zip(photos, results, strict=True) if result["suspicious"]]
    wave = as_json((attacked * 16)[:16])
    fired: set[str] = set()
    until = time.monotonic() + PATIENCE
    while "ReactClipManyImagesChanged" not in fired:
        assert time.monotonic() < until, "no alert fired"
        second_look.client.post("/v1/classify", **wave).raise_for_status()
        try:
            alerts = prometheus.get("/alerts").raise_for_status().json()["data"]["alerts"]
        except httpx.HTTPError:  # it is still starting
            time.sleep(0.2)
            continue
        fired = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
    for group in prometheus.get("/rules").json()["data"]["groups"]:
        assert [rule["health"] for rule in group["rules"]] == ["ok"] * 5

    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= 8
    for query in queries:
        expression = query.replace("$job", "react-clip")
        for window, short in WINDOWS.items():
            expression = expression.replace(window, short)
        answer = prometheus.get("/query", params={"query": expression}).raise_for_status().json()["data"]
        # No request is refused here, so there is no such series.
        assert answer["result"] or "react_clip_rejected_total" in query, query


def test_the_dashboard_shows_the_alerts_and_their_shares() -> None:
    text = (DEPLOY / "grafana" / "dashboard.json").read_text()
    recorded = {rule["record"] for rule in RULES["groups"][0]["rules"] if "record" in rule}
    assert set(re.findall(r"job:react_clip\w+:\w+", text)) == recorded
    alerts = {rule["alert"] for rule in RULES["groups"][0]["rules"] if "alert" in rule}
    document = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert set(re.findall(r"ReactClip\w+", text)) == set(re.findall(r"ReactClip\w+", document)) == alerts
