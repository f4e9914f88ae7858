"""The container's files without a container engine: every step of them is checked against the real thing it names."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from programs import find_tool
from react_clip import __version__
from react_clip.cli import parse_args
from react_clip.cli.serve import _read_switches
from react_clip.serve.settings import ENVIRONMENT, Settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """One FROM and the instructions that follow it."""

    image: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for kind, rest in self.steps if kind == instruction]

    def one(self, instruction: str) -> str:
        [rest] = self.all(instruction)
        return rest

    @property
    def variables(self) -> dict[str, str]:
        return dict(word.split("=", 1) for rest in self.all("ENV") for word in shlex.split(rest))

    def exec_form(self, instruction: str) -> list[str]:
        """The words of a command in brackets: a shell between would keep the signals to itself."""
        words = json.loads(self.one(instruction).partition("CMD ")[2] or self.one(instruction))
        assert isinstance(words, list)
        return words


def read_dockerfile() -> list[Stage]:
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        kind, _, rest = line.partition(" ")
        if kind == "FROM":
            image, _, name = rest.partition(" AS ")
            stages.append(Stage(image, name))
        else:
            stages[-1].steps.append((kind, rest.strip()))
    return stages


STAGES = read_dockerfile()
BUILD, FINAL = STAGES
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICE: dict[str, Any] = COMPOSE["services"]["serve"]


def is_ignored(path: str) -> bool:
    """Docker's rule: the last pattern that matches the path or a folder above it decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, str(part)) for part in (Path(path), *Path(path).parents[:-1])):
            ignored = not line.startswith("!")
    return ignored


def copied_sources() -> list[str]:
    return [source for rest in BUILD.all("COPY") for source in rest.split()[:-1]]


# ---------------------------------------------------------------------- the Dockerfile


def test_images_are_pinned_to_a_version_that_the_package_supports() -> None:
    assert BUILD.image == FINAL.image
    name, _, tag = FINAL.image.partition(":")
    version = re.match(r"(\d+\.\d+)-slim", tag)
    assert name == "python"
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]


def test_every_copied_file_exists_and_reaches_the_build() -> None:
    sources = copied_sources()
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    for rest in FINAL.all("COPY"):
        assert rest.startswith(f"--from={BUILD.name} "), "the final image takes finished things only"


def test_nothing_else_reaches_the_build() -> None:
    kept = {path.name for path in ROOT.iterdir() if not is_ignored(path.name)}
    assert kept == set(copied_sources())
    for path in ("secrets/api-keys", ".git/config", ".venv/bin/python", ".env", "tests/conftest.py"):
        assert is_ignored(path), path
    assert is_ignored("src/react_clip/__pycache__/x.pyc")
    assert not is_ignored("src/react_clip/serve/app.py")


def test_the_extras_exist() -> None:
    [install] = [rest for rest in BUILD.all("RUN") if "pip install" in rest]
    named = re.search(r"'\.\[([^]]+)\]'", install)
    assert named is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named[1].split(",")) <= set(extras)


def test_the_copied_files_are_enough_for_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
    context = tmp_path / "source"
    context.mkdir()
    for source in copied_sources():
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, context / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, context / source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    built = subprocess.run([*command, tmp_path, context], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"react_clip-{__version__}-")


def test_the_pulled_model_is_what_is_served() -> None:
    [pull] = [rest for rest in BUILD.all("RUN") if "react-clip pull" in rest]
    args = parse_args(shlex.split(pull[pull.index("react-clip pull") :])[1:])
    assert args.model == parse_args(["serve"]).model
    cache = FINAL.variables["REACT_CLIP_CACHE"]
    assert BUILD.variables["REACT_CLIP_CACHE"] == cache
    assert any(rest.endswith(f"{cache} {cache}") for rest in FINAL.all("COPY"))
    assert FINAL.one("VOLUME") == cache


def test_the_user_is_not_root_and_owns_the_cache() -> None:
    user = FINAL.one("USER")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert f"--uid {uid} " in FINAL.one("RUN")
    assert any(f"--chown={user} " in rest for rest in FINAL.all("COPY"))
    kinds = [kind for kind, _ in FINAL.steps]
    assert "RUN" not in kinds[kinds.index("USER") :]


def test_the_entrypoint_is_a_command_line_that_the_parser_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = FINAL.exec_form("ENTRYPOINT")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert program in scripts
    assert not FINAL.all("CMD")
    for name, value in (FINAL.variables | SERVICE["environment"]).items():
        monkeypatch.setenv(name, value)
    args = parse_args([*words, *SERVICE["command"]])
    _read_switches(args)
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    assert settings.host == "0.0.0.0"
    assert settings.port == int(FINAL.one("EXPOSE"))


@pytest.mark.parametrize("variables", [FINAL.variables, SERVICE["environment"]], ids=["Dockerfile", "compose"])
def test_every_variable_is_one_that_the_service_reads(variables: dict[str, str]) -> None:
    ours = [name for name in variables if name.startswith(ENVIRONMENT)]
    assert ours
    for name in ours:
        assert name.removeprefix(ENVIRONMENT).lower() in Settings.__dataclass_fields__, name


