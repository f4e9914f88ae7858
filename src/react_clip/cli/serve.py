"""``react-clip serve``: the defence as an HTTP service."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip import serve
from react_clip.cli.common import build_guard, load_defended, notice
from react_clip.cli.options import DEFENSES
from react_clip.optional import require

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import Tensor

EXAMPLE = "react-clip serve --model openai/clip-vit-base-patch32 --labels 'cat, dog, teapot' --port 8000"
_PACKAGES = ("fastapi", "httptools", "prometheus_client", "pydantic_settings", "python_multipart", "uvicorn", "zmq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one option per field of ``Settings``, which reads and checks the values together with the environment."""
    for package in _PACKAGES:
        require(package, "serving", extra="serve")
    for name, setting in serve.Settings.model_fields.items():
        default = f" ({setting.default})" if setting.default not in (None, False) else ""
        action = (
            "store_true" if setting.annotation is bool else "append" if name in ("template", "cors_origin") else "store"
        )
        text = f"{setting.description}{default} [${serve.variable(name)}]".replace("%", "%%")
        parser.add_argument(serve.flag(name), action=action, default=argparse.SUPPRESS, help=text)


def run(args: argparse.Namespace) -> int:
    """Load the model, listen and answer; returns 0 after SIGTERM or SIGINT."""
    settings = settings_of(args)
    if args.quiet and settings.log_level == "info":
        settings = settings.model_copy(update={"log_level": "warning"})
    serve.log_to_stderr(settings)
    secrets = serve.read_secrets(settings)
    if secrets.drawn:
        notice(args, "the noise is keyed by a new random secret: answers may differ after a restart (--secrets-dir)")

    def announce(url: str) -> None:
        ready = {"url": url, "pid": os.getpid(), "model": serve.public_name(settings.model)}
        print(json.dumps(ready) if args.json else f"react-clip serves {ready['model']} on {url}", flush=True)

    if settings.engine == "ray":
        from react_clip.scale.serving import serve_on_cluster

        serve_on_cluster(partial(build_app, settings, secrets), settings, announce)
    else:
        serve.run(settings, secrets, load_model, announce)
    return 0


def settings_of(args: argparse.Namespace) -> serve.Settings:
    """Settings from the flags that were given and from the environment."""
    fields = serve.Settings.model_fields
    return serve.read_settings({name: value for name, value in vars(args).items() if name in fields})


def application(flags: dict[str, Any]) -> Any:
    """The service for Ray Serve's own tools: ``import_path: react_clip.cli.serve:application``.

    ``flags`` are settings by name, such as ``{"workers": 2}``; environment variables are read too.
    """
    from react_clip.scale.serving import application as deployed

    settings = serve.read_settings({"engine": "ray", **flags})
    return deployed(partial(build_app, settings, serve.read_secrets(settings)), settings, gpus=1)


def build_app(settings: serve.Settings, secrets: serve.Secrets) -> FastAPI:
    """The application with its model, for servers other than ours, such as a replica of Ray Serve."""
    return serve.create_app(settings, secrets, model=load_model(settings))


def load_model(settings: serve.Settings) -> serve.Model:
    """Load the encoder, its defence and the classes of requests without labels."""
    args = argparse.Namespace(**settings.model_dump(), quiet=settings.log_level in ("warning", "error"))
    if settings.shadow and not settings.config:
        args.defense = settings.defense or "none"
    set_threads(settings)
    preset, defense = load_defended(args)
    shadow = None
    if settings.shadow:
        by_name = settings.shadow in DEFENSES
        args.defense, args.config = (settings.shadow, None) if by_name else (None, settings.shadow)
        shadow = build_guard(args, preset.encoder)
        notice(args, f"{type(shadow).label} runs beside the answers; GET /v1/shadow has what it would change")
    preset.encoder.accelerate()
    return serve.Model(defense, preset, settings, demo_attack if settings.demo else None, shadow)


def demo_attack(
    clf: rc.ZeroShotClassifier, pixels: Tensor, index: int, eps: float, advance: Callable[[int], None]
) -> Tensor:
    """The demo's attack: PGD with 10 steps on plain CLIP, which does not know the defence."""
    import torch

    return rc.attacks.PGD(eps=eps, steps=10)(clf, pixels, torch.tensor([index]), progress=advance).images


def set_threads(settings: serve.Settings) -> None:
    """Set the CPU threads of this process; one where the model is on a GPU and the CPU only decodes."""
    import torch

    from react_clip.encoders.loading import resolve_device

    on_cpu = resolve_device(settings.device).type == "cpu"
    torch.set_num_threads(settings.threads or (torch.get_num_threads() if on_cpu else 1))
