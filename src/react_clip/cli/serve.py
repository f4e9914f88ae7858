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
    defense_line,
    load_encoder,
    notice,
)
from react_clip.optional import require

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import Tensor

    from react_clip.serve.engine import Engine
    from react_clip.serve.settings import Settings
    from react_clip.zeroshot import ZeroShotClassifier

EXAMPLE = "react-clip serve --model openai/clip-vit-base-patch32 --labels 'cat, dog, teapot' --port 8000"
_PACKAGES = ("fastapi", "httptools", "prometheus_client", "pydantic_settings", "python_multipart", "uvicorn")


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
    secret, keys = read_credentials(settings)
    from react_clip.serve.responses import public_name
    from react_clip.serve.server import address, open_socket, serve

    def announce(url: str) -> None:
        ready = {"url": url, "pid": os.getpid(), "model": settings.name or public_name(settings.model)}
        print(json.dumps(ready) if settings.json_output else f"react-clip serves {ready['model']} on {url}", flush=True)

    if settings.engine == "ray":
        from react_clip.scale.serving import serve_on_cluster

        serve_on_cluster(partial(build_app, settings, secret, keys), settings, announce)
        return 0
    if settings.processes > 1:
        from react_clip.serve.processes import serve_in_processes

        log_to_stderr(settings)
        build = partial(build_engine, settings, secret)
        serve_in_processes(build, settings, announce, secret=secret, keys=keys)
        return 0
    listener = open_socket(settings)
    serve(build_app(settings, secret, keys), settings, listener, lambda: announce(address(listener)))
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
    build = partial(build_app, settings, *read_credentials(settings))
    return deployed(build, settings, has_gpus=has_gpus)


def read_credentials(settings: Settings) -> tuple[bytes, frozenset[bytes]]:
    """The secret, random where none is given, and the digests of the API keys; also checks the label options."""
    from react_clip.serve.settings import read_keys, read_secret

    secret, keys = read_secret(settings), read_keys(settings)
    if secret is None:
        line = "the noise is keyed by a new random secret: answers may differ after a restart, not with --secret-file"
        notice(argparse.Namespace(quiet=settings.quiet), line)
    return secret or secrets.token_bytes(32), keys


def build_app(settings: Settings, secret: bytes, keys: frozenset[bytes]) -> FastAPI:
    """The application, with a model in this process."""
    from react_clip.serve.app import create_app

    return create_app(build_engine(settings, secret), demo_attack if settings.demo else None, keys=keys)


def build_engine(settings: Settings, secret: bytes) -> Engine:
    """Load the model and start its engine."""
    from react_clip.serve.engine import Engine

    args = argparse.Namespace(**settings.model_dump())
    log_to_stderr(settings)
    set_threads(settings)
    encoder = load_encoder(args).accelerate()
    preset = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    notice(args, defense_line(guard))
    engine = Engine(encoder, guard, preset, secret=secret, settings=settings)
    engine.start()
    return engine


def demo_attack(
    clf: ZeroShotClassifier, pixels: Tensor, label: int, eps: float, progress: Callable[[int, int], None]
) -> Tensor:
    """The demo's attack: PGD with 10 steps on plain CLIP, which does not know the defence."""
    import torch

    from react_clip.attacks import PGD

    return PGD(eps=eps, steps=10)(clf, pixels.to(clf.device), torch.tensor([label]), progress=progress).images


def set_threads(settings: Settings) -> None:
    """Set the CPU threads of this process; one where the model is on a GPU and the CPU only decodes."""
    import torch

    from react_clip.encoders.loading import resolve_device

    on_cpu = resolve_device(settings.device).type == "cpu"
    torch.set_num_threads(settings.threads or (torch.get_num_threads() if on_cpu else 1))


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
