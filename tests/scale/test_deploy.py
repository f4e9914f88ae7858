"""The files of deploy/ for clusters, checked by what reads them: Ray's schemas, our parser, our settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import validators

from react_clip import ReactClipError
from react_clip.cli.serve import application

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CLUSTER: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
SPEC: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]


def test_ray_accepts_the_cluster_and_the_application(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validators.validator_for(schema)(schema).validate(CLUSTER)
    [described] = ServeDeploySchema.model_validate(yaml.safe_load(SPEC["serveConfigV2"])).applications
    assert described.import_path == f"{application.__module__}:{application.__name__}"
    (tmp_path / "react_clip_serve_secret").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "react_clip_serve_api_keys").write_text("fedcba9876543210\n")
    settings = described.args | {"secrets_dir": str(tmp_path)}
    deployment = application(settings)._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == 1
    [scaled] = described.deployments
    assert scaled.name == deployment.name
    [group] = SPEC["rayClusterConfig"]["workerGroupSpecs"]
    limits = scaled.autoscaling_config
    assert (limits["min_replicas"], limits["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])
    with pytest.raises(ReactClipError, match="colour"):
        application({**settings, "colour": "blue"})


def test_versions_of_ray_are_one() -> None:
    [pinned] = re.findall(r"ray\[serve\]==([\d.]+)", (DEPLOY / "ray.Dockerfile").read_text())
    assert SPEC["rayClusterConfig"]["rayVersion"] == pinned
    assert CLUSTER["docker"]["image"].startswith(f"rayproject/ray:{pinned}-py311")
