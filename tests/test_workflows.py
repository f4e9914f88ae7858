"""Workflows, hooks for commits and the citation are valid and in line with the rest of the repository."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from programs import find_tool

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = [str(path.relative_to(ROOT)) for path in sorted(FOLDER.glob("*.yml"))]
CI: dict[str, Any] = yaml.safe_load((FOLDER / "ci.yml").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
        ("check-jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout", *WORKFLOWS),
        ("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"),
        # Permissions, injected values, actions that are not pinned to a commit.
        ("zizmor", "--offline", "--no-progress", "--min-severity", "medium", *WORKFLOWS),
        ("pre-commit", "validate-config", ".pre-commit-config.yaml"),
    ],
    ids=["schema", "timeouts", "citation", "security", "pre-commit"],
)
def test_linters_find_nothing(words: tuple[str, ...]) -> None:
    tool, *rest = words
    finished = subprocess.run([find_tool(tool), *rest], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_ci_runs_every_python_that_the_package_names_on_both_architectures() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = CI["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    assert matrix["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]


def test_ci_runs_targets_that_make_has() -> None:
    commands = [step.get("run", "") for job in CI["jobs"].values() for step in job["steps"]]
    targets = {target for command in commands if command.startswith("make ") for target in command.split()[1:]}
    assert {"lint", "types", "unit", "docs"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_hooks_use_tools_of_the_test_environment() -> None:
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        assert find_tool(hook["entry"].split()[0])
