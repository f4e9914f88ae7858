"""Services with a small CLIP: in this process for most tests, and two of real processes for a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_client import KEYS, LABELS, REACT, SECOND_LOOK, SECRET, Server, png
from starlette.testclient import TestClient

import react_clip as rc
from programs import start_command
from react_clip.cli.serve import demo_attack
from react_clip.serve.app import create_app
from react_clip.serve.model import Model
from react_clip.serve.settings import Secrets, Settings, digest

Start = Callable[..., TestClient]


@pytest.fixture(scope="session")
def photos() -> list[bytes]:
    return [png(seed) for seed in range(12)]


@pytest.fixture(scope="session")
def encoder(tiny_folder: Path) -> rc.Encoder:
    return rc.load(tiny_folder, device="cpu")


@pytest.fixture(scope="session")
def start(encoder: rc.Encoder) -> Iterator[Start]:
    """Start a service in this process with a defence, API keys and settings; all end with the session."""
    clients: list[TestClient] = []

    def call(
        defense: rc.Defense = REACT,
        keys: tuple[str, ...] = (),
        preset: Any = None,
        shadow: rc.Defense | None = None,
        **fields: object,
    ) -> TestClient:
        settings = Settings.model_validate({"deadline": 60.0, "shadow": shadow and "a file", **fields})
        secrets = Secrets(SECRET.encode(), frozenset(digest(key.encode()) for key in keys))
        preset = preset or rc.ZeroShotClassifier(encoder, LABELS)
        model = Model(defense, preset, settings, demo_attack if settings.demo else None, shadow)
        clients.append(TestClient(create_app(settings, secrets, model=model), base_url="http://localhost"))
        clients[-1].__enter__()
        return clients[-1]

    yield call
    for client in clients:
        client.__exit__()


@pytest.fixture(scope="session")
def client(start: Start) -> TestClient:
    """A service with default settings."""
    return start()


@pytest.fixture(scope="session")
def open_client(start: Start) -> TestClient:
    """A service with SecondLook, diagnostics and a demo."""
    return start(SECOND_LOOK, demo=True)


@pytest.fixture(scope="session")
def guarded(start: Start) -> TestClient:
    """A service with API keys, small limits and fixed labels; its client sends a key."""
    client = start(keys=KEYS, fixed_labels=True, max_body=60_000, max_images=8, max_pixels=10_000)
    client.headers["authorization"] = f"Bearer {KEYS[1]}"
    return client


@pytest.fixture(scope="session")
def direct(encoder: rc.Encoder) -> Callable[..., rc.Defended]:
    """The library's answers, computed with the service's secret."""

    def call(images: list[bytes], labels: tuple[str, ...] = LABELS, guard: rc.Defense = REACT) -> rc.Defended:
        with torch.no_grad():
            return guard(rc.ZeroShotClassifier(encoder, labels), images, seed=SECRET.encode())

    return call


def _launch(tiny_folder: Path, folder: Path, defense: rc.Defense, *flags: object, **variables: str) -> Server:
    defense.save(folder / "guard.json")
    env = {
        "REACT_CLIP_SERVE_MODEL": str(tiny_folder),
        "REACT_CLIP_SERVE_LABELS": ", ".join(LABELS),
        "REACT_CLIP_SERVE_CONFIG": str(folder / "guard.json"),
        "REACT_CLIP_SERVE_PORT": "0",
        "REACT_CLIP_SERVE_THREADS": "1",  # other tests share the cores
    }
    return Server(start_command("serve", "--json", *flags, env=env | variables, log=folder / "log"))


@pytest.fixture(scope="session")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process with a demo of ReACT."""
    folder = tmp_path_factory.mktemp("serve")
    server = _launch(tiny_folder, folder, REACT, "--demo", REACT_CLIP_SERVE_SECRET=SECRET)
    yield server
    server.end()


@pytest.fixture(scope="session")
def pair(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two processes that share a model and a shadow, with API keys and a short deadline; without an own secret."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "react_clip_serve_api_keys").write_text("# for the tests\n" + "\n".join(KEYS) + "\n")
    flags = ("--workers", 2, "--secrets-dir", folder, "--deadline", 8, "--shadow", "paper")
    server = _launch(tiny_folder, folder, SECOND_LOOK, *flags, "--diagnostics")
    server.client.headers["authorization"] = f"Bearer {KEYS[0]}"
    server.client.get("/readyz").raise_for_status()
    yield server
    server.end()
