"""The workflows and the hooks name what the repository has."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.docs
@pytest.mark.smoke
def test_workflows_run_what_is_there_and_pin_what_is_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}, "each job asks for what it needs"
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job or "uses" in job
            for step in job.get("steps", []):
                assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), "actions are pinned to a commit"
                command = step.get("run", "")
                for target in command.split()[1:] if command.startswith("make ") else []:
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested = ci["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">={tested[0]}"
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        assert shutil.which(hook["entry"].split()[0], path=str(Path(sys.executable).parent))
