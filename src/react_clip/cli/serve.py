"""``react-clip serve``: the defence as an HTTP service."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from react_clip.cli.common import (
    build_classifier,
    build_guard,
    check_label_options,
    defense_line,
    load_encoder,
    notice,
)
from react_clip.environment import has_nvidia_mps
from react_clip.optional import require

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI
    from torch import Tensor

    from react_clip.serve.settings import Settings
    from react_clip.zeroshot import ZeroShotClassifier

EXAMPLE = "react-clip serve --model openai/clip-vit-base-patch32 --labels 'cat, dog, teapot' --port 8000"
_PACKAGES = ("fastapi", "prometheus_client", "pydantic_settings", "python_multipart", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one option per field of ``Settings``, which reads and checks the values together with the environment."""
    for package in _PACKAGES:
        require(package, "serving", extra="serve")
    from react_clip.serve.settings import FLAGLESS, Settings, flag, variable

    for name, setting in Settings.model_fields.items():
        if name in (*FLAGLESS, "json_output", "quiet"):
            continue
        default = f" ({setting.default})" if setting.default not in (None, False) else ""
        action = "store_true" if setting.annotation is bool else "append" if name == "template" else "store"
        text = f"{setting.description}{default} [${variable(name)}]"
        parser.add_argument(flag(name), action=action, default=argparse.SUPPRESS, help=text)


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from the flags that were given and from the environment."""
    from react_clip.serve.settings import Settings, read_settings

    given = {name: value for name, value in vars(args).items() if name in Settings.model_fields and value is not False}
    return read_settings({**given, **({"json_output": True} if args.json else {})})


def run(args: argparse.Namespace) -> int:
    """Load the model, listen and answer; returns 0 after SIGTERM or SIGINT."""
    settings = settings_of(args)
    build = prepare(settings)
    from react_clip.serve.app import public_name
    from react_clip.serve.server import address, open_socket, serve

    def announce(url: str) -> None:
        ready = {"url": url, "pid": os.getpid(), "model": settings.name or public_name(settings.model)}
        print(json.dumps(ready) if settings.json_output else f"react-clip serves {ready['model']} on {url}", flush=True)

    if settings.engine == "ray":
        from react_clip.scale.serving import serve_on_cluster

        serve_on_cluster(build, settings, announce)
        return 0
    if settings.processes > 1:
        from react_clip.serve.processes import serve_in_processes

        log_to_stderr(settings)
        serve_in_processes(build, settings, announce)
        return 0
    listener = open_socket(settings)
    serve(build(), settings, listener, lambda: announce(address(listener)))
    return 0


def application(flags: dict[str, Any]) -> Any:
    """The service for Ray Serve's own tools: ``import_path: react_clip.cli.serve:application``.

    ``flags`` are settings by name, such as ``{"replicas": 2}``; environment variables are read too.
    """
    import ray

    from react_clip.scale.serving import application as deployed
    from react_clip.serve.settings import read_settings

    settings = read_settings({"engine": "ray", **flags})
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return deployed(prepare(settings), settings, has_gpus=has_gpus)


def prepare(settings: Settings) -> Callable[..., FastAPI]:
    """Read the secret and the API keys, and return a function that builds the application in any process."""
    from react_clip.serve.settings import read_keys, read_secret

    check_label_options(argparse.Namespace(**settings.model_dump()))
    secret, keys = read_secret(settings), read_keys(settings)
    if secret is None:
        line = "the noise is keyed by a new random secret: answers may differ after a restart, not with --secret-file"
        notice(argparse.Namespace(quiet=settings.quiet), line)
    return partial(build_app, settings, secret or secrets.token_bytes(32), keys)


def build_app(settings: Settings, secret: bytes, keys: frozenset[bytes], *, quiet: bool = False) -> FastAPI:
    """Load the model, start the engine and return the application; with ``quiet`` no notices are printed."""
    from react_clip.serve.app import create_app
    from react_clip.serve.engine import Engine

    args = argparse.Namespace(**settings.model_dump() | {"quiet": settings.quiet or quiet})
    log_to_stderr(settings)
    set_threads(settings)
    encoder = load_encoder(args).accelerate()
    preset = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    notice(args, defense_line(guard))
    if line := sharing_line(settings.processes, encoder.device):
        notice(args, line)
    engine = Engine(encoder, guard, preset, secret=secret, settings=settings)
    engine.start()
    return create_app(engine, demo_attack if settings.demo else None, keys=keys)


def demo_attack(
    clf: ZeroShotClassifier, pixels: Tensor, label: int, eps: float, progress: Callable[[int, int], None]
) -> Tensor:
    """The demo's attack: PGD with 10 steps on plain CLIP, which does not know the defence."""
    import torch

    from react_clip.attacks import PGD

    return PGD(eps=eps, steps=10)(clf, pixels.to(clf.device), torch.tensor([label]), progress=progress).images


def set_threads(settings: Settings) -> None:
    """Divide the CPU threads among the processes; one each where the model is on a GPU and the CPU only decodes."""
    import torch

    from react_clip.encoders.loading import resolve_device

    on_cpu = resolve_device(settings.device).type == "cpu"
    threads = settings.threads or (torch.get_num_threads() if on_cpu else 1)
    torch.set_num_threads(max(1, threads // settings.processes))


def sharing_line(processes: int, device: torch.device) -> str | None:
    """A hint to start NVIDIA's MPS, for several processes on one GPU without it; None for all others."""
    if processes == 1 or device.type != "cuda" or has_nvidia_mps():
        return None
    return f"{processes} processes take turns on the GPU; NVIDIA's MPS lets them share it: nvidia-cuda-mps-control -d"


def log_to_stderr(settings: Settings) -> None:
    """Log the service's own lines at the level of the settings."""
    level = "warning" if settings.quiet else settings.log_level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {"react_clip.serve": level.upper(), "uvicorn": "ERROR", "PIL": "CRITICAL", "python_multipart": "CRITICAL"}
    for name, chosen in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(chosen)
