"""``react-clip serve``: the defence as an HTTP service."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from react_clip import Encoder, ReactClipError, ZeroShotClassifier
from react_clip.attacks import PGD
from react_clip.cli import configure
from react_clip.cli.common import (
    add_model_options,
    build_classifier,
    build_guard,
    load_encoder,
    notice,
)
from react_clip.optional import require
from react_clip.serve.settings import Settings, variable

if TYPE_CHECKING:
    from fastapi import FastAPI

    from react_clip.scale.serving import Fleet

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model_options(parser)
    parser.set_defaults(dtype="auto")
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
    group = parser.add_argument_group("many machines")
    group.add_argument("--engine", default="local", help="local, this process, or ray, replicas of it (%(default)s)")
    group.add_argument("--address", help="host:port of a Ray cluster, or auto (by default one on this machine)")
    group.add_argument("--replicas", type=int, default=1, help="processes that share the requests (%(default)s)")
    group.add_argument("--max-replicas", type=int, help="as many as load may make of them (by default it makes none)")
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
    from react_clip.serve.server import address, open_socket, serve
    from react_clip.serve.service import public_name

    plan = Plan.of(args)
    if plan.made_up:
        owner = "process" if args.engine == "local" else "service"
        notice(
            args, f"the noise is keyed by a secret of this {owner}: answers may differ after a restart (--secret-file)"
        )

    def announce(url: str) -> None:
        ready = {"url": url, "pid": os.getpid(), "model": plan.settings.name or public_name(args.model)}
        print(json.dumps(ready) if args.json else f"react-clip serves {ready['model']} on {url}", flush=True)

    if args.engine == "ray":
        from react_clip.scale.serving import serve_on_cluster

        serve_on_cluster(plan.build, plan.settings, plan.fleet, args.address, announce)
        return 0
    listener = open_socket(plan.settings)
    serve(plan.build(), plan.settings, listener, lambda: announce(address(listener)))
    return 0


def application(flags: dict[str, Any]) -> Any:
    """The service for Ray Serve's own tools, as ``import_path: react_clip.cli.serve:application``.

    ``flags`` are those of the command by name, such as ``{"replicas": 2}``; the environment is read as always.
    """
    import ray

    from react_clip.scale.serving import application as deployed

    parser: argparse.ArgumentParser = _Parser(prog="react-clip")
    configure(parser, "serve")
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if value is not False}
    words = [flag if value is True else f"{flag}={value}" for flag, value in given.items()]
    plan = Plan.of(parser.parse_args(["--engine=ray", *words]))
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return deployed(plan.build, plan.settings, plan.fleet(has_gpus))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong to Ray's log, where ending the process would say nothing."""

    def error(self, message: str) -> NoReturn:
        raise ReactClipError(message)


@dataclass(frozen=True)
class Plan:
    """What the flags, the environment and the files they name ask for; it travels to the processes that answer."""

    args: argparse.Namespace
    settings: Settings
    secret: bytes = field(repr=False)
    keys: Any = field(repr=False)
    made_up: bool
    """Whether nobody gave the secret."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Read what can be wrong before a model is loaded; secret and keys are read once for all replicas."""
        for module in ("fastapi", "uvicorn", "prometheus_client"):
            require(module, "serving", extra="serve")
        from react_clip.serve.credentials import read_keys, read_secret

        _read_switches(args)
        settings = Settings(**{row.name: getattr(args, row.name) for row in dataclasses.fields(Settings)})
        _check_engine(args)
        secret, made_up = read_secret(settings.secret_file)
        return cls(args, settings, secret, read_keys(settings.api_key_file), made_up)

    def build(self) -> FastAPI:
        """The app around an engine that runs."""
        from react_clip.serve.app import create_app
        from react_clip.serve.classes import ClassList
        from react_clip.serve.engine import Engine

        args, settings = self.args, self.settings
        _log_to_stderr("warning" if args.quiet else settings.log_level)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        encoder = load_encoder(args).accelerate()
        engine = Engine(
            encoder,
            build_guard(args, encoder),
            ClassList.of(build_classifier(args, encoder)),
            secret=self.secret,
            batch=settings.batch,
            max_wait=settings.max_wait / 1000,
            deadline=settings.deadline,
            queue=settings.queue,
            label_cache=settings.label_cache,
            constant_work=settings.constant_work,
        )
        engine.start()
        return create_app(engine, settings, DemoPGD(encoder) if settings.demo else None, keys=self.keys)

    def fleet(self, has_gpus: bool) -> Fleet:
        """The replicas; each has a GPU to itself where there are any and nothing else is asked for."""
        from react_clip.scale.serving import Fleet

        args = self.args
        on_gpu = has_gpus if args.device is None else not args.device.startswith("cpu")
        most = args.replicas if args.max_replicas is None else args.max_replicas
        return Fleet(args.replicas, most, cpus=max(1, self.settings.threads), gpus=int(on_gpu))


def _check_engine(args: argparse.Namespace) -> None:
    if args.engine not in ("local", "ray"):
        raise ReactClipError(f"--engine is {args.engine!r}; choose local or ray")
    for name, default in (("address", None), ("replicas", 1), ("max_replicas", None)):
        if args.engine == "local" and (value := getattr(args, name)) != default:
            flag = name.replace("_", "-")
            raise ReactClipError(f"--{flag} is {value!r}, but the engine is local; add --engine ray")


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
