"""Settings of ``react-clip serve``, each a flag and an environment variable; the secret and the API keys."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from react_clip.errors import ReactClipError
from react_clip.secret import SHORTEST_SECRET, process_secret, read_secret, was_drawn

PREFIX = "REACT_CLIP_SERVE_"
"""Start of the name of every environment variable."""

PROMPTS_PER_SLOT = 16
"""Prompts that take one place of the queue: together they cost about as much as one defended image."""

BEAT = 0.5
"""Seconds after which an idle model tells that it lives."""

DRAIN = 5.0
"""Seconds after SIGTERM in which requests are taken but /readyz says no, so that load balancers go elsewhere."""

GRACE = 40.0
"""Seconds that accepted requests have to finish after that."""

LABEL_LENGTH = 100
"""Most characters of one label or template."""

TEXT_LENGTH = 1000
"""Most characters of one text to embed; a text tower reads less than that."""

MAX_EPS = 16
"""Strongest attack of the demo, in 255ths."""

Count = Annotated[int, Field(ge=1)]


def _split(separator: str) -> BeforeValidator:
    def split(text: Any) -> Any:
        return [part.strip() for part in text.split(separator) if part.strip()] if isinstance(text, str) else text

    return BeforeValidator(split)


class Settings(BaseSettings):
    """All settings of the service: flags, else environment variables, else these defaults. --help shows the texts."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    model: str = "clip-vit-b-16"
    """hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT, onnx:DIR"""
    device: str | None = None
    """cpu, cuda, cuda:1, mps, ... (CUDA if there is one)"""
    dtype: str = "auto"
    """fp32, bf16, fp16, or auto: fp16 on a GPU where that is safe"""
    labels: str | None = None
    """comma-separated names for requests without labels"""
    labels_file: Path | None = None
    """a text file with one name a line"""
    photos: Path | None = None
    """a folder with one sub-folder of photos per class, instead of names"""
    template: Annotated[list[str] | None, NoDecode, _split("\n")] = None
    """prompt with {} for the name; repeat for an ensemble (in the variable: one a line)"""
    defense: Literal["second_look", "react", "none"] | None = None
    """second_look, react: the paper's, or none (second_look where the model has a threshold for it, else react)"""
    config: str | None = None
    """JSON of any defence, as `react-clip calibrate` writes it, or `paper`: its constants (by default the model's)"""
    shadow: str | None = None
    """a defence as of --defense or --config that runs beside the answers, which are plain unless these say otherwise"""
    shadow_share: float = Field(1.0, gt=0, le=1)
    """share of the images for which the shadow runs"""

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(8000, ge=0, le=65535)
    """port to listen on, 0 for a free one"""
    allowed_hosts: Annotated[list[str] | None, NoDecode, _split(",")] = None
    """comma-separated host names that callers may use, * for any (any with API keys, else this machine's)"""
    cors_origin: Annotated[list[str] | None, NoDecode, _split(",")] = None
    """origin of a site whose pages may call, such as https://example.org; repeat for several (none)"""
    rate_limit: int = Field(0, ge=0)
    """POST requests a minute of each key, or of each address where there are no keys; beyond it 429 (0: any number)"""
    engine: Literal["local", "ray"] = "local"
    """local: this machine; ray: --workers replicas on the cluster of $RAY_ADDRESS, or on this machine"""

    workers: Count = 1
    """processes that read, decode and answer requests; more than 1 share the model of the first process"""
    threads: int = Field(0, ge=0)
    """CPU threads of the model; 0 for torch's own choice, or 1 where it is on a GPU"""
    batch: Count | None = None
    """largest number of images in a batch, unless one request has more (64 on a GPU, else 32)"""
    queue: Count = 256
    """most images that wait, fewer where they would take half the deadline; 16 new prompts count as one; beyond: 503"""
    deadline: float = Field(20.0, ge=0.001, allow_inf_nan=False)
    """seconds from the end of a body to its answer, else 503 (nine times as long for /v1/demo/attack)"""

    max_body: Count = 32 * 2**20
    """largest body of a request, in bytes"""
    max_images: Count = 16
    """images in one request"""
    max_pixels: Count = 25_000_000
    """pixels of one image, checked before decoding"""
    max_labels: Count = 1000
    """prompts in one request: labels times templates"""

    secret_file: Path | None = None
    """file with the secret that keys the noise ($REACT_CLIP_SECRET_FILE, else a new one per start)"""
    secrets_dir: Path | None = None
    """folder of the files react_clip_serve_secret and react_clip_serve_api_keys (instead of these variables)"""
    fixed_labels: bool = False
    """refuse labels in requests"""
    diagnostics: bool = False
    """add the defence's measurements and decision to answers; attackers profit from them"""
    demo: bool = False
    """add /v1/demo/attack, which attacks a caller's photo; implies --diagnostics"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error; no line contains a body or a query, and of the headers only the request's id"""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with id, route, status, milliseconds, wait, passes and changed images"""

    @model_validator(mode="after")
    def _check(self) -> Settings:
        for names in (("labels", "labels_file", "photos"), ("config", "defense")):
            given = [f"{flag(name)} {value}" for name in names if (value := getattr(self, name)) is not None]
            if len(given) > 1:
                raise ReactClipError(f"{' and '.join(given)} are both given; choose one of them")
        if self.workers > 1 and self.demo:
            raise ReactClipError(
                f"--workers is {self.workers}, but the demo attacks the model in its own process; leave one of them out"
            )
        return self


def public_name(name: str) -> str:
    """A model's name without the folders of this machine.

    >>> public_name("openai/clip-vit-base-patch32"), public_name("clip-vit-b-16+/data/runs/tecoa.safetensors")
    ('openai/clip-vit-base-patch32', 'clip-vit-b-16+tecoa.safetensors')
    """
    base, plus, file = name.partition("+")
    base = Path(base).resolve().name if Path(base).is_dir() else base
    return base + plus + Path(file).name


def flag(name: str) -> str:
    """Command-line flag of a setting.

    >>> flag("max_body")
    '--max-body'
    """
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Environment variable of a setting.

    >>> variable("max_body")
    'REACT_CLIP_SERVE_MAX_BODY'
    """
    return PREFIX + name.upper()


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from ``flags`` and the environment; one line about the first wrong name or value."""
    known = {variable(name) for name in (*Settings.model_fields, *_SecretFiles.model_fields)}
    if unknown := [name for name in os.environ if name.startswith(PREFIX) and name not in known]:
        raise ReactClipError(f"${unknown[0]} is no setting of `react-clip serve`; see its --help")
    try:
        return Settings(**flags)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if not problem["loc"]:  # a check of ours
            raise ReactClipError(str(problem["ctx"]["error"])) from None
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            raise ReactClipError(f"{flag(name)} is no setting of `react-clip serve`; see its --help") from None
        source = flag(name) if name in flags else f"${variable(name)}"
        reason = problem["msg"].replace("Input should be", "it should be")
        raise ReactClipError(f"{source} is {problem['input']!r}; {reason}") from None


# ---------------------------------------------------------------------- secret and API keys


class _SecretFiles(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore")

    secret: SecretStr | None = None
    api_keys: SecretStr | None = None


@dataclass(frozen=True, repr=False)
class Secrets:
    """What callers must not know."""

    noise: bytes
    """Keys the noise; random, and ``drawn``, where none was given."""
    keys: frozenset[bytes]
    """Digests of the API keys; without any, everybody may call."""
    drawn: bool = False


def read_secrets(settings: Settings) -> Secrets:
    """Secret and API keys (between commas or white space, # starts a comment), from ``secrets_dir`` or variables."""
    if settings.secrets_dir is not None and not settings.secrets_dir.is_dir():
        raise ReactClipError(f"--secrets-dir {settings.secrets_dir} is no folder; check the path")
    found = _SecretFiles(_secrets_dir=settings.secrets_dir)  # type: ignore[call-arg]
    secret = found.secret.get_secret_value().encode() if found.secret else None
    text = found.api_keys.get_secret_value() if found.api_keys else ""
    lines = (line.partition("#")[0].replace(",", " ") for line in text.splitlines())
    keys = [key.encode() for line in lines for key in line.split()]
    if found.api_keys and not keys:
        raise ReactClipError("the API keys are empty; write one a line, or leave them out")
    for name, value in (("the secret", secret), *(("an API key", key) for key in keys)):
        if value is not None and len(value) < SHORTEST_SECRET:
            raise ReactClipError(
                f"{name} has {len(value)} bytes; it needs at least {SHORTEST_SECRET}, such as those of "
                "`openssl rand -hex 32`"
            )
    if settings.secret_file is not None:
        secret = read_secret(settings.secret_file)
    noise = secret or process_secret()
    return Secrets(noise, frozenset(map(digest, keys)), drawn=was_drawn(noise))


def digest(key: bytes) -> bytes:
    """SHA-256 of an API key: comparing digests takes a time that says nothing about the keys."""
    return hashlib.sha256(key).digest()


def allowed_hosts(settings: Settings, secrets: Secrets) -> list[str]:
    """Host names that callers may use.

    A page on another site can point its own name at this machine (DNS rebinding) and have a visitor's browser call a
    service that asks for no key. Such a call has that name as its Host.
    """
    if settings.allowed_hosts is not None:
        return settings.allowed_hosts
    return ["*"] if secrets.keys else ["localhost", "127.0.0.1", "[::1]", "::1", settings.host, socket.gethostname()]
