"""Settings of ``react-clip serve``, each a flag and an environment variable; the secret and the API keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from react_clip.errors import ReactClipError

PREFIX = "REACT_CLIP_SERVE_"
"""Start of the name of every environment variable."""

FLAGLESS = ("secret", "api_keys")
"""Settings without a flag: every user of a machine can read the flags of its processes."""

MEBI = 2**20

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.001, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Lines = Annotated[
    list[str], NoDecode, BeforeValidator(lambda text: text.splitlines() if isinstance(text, str) else text)
]


def variable(name: str) -> str:
    """Environment variable of a setting.

    >>> variable("max_wait")
    'REACT_CLIP_SERVE_MAX_WAIT'
    """
    return PREFIX + name.upper()


class Settings(BaseSettings):
    """All settings of the service: flags, else environment variables, else these defaults. --help shows the texts."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    json_output: bool = Field(False, validation_alias=variable("json"))
    """print the address as JSON"""
    quiet: bool = False
    """no progress bars, no notices"""

    model: str = "clip-vit-b-16"
    """hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT, onnx:DIR, openvino:DIR"""
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
    template: Lines | None = None
    """prompt with {} for the name; repeat for an ensemble"""
    defense: Literal["second_look", "react"] | None = None
    """second_look, or react: the paper's (second_look where the model has a threshold for it, else react)"""
    calibrate_on: Path | None = None
    """clean photos on which SecondLook measures its threshold first"""
    config: str | None = None
    """JSON written by `react-clip calibrate`, or `paper`: the paper's constants (by default the model's own)"""

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(8000, ge=0, le=65535)
    """port to listen on, 0 for a free one"""
    name: str | None = None
    """name of the model for callers (by default its own, without folders)"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error; no line contains a body, a query or a header"""

    processes: Count = 1
    """processes that read, decode and answer requests; more than 1 (Linux) share one model in a process of its own"""
    threads: int = Field(0, ge=0)
    """CPU threads of the model; 0 for torch's own choice, or 1 where it is on a GPU"""
    batch: Count | None = None
    """largest number of images in a batch (64 on a GPU, else 32)"""
    max_wait: Duration = 4.0
    """milliseconds to wait for images that are being read or decoded when a batch is not full (one process only)"""
    queue: Count = 256
    """images that may wait for the model; beyond it callers get 503"""
    deadline: Seconds = 20.0
    """seconds from the end of a body to its answer, else 503"""
    demo_deadline: Seconds = 180.0
    """the same for /v1/demo/attack, which takes minutes on a slow CPU"""
    grace: Duration = 45.0
    """seconds that accepted requests have to finish after SIGTERM"""

    max_body: Count = 32 * MEBI
    """largest body of a request, in bytes"""
    max_buffered: Count = 256 * MEBI
    """bytes of all bodies that a process holds at once; beyond it callers get 503"""
    max_images: Count = 16
    """images in one request"""
    max_pixels: Count = 25_000_000
    """pixels of one image, checked before decoding"""
    max_labels: Count = 1000
    """prompts in one request: labels times templates"""
    max_label_length: Count = 100
    """characters of one label or template"""
    max_connections: Count = 256
    """open connections of each process; beyond it callers get 503"""
    label_cache: Count = 64
    """label lists whose class features are cached"""
    decoders: Count = 2
    """threads of each process that decode images"""
    body_timeout: Seconds = 30.0
    """seconds for the body of a request to arrive, else 408"""
    keep_alive: Duration = 5.0
    """seconds that an idle connection stays open"""

    secret_file: Path | None = None
    """file with the secret that keys the noise, 16 bytes or more"""
    secret: SecretStr | None = None
    """the secret itself"""
    api_key_file: Path | None = None
    """file with one API key a line; without keys everybody may call"""
    api_keys: SecretStr | None = None
    """the API keys themselves, comma-separated"""
    open_metrics: bool = False
    """allow /metrics without an API key; it tells how often the gate opens"""
    fixed_labels: bool = False
    """refuse labels in requests"""
    diagnostics: bool = False
    """add the defence's measurements and decision to answers; attackers profit from them"""
    suspicious: bool = False
    """let requests ask which images count as attacked (suspicious=true); attackers profit from it too"""
    constant_work: bool = False
    """run all passes for every image, so that response times do not reveal the gate; SecondLook on a GPU always does"""
    demo: bool = False
    """add /v1/demo/attack, which attacks a caller's photo; implies --diagnostics"""

    engine: Literal["local", "ray"] = "local"
    """local: on this machine; ray: replicas on a Ray cluster"""
    address: str | None = None
    """host:port of a Ray cluster, or auto (by default one on this machine)"""
    replicas: Count = 1
    """replicas on the Ray cluster"""
    max_replicas: Count | None = None
    """replicas under load (by default no more than --replicas)"""

    @model_validator(mode="after")
    def _check_pairs(self) -> Settings:
        if self.queue < self.max_images:
            raise ReactClipError(
                f"--queue is {self.queue} but --max-images {self.max_images}; a queue shorter than one request could "
                "never take it, so make --queue at least as large"
            )
        if self.config is not None and self.defense is not None:
            raise ReactClipError(
                f"--config {self.config} and --defense {self.defense} are both given; choose one of them"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ReactClipError(
                f"--max-replicas is {self.max_replicas} but --replicas {self.replicas}; it must be >= that"
            )
        if self.engine == "local":
            for name in ("address", "replicas", "max_replicas"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ReactClipError(f"{flag(name)} is {value!r}, but the engine is local; add --engine ray")
        if self.processes > 1 and self.engine == "ray":
            raise ReactClipError(f"--processes is {self.processes}, but --engine ray has replicas; use --replicas")
        if self.processes > 1 and self.demo:
            raise ReactClipError(
                f"--processes is {self.processes}, but only the process that runs a demo attack knows its steps; leave "
                "--processes or --demo out"
            )
        return self

    def largest_batch(self, *, on_gpu: bool) -> int:
        """``batch``, or its default on this kind of device.

        >>> Settings().largest_batch(on_gpu=True), Settings(batch=8).largest_batch(on_gpu=True)
        (64, 8)
        """
        return self.batch or (64 if on_gpu else 32)

    @property
    def sends_diagnostics(self) -> bool:
        """True if answers carry the defence's measurements and decision."""
        return self.diagnostics or self.demo

    @property
    def tells_suspicious(self) -> bool:
        """True if requests may ask which images count as attacked; the diagnostics tell it anyway."""
        return self.suspicious or self.sends_diagnostics


def flag(name: str) -> str:
    """Command-line flag of a setting.

    >>> flag("max_wait"), flag("json_output")
    ('--max-wait', '--json')
    """
    return "--" + name.removesuffix("_output").replace("_", "-")


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from ``flags`` and the environment; one line about the first wrong value as ``ReactClipError``."""
    try:
        return Settings(**flags)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if not problem["loc"]:
            raise ReactClipError(str(problem["ctx"]["error"])) from None
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            raise ReactClipError(f"{flag(name)} is no setting of `react-clip serve`; see its --help") from None
        source = flag(name) if name in flags else f"${name if name.startswith(PREFIX) else variable(name)}"
        reason = problem["msg"].replace("Input should be", "it should be")
        raise ReactClipError(f"{source} is {problem['input']!r}; {reason}") from None


# ---------------------------------------------------------------------- secret and API keys

SHORTEST = 16
"""Shorter secrets and keys could be guessed."""


def read_secret(settings: Settings) -> bytes | None:
    """The secret that keys the noise, from its file or the environment; None where neither is given."""
    content, source = _read(settings.secret_file, settings.secret, "secret")
    if settings.secret_file is None and settings.secret is None:
        return None
    return _check_length(content.strip(), f"the secret of {source}")


def read_keys(settings: Settings) -> frozenset[bytes]:
    """Digests of the API keys: one a line of a file (# starts a comment), or comma-separated in the environment."""
    content, source = _read(settings.api_key_file, settings.api_keys, "api_keys")
    lines = content.splitlines() if settings.api_key_file else content.split(b",")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
    if settings.api_key_file is not None and not keys:
        raise ReactClipError(f"{source} holds no API key; write one a line, or leave --api-key-file out")
    return frozenset(digest(_check_length(key, f"an API key of {source}")) for key in keys)


def digest(key: bytes) -> bytes:
    """SHA-256 of an API key: comparing digests takes a time that says nothing about the keys."""
    return hashlib.sha256(key).digest()


def _read(file: Path | None, value: SecretStr | None, name: str) -> tuple[bytes, str]:
    """Content of the file, else of the environment variable; and its source, for messages."""
    if file is None:
        return (value.get_secret_value() if value else "").encode(), f"${variable(name)}"
    try:
        return file.read_bytes(), str(file)
    except OSError as error:
        raise ReactClipError(f"{file} cannot be read: {error.strerror}; check the path") from None


def _check_length(secret: bytes, what: str) -> bytes:
    if len(secret) < SHORTEST:
        raise ReactClipError(
            f"{what} has {len(secret)} bytes; it needs at least {SHORTEST}, such as those of `openssl rand -hex 32`"
        )
    return secret
