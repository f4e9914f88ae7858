"""The files of ``examples/`` run as they are, in processes of their own, with the real tower."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import nbclient
import nbformat
import pytest

from react_clip.cli.photos import bundled_photos

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = [pytest.mark.docs, pytest.mark.process, pytest.mark.usefixtures("pulled_tower")]


def test_the_notebook_runs_from_photo_to_ranking() -> None:
    notebook = nbformat.read(EXAMPLES / "attack_and_defend.ipynb", as_version=4)
    nbformat.validate(notebook)
    before = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in before), "clear the outputs first"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": EXAMPLES}}).execute()
    # Every cell shows something; the last ones are the pictures and the ranking.
    shown = [cell.outputs[-1]["data"] for cell in notebook.cells if cell.cell_type == "code"]
    answers, picture, ranking = shown[1]["text/plain"], shown[-2]["image/png"], shown[-1]["text/markdown"]
    assert re.findall(r"\d +(\w+)", answers) == ["cat", "coffee"]
    assert len(picture) > 10_000
    assert {"CLIP", "SecondLook", "ReACT (paper)"} <= set(re.findall(r"^\| ([^|]+) \| \d", ranking, re.MULTILINE))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "fastapi_app:app", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            log: list[str] = []
            while not (found := re.search(r"running on (\S+)", log[-1] if log else "")):
                log.append(server.stderr.readline())
                assert log[-1], f"the server ended: {''.join(log)}"
            with httpx.Client(base_url=found[1], timeout=300) as client:
                yield client
        finally:
            server.terminate()
            server.communicate()


def test_the_app_labels_an_upload_and_refuses_what_is_no_photo(client: httpx.Client) -> None:
    photo = bundled_photos()[0].read_bytes()
    answer = client.post("/label", files={"photo": photo})
    assert answer.status_code == 200, answer.text
    assert answer.json()["label"] == "cat"
    assert 0.5 < answer.json()["probability"] <= 1
    for data, status, words in (
        (b"no image at all", 422, "not an image"),
        (photo[:20_000], 422, "truncated or damaged"),
        (b"\x89PNG" + bytes(8 * 2**20), 413, "scale it down"),
    ):
        answer = client.post("/label", files={"photo": data})
        assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text


def test_the_search_prints_recall_before_and_after_an_attack() -> None:
    command = [sys.executable, str(EXAMPLES / "search_index.py"), *map(str, bundled_photos()[:2]), "--steps", "10"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    title, *rows = finished.stdout.splitlines()
    assert title.startswith("recall@1 of 2 photos")
    recalls = {name: (clean, attacked) for name, clean, attacked in map(str.split, rows)}
    assert recalls["plain"][0] == recalls["defended"][0] == "100%"
    assert int(recalls["plain"][1][:-1]) < int(recalls["defended"][1][:-1]), (
        "the attack works and the defence undoes it"
    )