def test_no_layer_holds_a_secret() -> None:
    words = re.compile(r"secret|key|token|password", re.IGNORECASE)
    for stage in STAGES:
        assert not stage.all("ARG"), "arguments stay in the history of an image"
        assert not stage.all("ADD")
        assert not [name for name in stage.variables if words.search(name)]
        for rest in stage.all("COPY"):
            assert not words.search(rest)
        for rest in stage.all("RUN"):
            assert not words.search(re.sub(r"--mount=type=secret\S*", "", rest)), "secrets are mounted, not written"


def test_the_health_check_tells_a_living_server_from_a_dead_one(launch: Any) -> None:
    program, *words = FINAL.exec_form("HEALTHCHECK")
    assert program == "python"
    server = launch()
    port = server.url.rpartition(":")[2]
    # A proxy for everything must not stand between a container and itself.
    variables = os.environ | {"REACT_CLIP_SERVE_PORT": port, "http_proxy": "http://127.0.0.1:9"}

    def check() -> int:
        finished = subprocess.run([sys.executable, *words], env=variables, capture_output=True, timeout=20, check=False)
        return finished.returncode

    assert check() == 0
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert check() != 0
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert check() == 0
    assert server.stop() == 0
    assert check() != 0


def test_the_health_check_waits_less_than_docker_does() -> None:
    rest = FINAL.one("HEALTHCHECK")
    patience = re.search(r"--timeout=(\d+)s", rest)
    own = re.search(r"timeout=(\d+)\)", rest)
    assert patience is not None
    assert own is not None
    assert int(own[1]) < int(patience[1])


# ---------------------------------------------------------------------- compose.yaml


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_service_is_locked_up() -> None:
    assert SERVICE["read_only"] is True
    assert SERVICE["cap_drop"] == ["ALL"]
    assert "cap_add" not in SERVICE
    assert "privileged" not in SERVICE
    assert SERVICE["security_opt"] == ["no-new-privileges:true"]
    assert SERVICE["mem_limit"]
    assert SERVICE["mem_limit"] == SERVICE["memswap_limit"], "no swap beside it"
    assert 0 < SERVICE["pids_limit"] <= 1024
    assert SERVICE["environment"]["REACT_CLIP_SERVE_THREADS"] == str(SERVICE["cpus"])
    [temporary] = SERVICE["tmpfs"]
    assert temporary.startswith("/tmp:")
    assert SERVICE["volumes"] == [f"cache:{FINAL.variables['REACT_CLIP_CACHE']}"]
    assert set(COMPOSE["volumes"]) == {"cache"}


def test_only_this_machine_reaches_the_port() -> None:
    port = FINAL.one("EXPOSE")
    assert SERVICE["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_it_may_stop_for_longer_than_its_grace() -> None:
    assert seconds(SERVICE["stop_grace_period"]) > Settings().grace + 5
    assert SERVICE["init"] is True
    stated = re.findall(
        r"--stop-timeout (\d+)", (ROOT / "Dockerfile").read_text() + (ROOT / "docs/serve.md").read_text()
    )
    assert stated
    assert all(int(value) > Settings().grace + 5 for value in stated)


def test_secrets_are_files_outside_of_the_image() -> None:
    assert set(SERVICE["secrets"]) == set(COMPOSE["secrets"])
    for name, secret in COMPOSE["secrets"].items():
        assert is_ignored(secret["file"].removeprefix("./"))
        assert f"/run/secrets/{name}" in SERVICE["environment"].values()


def test_the_image_carries_the_version() -> None:
    assert SERVICE["image"] == f"react-clip:{__version__}"
    named = re.findall(r"react-clip:(\S+)", (ROOT / "Dockerfile").read_text() + (ROOT / "docs/serve.md").read_text())
    assert set(named) == {__version__}


def test_the_service_works_as_compose_starts_it(launch: Any, tmp_path: Path) -> None:
    """The variables of the image and of compose, with the secrets of this test and a free port."""
    (tmp_path / "noise-secret").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "api-keys").write_text("fedcba9876543210\n")
    given = {name: value for name, value in (FINAL.variables | SERVICE["environment"]).items() if ENVIRONMENT in name}
    given = {name: value.replace("/run/secrets", str(tmp_path)) for name, value in given.items()}
    server = launch("--host", "127.0.0.1", "--port", 0, env=given)
    assert server.client.get("/readyz").status_code == 200
    assert server.client.get("/v1/info").status_code == 401
    assert server.client.get("/v1/info", headers={"x-api-key": "fedcba9876543210"}).status_code == 200
    assert server.stop() == 0


# ---------------------------------------------------------------------- other people's checkers, where installed


def test_hadolint_finds_nothing() -> None:
    finished = subprocess.run(
        [find_tool("hadolint"), "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout


def test_compose_follows_the_official_schema() -> None:
    command = [find_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(ROOT / "compose.yaml")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
