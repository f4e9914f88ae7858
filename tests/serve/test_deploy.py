"""Files beside the service: containers, Kubernetes, Prometheus' rules and Grafana's dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_client import as_json

from programs import find_tool
from react_clip.cli import parse_args
from react_clip.serve.settings import DRAIN, GRACE, PREFIX, Settings

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())


def test_the_container_sets_only_settings_that_exist_and_gives_time_to_stop() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["serve"]
    names = {name.removeprefix(PREFIX).lower() for name in service["environment"]}
    names |= {name.lower() for name in re.findall(rf"{PREFIX}(\w+)=", dockerfile)}
    assert names <= set(Settings.model_fields)
    assert service["secrets"] == [f"{PREFIX.lower()}{name}" for name in ("secret", "api_keys")]
    stated = [int(value) for value in re.findall(r"--stop-timeout (\d+)", dockerfile)]
    assert min(*stated, int(service["stop_grace_period"].removesuffix("s"))) > DRAIN + GRACE + 5


def test_hadolint_finds_nothing_in_the_dockerfiles() -> None:
    files = [ROOT / "Dockerfile", ROOT / "deploy" / "ray.Dockerfile"]
    found = subprocess.run([find_tool("hadolint"), *files], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "")


def test_kubernetes_accepts_the_manifests() -> None:
    """Against the schemas of the newest release and of one that is two years older."""
    validate = pytest.importorskip("kubernetes_validate")
    manifests = [*yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())]
    assert [each["kind"] for each in manifests] == ["Deployment", "Service", "HorizontalPodAutoscaler"]
    cluster = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        manifests.append(pod)
    for manifest in manifests:
        for version in (validate.latest_version(), "1.31.0"):
            validate.validate(manifest, version, strict=True)
    broken = {**manifests[1], "spec": {**manifests[1]["spec"], "port": 8000}}
    with pytest.raises(validate.ValidationError, match="'port' was unexpected"):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_the_kubernetes_manifest_fits_the_service(open_client: Any) -> None:
    deployment, _, scaler = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert {name.removeprefix(PREFIX).lower() for name in variables} <= set(Settings.model_fields)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    [credentials] = [each["name"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert mounts[credentials] == variables[f"{PREFIX}SECRETS_DIR"]
    assert container["resources"]["limits"]["cpu"] == variables[f"{PREFIX}THREADS"]
    assert parse_args(["serve", *container["args"]]).log_format == "json"
    assert pod["spec"]["terminationGracePeriodSeconds"] > GRACE + 5
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert open_client.get(container[probe]["httpGet"]["path"]).status_code == 200
    [metric] = scaler["spec"]["metrics"]
    assert f"\n{metric['pods']['metric']['name']} " in open_client.get("/metrics").text


def test_the_rules_fire_when_they_should(tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    for file in (ROOT / "deploy" / "prometheus").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "api-key").write_text("a key")
    for words in (("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")):
        subprocess.run([promtool, *words], cwd=tmp_path, check=True, timeout=120)


def test_rules_and_dashboard_use_metrics_of_the_service(open_client: Any, photos: list[bytes]) -> None:
    open_client.post("/v1/classify", **as_json(photos))
    open_client.get("/nothing")
    served = set(re.findall(r"^(\w+?)(?:\{.*\})? ", open_client.get("/metrics").text, re.MULTILINE))
    text = (ROOT / "deploy" / "grafana" / "dashboard.json").read_text()
    board = json.loads(text)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = RULES["groups"][0]["rules"]
    expressions = "\n".join([*queries, *(rule["expr"] for rule in rules)])
    used = set(re.findall(r"(?<![:\w])react_clip_\w+", expressions))
    assert len(used) >= 5
    assert used <= served
    recorded = {rule["record"] for rule in rules if "record" in rule}
    assert set(re.findall(r"job:react_clip\w+:\w+", text)) == recorded
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert set(re.findall(r"ReactClip\w+", text)) == alerts
