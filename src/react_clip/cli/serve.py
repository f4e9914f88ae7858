"""``react-clip serve``: the defence as an HTTP service."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip import Encoder, ReactClipError, ZeroShotClassifier
from react_clip.attacks import PGD
from react_clip.cli.common import (
    Subparsers,
    add_model_options,
    build_classifier,
    build_guard,
    load_encoder,
    new_command,
    notice,
)
from react_clip.optional import require
from react_clip.serve.settings import Settings, variable

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = new_command(
        subparsers,
        "serve",
        run,
        summary="Answer over HTTP: classify and embed photos, defended, with dynamic batching and metrics.",
        example="react-clip serve --model openai/clip-vit-base-patch32 --labels 'cat, dog, teapot' --port 8000",
    )
    add_model_options(parser)
    group = parser.add_argument_group("labels and defence")
    group.add_argument("--labels", help="comma-separated names for requests that bring none")
    group.add_argument("--labels-file", type=Path, help="a text file with one name a line")
    group.add_argument("--photos", type=Path, help="a folder with one sub-folder of photos per class, instead of names")
    group.add_argument("--template", action="append", help="prompt with {} for the name; repeat for an ensemble")
    group.add_argument("--config", help="JSON written by `react-clip calibrate`, or `paper` (what suits the model)")
    group = parser.add_argument_group(
        "service",
        f"The secret and the API keys may also be given as ${variable('secret')} and ${variable('api-keys')}.",
    )
    for row in dataclasses.fields(Settings):
        flag, kind, text = "--" + row.name.replace("_", "-"), row.metadata["kind"], row.metadata["help"]
        if kind is bool:
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(flag, type=kind, default=row.default, help=text)
    _read_environment(parser)


def _read_environment(parser: argparse.ArgumentParser) -> None:
    """Give every flag its variable: what the environment holds becomes the default, checked like a flag."""
    for action in parser._actions:
        if action.dest == "help":
            continue
        name = variable(action.dest)
        action.help = f"{action.help} [${name}]"
        if (value := os.environ.get(name)) is not None:
            action.default = value.splitlines() if isinstance(action, argparse._AppendAction) else value


def run(args: argparse.Namespace) -> int:
    """Load, listen, answer; ends with 0 when asked to stop."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "serving", extra="serve")
    from react_clip.serve.app import create_app
    from react_clip.serve.classes import ClassList
    from react_clip.serve.credentials import read_keys, read_secret
    from react_clip.serve.engine import Engine
    from react_clip.serve.server import address, open_socket, serve

    _read_switches(args)
    settings = Settings(**{row.name: getattr(args, row.name) for row in dataclasses.fields(Settings)})
    _log_to_stderr("warning" if args.quiet else settings.log_level)
    secret, made_up = read_secret(settings.secret_file)
    keys = read_keys(settings.api_key_file)
    if made_up:
        notice(
            args, "the noise is keyed by a secret of this process: answers may differ after a restart (--secret-file)"
        )
    listener = open_socket(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    encoder = load_encoder(args)
    engine = Engine(
        encoder,
        build_guard(args, encoder),
        ClassList.of(build_classifier(args, encoder)),
        secret=secret,
        batch=settings.batch,
        max_wait=settings.max_wait / 1000,
        deadline=settings.deadline,
        queue=settings.queue,
        label_cache=settings.label_cache,
        constant_work=settings.constant_work,
    )
    engine.start()
    app = create_app(engine, settings, DemoPGD(encoder) if settings.demo else None, keys=keys)

    def announce() -> None:
        url = address(listener)
        ready = {"url": url, "pid": os.getpid(), "model": app.state.service.name}
        print(json.dumps(ready) if args.json else f"react-clip serves {ready['model']} on {url}", flush=True)

    serve(app, settings, listener, announce)
    return 0


class DemoPGD:
    """The attack that the demo shows: PGD-10 on plain CLIP, which does not know the defence."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __call__(self, pixels: Tensor, classes: Any, label: int, eps: float) -> Tensor:
        """Pixels within ``eps`` that CLIP shall no longer call by this label."""
        clf = ZeroShotClassifier.from_features(self._encoder, classes.names, classes.features)
        pixels = pixels.to(clf.device)
        return PGD(eps=eps, steps=10)(clf, pixels, torch.tensor([label])).images


def _read_switches(args: argparse.Namespace) -> None:
    """Switches that came from the environment are words still."""
    for name, value in vars(args).items():
        if isinstance(getattr(Settings, name, None), bool) or name in ("json", "quiet"):
            if str(value).lower() not in (*_TRUE, *_FALSE):
                raise ReactClipError(f"${variable(name)} is {value!r}; write 1 or 0")
            setattr(args, name, str(value).lower() in _TRUE)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, chosen in (("react_clip.serve", level.upper()), ("uvicorn", "ERROR"), ("PIL", "CRITICAL")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(chosen)
