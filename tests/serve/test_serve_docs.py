"""docs/serve.md: its clients run against a real server, its tables match the program."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import serve_flags
from PIL import Image
from serve_client import KEYS

from react_clip.serve.middleware import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert found
    return [str(block) for block in found]


CURL = [block for block in blocks("sh") if "curl" in block]
PYTHON = blocks("python")


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
def test_every_curl_line_gets_its_answer(block: str, server: Any, guarded: Any, folder: Path) -> None:
    for tool in ("bash", "curl", "base64"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    url = guarded.url if "API_KEY" in block else server.url
    script = block.replace(ADDRESS, url).replace("curl ", "curl --silent --show-error --fail-with-body ")
    out = run(["bash", "-euo", "pipefail", "-c", script], folder, API_KEY=KEYS[0])
    asked = len(re.findall(r"^(?:  )?curl ", block, flags=re.MULTILINE))
    assert len(re.findall(r'"results":|"data":|"service":|^# TYPE react_clip_images_total', out, re.MULTILINE)) == asked


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_every_python_client_prints_the_servers_answer(block: str, server: Any, folder: Path) -> None:
    assert ADDRESS in block
    out = run([sys.executable, "-c", block.replace(ADDRESS, server.url)], folder).split()
    photo = (folder / "photo.jpg").read_bytes()
    if "np.linalg.norm" in block:
        assert out[0] == "(32,)"
        assert float(out[1]) == pytest.approx(1, abs=1e-5)
    else:
        [result] = server.client.post("/v1/classify", files={"images": photo}).json()["results"]
        assert out[0] == result["label"]
        assert float(out[1]) == pytest.approx(result["probability"], abs=1e-3)


def test_the_table_of_flags_is_current_and_a_stale_one_is_noticed() -> None:
    assert serve_flags.filled(TEXT) == TEXT, "run python tools/serve_flags.py"
    stale = TEXT.replace("| `REACT_CLIP_SERVE_PORT` | `8000` |", "| `REACT_CLIP_SERVE_PORT` | `1` |")
    assert stale != TEXT
    assert serve_flags.filled(stale) == TEXT


def test_every_flag_that_the_text_names_exists() -> None:
    own = TEXT.partition("## Docker")[0]
    rows = set(re.findall(r"^\| `(--[a-z-]+)` \|", TEXT, flags=re.MULTILINE))
    assert set(re.findall(r"`(--[a-z-]+)", own)) <= rows


def test_the_metrics_that_the_text_names_exist(server: Any) -> None:
    names = set(re.findall(r"react_clip_\w+_total", TEXT))
    assert len(names) >= 3
    assert names <= set(re.findall(r"^# TYPE (\w+) counter$", server.client.get("/metrics").text, flags=re.MULTILINE))


def test_the_routes_are_those_of_the_server(server: Any) -> None:
    table = TEXT.partition("| route |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(?:GET |POST )?(/[\w/.]*)`", table))
    real = set(server.client.get("/openapi.json").json()["paths"])
    assert named == real | OPEN_PATHS | {"/metrics", "/v1/demo/attack", "/v1/demo/progress"}


def test_the_open_paths_are_listed() -> None:
    [line] = re.findall(r"everything but (.*?) needs a key", TEXT.replace("\n", " "))
    assert set(re.findall(r"`(/[\w/.]*)`", line)) == OPEN_PATHS
