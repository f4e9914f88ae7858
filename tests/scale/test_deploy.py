"""The files in deploy/ against the schemas of those who read them: Ray's own, Kubernetes' own, and KubeRay's fields."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import Draft202012Validator, validators

from programs import find_tool
from react_clip import ReactClipError, __version__
from react_clip.cli import parse_args
from react_clip.cli.serve import application

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLUSTER: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
SPEC: dict[str, Any] = SERVICE["spec"]
SERVE: dict[str, Any] = yaml.safe_load(SPEC["serveConfigV2"])
GROUPS: dict[str, dict[str, Any]] = {
    "head": SPEC["rayClusterConfig"]["headGroupSpec"],
    **{group["groupName"]: group for group in SPEC["rayClusterConfig"]["workerGroupSpecs"]},
}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """A mapping with these keys and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


TEXT, WHOLE, SWITCH, ANY = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "object"},
)
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
GROUP = {"rayStartParams": PARAMETERS, "template": ANY, "resources": PARAMETERS, "labels": PARAMETERS}
# Written from the documented fields of ray.io/v1 (KubeRay publishes its schema as no package); pods are checked by
# Kubernetes' own schema below.
RAY_SERVICE = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=closed(
        ["name"], name={"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,40}[a-z0-9])?$"}, labels=PARAMETERS
    ),
    spec=closed(
        ["serveConfigV2", "rayClusterConfig"],
        serveConfigV2=TEXT,
        excludeHeadPodFromServeSvc=SWITCH,
        rayClusterDeletionDelaySeconds=WHOLE,
        upgradeStrategy=ANY,
        serveService=ANY,
        rayClusterConfig=closed(
            ["headGroupSpec"],
            rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            enableInTreeAutoscaling=SWITCH,
            autoscalerOptions=closed([], idleTimeoutSeconds=WHOLE, resources=ANY, upscalingMode=TEXT, version=TEXT),
            headGroupSpec=closed(["template"], **GROUP, serviceType=TEXT, headService=ANY, enableIngress=SWITCH),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    ["groupName", "minReplicas", "maxReplicas", "template"],
                    **GROUP,
                    groupName=TEXT,
                    replicas=WHOLE,
                    minReplicas=WHOLE,
                    maxReplicas=WHOLE,
                    idleTimeoutSeconds=WHOLE,
                    numOfHosts=WHOLE,
                    suspend=SWITCH,
                ),
            },
        ),
    ),
)


# ---------------------------------------------------------------------- ray-cluster.yaml


def test_the_cluster_follows_rays_schema() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validators.validator_for(schema)(schema).validate(CLUSTER)


def test_workers_have_gpus_and_the_head_does_no_work() -> None:
    kinds = CLUSTER["available_node_types"]
    assert kinds[CLUSTER["head_node_type"]]["resources"] == {"CPU": 0}
    workers = [kind for name, kind in kinds.items() if name != CLUSTER["head_node_type"]]
    assert all(kind["resources"]["GPU"] >= 1 and kind["min_workers"] >= 1 for kind in workers)
    assert sum(kind["max_workers"] for kind in workers) <= CLUSTER["max_workers"]
    assert "--num-cpus=0" in CLUSTER["head_start_ray_commands"][-1]


def test_the_pulled_model_and_the_extras_exist() -> None:
    [install, pull] = CLUSTER["setup_commands"]
    parse_args(shlex.split(pull)[1:])
    extras = re.search(r"\[([^]]+)\]", install)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras[1].split(","))


# ---------------------------------------------------------------------- kuberay.yaml


def test_the_service_has_kuberays_fields() -> None:
    Draft202012Validator(RAY_SERVICE).validate(SERVICE)
    spoilt = {**SERVICE, "spec": {**SPEC, "serveConfig": {}}}
    assert not Draft202012Validator(RAY_SERVICE).is_valid(spoilt)


@pytest.mark.parametrize("name", GROUPS)
def test_the_pods_follow_kubernetes_schema(name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **GROUPS[name]["template"]}
    checker.validate(pod, checker.latest_version(), strict=True)
    pod["spec"] = {**pod["spec"], "container": []}
    with pytest.raises(checker.ValidationError):
        checker.validate(pod, checker.latest_version(), strict=True)


@pytest.mark.parametrize("name", GROUPS)
def test_the_pods_are_locked_up_and_probed(name: str) -> None:
    pod = GROUPS[name]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = re.findall(r"^USER (\d+):\d+$", (DEPLOY / "ray.Dockerfile").read_text(), re.MULTILINE)[-1]
    assert pod["securityContext"]["runAsUser"] == int(user) > 0
    assert pod["terminationGracePeriodSeconds"] > parse_args(["serve"]).grace + 5
    [container] = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"] == f"react-clip:{__version__}-ray"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    for key in ("secret_file", "api_key_file"):
        assert any(SERVE["applications"][0]["args"][key].startswith(f"{place}/") for place in places)


def test_requests_go_where_replicas_are() -> None:
    [container] = GROUPS["gpu"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": SERVE["http_options"]["port"]}
    assert container["ports"] == [{"name": "serve", "containerPort": SERVE["http_options"]["port"]}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert GROUPS["head"]["rayStartParams"]["num-cpus"] == "0"
    assert SPEC["excludeHeadPodFromServeSvc"] is True
    given = SERVE["applications"][0]["args"]
    assert (GROUPS["gpu"]["minReplicas"], GROUPS["gpu"]["maxReplicas"]) == (given["replicas"], given["max_replicas"])


def test_the_application_is_what_ray_serve_deploys(tmp_path: Path) -> None:
    """Its configuration by Ray's own schema, its import path and its arguments by using them."""
    from ray.serve.schema import ServeDeploySchema

    [described] = ServeDeploySchema.model_validate(SERVE).applications
    assert described.import_path == f"{application.__module__}:{application.__name__}"
    (tmp_path / "noise-secret").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "api-keys").write_text("fedcba9876543210\n")
    given = {
        name: value.replace("/run/secrets/react-clip", str(tmp_path)) if isinstance(value, str) else value
        for name, value in described.args.items()
    }
    deployment = application(given)._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == 1
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 8)
    with pytest.raises(ReactClipError, match="unrecognized arguments: --colour=blue"):
        application({**given, "colour": "blue"})


# ---------------------------------------------------------------------- the image and the README


def test_one_version_of_ray_everywhere() -> None:
    pinned = re.search(r"ray\[data,serve\]==([\d.]+)", (DEPLOY / "ray.Dockerfile").read_text())
    assert pinned is not None
    assert SPEC["rayClusterConfig"]["rayVersion"] == pinned[1]
    assert CLUSTER["docker"]["image"].startswith(f"rayproject/ray:{pinned[1]}-py311")


def test_the_image_builds_on_the_services_own() -> None:
    text = (DEPLOY / "ray.Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == [f"react-clip:{__version__}"]
    finished = subprocess.run(
        [find_tool("hadolint"), "--no-color", DEPLOY / "ray.Dockerfile"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout


def test_the_commands_of_the_readme_are_ours() -> None:
    text = (DEPLOY / "README.md").read_text()
    commands = re.findall(r'(?:^|")react-clip ([^"\n]+)', text, re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        args = parse_args(shlex.split(command))
        assert args.engine == "ray"
    assert set(re.findall(r"react-clip:([\d.]+)", text)) == {__version__}
    for name in re.findall(r"deploy/([\w.-]+)", text):
        assert (DEPLOY / name).is_file(), name
