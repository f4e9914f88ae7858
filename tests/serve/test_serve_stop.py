"""One server as compose.yaml starts it: health check, overload, and a stop that answers every accepted request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from serve_client import KEYS, check_error

import react_clip as rc
from programs import find_tool
from react_clip.serve.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICE: dict[str, Any] = COMPOSE["services"]["serve"]
KEY = {"x-api-key": KEYS[0]}


@pytest.fixture(scope="module")
def slow(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with compose's environment variables, a slow defence and a short queue."""
    folder = tmp_path_factory.mktemp("secrets")
    rc.ReACT(views=400, tau=None).save(folder / "slow.json")
    (folder / "noise-secret").write_text("0123456789abcdef0123456789abcdef\n")
    (folder / "api-keys").write_text(KEYS[0] + "\n")
    env = {name: value.replace("/run/secrets", str(folder)) for name, value in SERVICE["environment"].items()}
    limits = ("--batch", 1, "--max-images", 4, "--queue", 4, "--deadline", 300, "--grace", 300)
    server = launch("--config", folder / "slow.json", "--threads", 1, *limits, env=env)
    server.client.headers.update(KEY)
    return server


def post(server: Any, photos: list[bytes]) -> httpx.Response:
    """One request on a connection of its own."""
    files = [("images", ("x", photo)) for photo in photos]
    headers = KEY | {"connection": "close"}
    return httpx.post(f"{server.url}/v1/classify", files=files, timeout=300, headers=headers)


def test_compose_gives_the_service_its_keys(slow: Any) -> None:
    assert httpx.get(f"{slow.url}/readyz").status_code == 200
    assert httpx.get(f"{slow.url}/v1/info").status_code == 401
    assert slow.client.get("/v1/info").status_code == 200


def test_the_health_check_of_the_image(slow: Any) -> None:
    [words] = re.findall(r'^    CMD (\["python", .*\])$', DOCKERFILE, re.MULTILINE)
    # A proxy for everything must not stand between a container and itself.
    env = os.environ | {"REACT_CLIP_SERVE_PORT": slow.url.rpartition(":")[2], "http_proxy": "http://127.0.0.1:9"}

    def check() -> int:
        return subprocess.run([sys.executable, *json.loads(words)[1:]], env=env, capture_output=True).returncode

    assert check() == 0
    slow.command.signal(signal.SIGSTOP)
    try:
        assert check() != 0
    finally:
        slow.command.signal(signal.SIGCONT)


def test_a_full_queue_is_503_with_retry_after(slow: Any, photos: list[bytes]) -> None:
    ready: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            ready.append(httpx.get(f"{slow.url}/readyz", timeout=60).status_code)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(slow, photos[:4]), range(8)))
    over.set()
    watcher.join()
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            check_error(answer, 503, "queue")
            assert answer.headers["retry-after"] == "1"
        else:
            assert len(answer.json()["results"]) == 4
    assert 503 in ready, "a saturated service is not ready"
    assert slow.client.get("/readyz").status_code == 200
    assert 'rejected_total{reason="overloaded"}' in slow.client.get("/metrics").text


def test_sigterm_answers_accepted_requests_and_exits_with_0(slow: Any, photos: list[bytes]) -> None:
    """The last test with this server."""
    slow.client.headers["connection"] = "close"
    before = slow.metric("react_clip_requests_in_flight")
    with ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(post, slow, [photos[seed]]) for seed in range(4)]
        # Unanswered requests are counted first, so that one which has not arrived is missing from those in flight.
        while before + sum(not a.done() for a in accepted) > slow.metric("react_clip_requests_in_flight"):
            time.sleep(0.01)
        slow.command.signal(signal.SIGTERM)
        try:
            while (late := post(slow, photos[:1])).status_code == 200:
                continue
            check_error(late, 503, "stopping")
        except httpx.TransportError:
            pass  # the port is closed already
        assert [answer.result().status_code for answer in accepted] == [200] * 4
    slow.command.process.join(300)
    assert slow.command.process.exitcode == 0


# ---------------------------------------------------------------------- the container's files


def test_the_container_sets_only_settings_that_exist() -> None:
    names = {name.removeprefix(PREFIX).lower() for name in SERVICE["environment"]}
    names |= {name.lower() for name in re.findall(rf"{PREFIX}(\w+)=", DOCKERFILE)}
    assert names <= set(Settings.model_fields)
    for name in COMPOSE["secrets"]:
        assert f"/run/secrets/{name}" in SERVICE["environment"].values()


def test_containers_have_longer_to_stop_than_the_service() -> None:
    texts = DOCKERFILE + (ROOT / "docs" / "serve.md").read_text()
    stated = [int(value) for value in re.findall(r"--stop-timeout (\d+)", texts)]
    stated.append(int(SERVICE["stop_grace_period"].removesuffix("s")))
    assert len(stated) >= 3
    assert min(stated) > Settings().grace + 5
    assert set(re.findall(r"react-clip:([\d.]+)", texts + SERVICE["image"])) == {rc.__version__}


@pytest.mark.parametrize(
    "words",
    [
        ("hadolint", "--no-color", "Dockerfile", "deploy/ray.Dockerfile"),
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"),
    ],
)
def test_linters_find_nothing(words: tuple[str, ...]) -> None:
    tool, *rest = words
    finished = subprocess.run([find_tool(tool), *rest], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
