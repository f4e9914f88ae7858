"""docs/serve.md: its clients run against a real server, its tables say what the program says."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from react_clip.serve.gatekeeper import OPEN_PATHS
from react_clip.serve.settings import Settings, variable

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
KEY = "a-key-of-some-length"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert found
    return [str(block) for block in found]


CURL = [block for block in blocks("sh") if "curl" in block]
PYTHON = blocks("python")


@pytest.fixture(scope="module")
def documented(launch: Any) -> Any:
    return launch("--open-metrics")


@pytest.fixture
def folder(tmp_path: Path, photos: list[bytes]) -> Path:
    for name, photo in (("photo.jpg", photos[0]), ("other.jpg", photos[1])):
        Image.open(io.BytesIO(photo)).save(tmp_path / name, "JPEG")
    return tmp_path


def run(command: list[str], folder: Path, **variables: str) -> str:
    finished = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("block", CURL, ids=range(len(CURL)))
def test_every_curl_line_gets_its_answer(block: str, documented: Any, launch: Any, folder: Path) -> None:
    for tool in ("bash", "curl", "base64"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    server = launch(env={"REACT_CLIP_SERVE_API_KEYS": KEY}) if "API_KEY" in block else documented
    script = block.replace(ADDRESS, server.url).replace("curl ", "curl --silent --show-error --fail-with-body ")
    out = run(["bash", "-euo", "pipefail", "-c", script], folder, API_KEY=KEY)
    asked = len(re.findall(r"^(?:  )?curl ", block, flags=re.MULTILINE))
    assert len(re.findall(r'"results":|"data":|"service":|^# TYPE react_clip_images_total', out, re.MULTILINE)) == asked


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_every_python_client_gets_its_answer(block: str, documented: Any, folder: Path) -> None:
    assert ADDRESS in block
    out = run([sys.executable, "-c", block.replace(ADDRESS, documented.url)], folder)
    assert out.strip()
    if "np.linalg.norm" in block:
        assert float(out.split()[-1]) == pytest.approx(1, abs=1e-5)


def test_the_table_of_flags_is_the_programs() -> None:
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "serve_flags.py"), "--check"],
        env=os.environ | {"REACT_CLIP_SERVE_PORT": "9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    rows = re.findall(r"^\| `--([a-z-]+)` \| `(\w+)` \|", TEXT, flags=re.MULTILINE)
    assert {row.name for row in dataclasses.fields(Settings)} <= {flag.replace("-", "_") for flag, _ in rows}
    assert all(name == variable(flag) for flag, name in rows)


def test_a_stale_table_is_noticed() -> None:
    path = ROOT / "tools" / "serve_flags.py"
    spec = importlib.util.spec_from_file_location("serve_flags", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.filled(TEXT) == TEXT
    stale = TEXT.replace(
        "| `--port` | `REACT_CLIP_SERVE_PORT` | `8000` |", "| `--port` | `REACT_CLIP_SERVE_PORT` | `1` |"
    )
    assert stale != TEXT
    assert tool.filled(stale) == TEXT


def test_every_flag_that_the_text_names_exists() -> None:
    own = TEXT.partition("## Docker")[0]
    rows = set(re.findall(r"^\| `(--[a-z-]+)` \|", TEXT, flags=re.MULTILINE))
    assert set(re.findall(r"`(--[a-z-]+)", own)) <= rows


def test_the_metrics_are_those_of_the_server(documented: Any) -> None:
    text = documented.client.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.MULTILINE))
    real = {name for name in kinds if not name.endswith("_created")}
    assert set(re.findall(r"^\| `(react_clip_\w+)", TEXT, flags=re.MULTILINE)) == real
    for name, meaning in re.findall(r"^\| `(react_clip_\w+)\S*` \| ([^|]+) \|", TEXT, flags=re.MULTILINE):
        assert meaning.startswith("histogram") == (kinds[name] == "histogram"), name


def test_the_routes_are_those_of_the_server(documented: Any) -> None:
    table = TEXT.partition("| route |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(?:GET |POST )?(/[\w/.]*)`", table))
    real = set(documented.client.get("/openapi.json").json()["paths"])
    assert named == real | OPEN_PATHS | {"/metrics", "/v1/demo/attack"}


def test_the_open_paths_are_listed() -> None:
    [line] = re.findall(r"everything but (.*?) needs a key", TEXT.replace("\n", " "))
    assert set(re.findall(r"`(/[\w.]*)`", line)) == OPEN_PATHS
