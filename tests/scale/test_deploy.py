"""The files of deploy/, checked by the schemas and parsers of the programs that read them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import validators

from react_clip import ReactClipError, __version__
from react_clip.cli import parse_args
from react_clip.cli.serve import application

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLUSTER: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
SPEC: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]
PODS: dict[str, dict[str, Any]] = {
    "head": SPEC["rayClusterConfig"]["headGroupSpec"]["template"],
    **{group["groupName"]: group["template"] for group in SPEC["rayClusterConfig"]["workerGroupSpecs"]},
}


def test_the_cluster_follows_rays_schema() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validators.validator_for(schema)(schema).validate(CLUSTER)


@pytest.mark.parametrize("name", PODS)
def test_pods_follow_the_schema_of_kubernetes(name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **PODS[name]}
    checker.validate(pod, checker.latest_version(), strict=True)


def test_the_application_is_accepted_by_ray_serve(tmp_path: Path) -> None:
    """The configuration by Ray's own schema; import path and flags by building the application from them."""
    from ray.serve.schema import ServeDeploySchema

    [described] = ServeDeploySchema.model_validate(yaml.safe_load(SPEC["serveConfigV2"])).applications
    assert described.import_path == f"{application.__module__}:{application.__name__}"
    (tmp_path / "noise-secret").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "api-keys").write_text("fedcba9876543210\n")
    flags = {
        name: value.replace("/run/secrets/react-clip", str(tmp_path)) if isinstance(value, str) else value
        for name, value in described.args.items()
    }
    deployment = application(flags)._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == 1
    scaling = deployment._deployment_config.autoscaling_config
    [group] = SPEC["rayClusterConfig"]["workerGroupSpecs"]
    assert (scaling.min_replicas, scaling.max_replicas) == (group["minReplicas"], group["maxReplicas"])
    with pytest.raises(ReactClipError, match="--colour is no setting"):
        application({**flags, "colour": "blue"})


def test_versions_agree_everywhere() -> None:
    dockerfile = (DEPLOY / "ray.Dockerfile").read_text()
    pinned = re.search(r"ray\[serve\]==([\d.]+)", dockerfile)
    assert pinned is not None
    assert SPEC["rayClusterConfig"]["rayVersion"] == pinned[1]
    assert CLUSTER["docker"]["image"].startswith(f"rayproject/ray:{pinned[1]}-py311")
    texts = [dockerfile, (DEPLOY / "README.md").read_text(), (DEPLOY / "kuberay.yaml").read_text()]
    for text in texts:
        assert set(re.findall(r"react-clip:(\d[\d.]*\d)", text)) == {__version__}


def test_our_commands_are_accepted_by_our_parser() -> None:
    text = (DEPLOY / "README.md").read_text() + "".join(f'"{line}"\n' for line in CLUSTER["setup_commands"])
    commands = re.findall(r'(?:^|")react-clip ([^"\n]+)', text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        parse_args(shlex.split(command))
    for name in re.findall(r"deploy/([\w.-]+)", text):
        assert (DEPLOY / name).is_file(), name
