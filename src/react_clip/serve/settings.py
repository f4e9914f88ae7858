"""Every number and switch of the service in one table; flags and environment variables are made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from react_clip.errors import ReactClipError

ENVIRONMENT = "REACT_CLIP_SERVE_"
"""What every environment variable of the service starts with; the flag's name follows in capitals."""

FORMATS = ("JPEG", "PNG", "WEBP")
MEBI = 2**20


def variable(name: str) -> str:
    """The environment variable of a flag.

    >>> variable("max-wait")
    'REACT_CLIP_SERVE_MAX_WAIT'
    """
    return ENVIRONMENT + name.replace("-", "_").upper()


def _row(default: Any, text: str, *, least: float | None = None, most: float = math.inf) -> Any:
    """One row of the table: default, help, and the range a number must lie in."""
    return field(default=default, metadata={"help": text, "least": least, "most": most, "kind": type(default)})


@dataclass(frozen=True)
class Settings:
    """How the service behaves; the model and its labels are chosen beside it."""

    host: str = _row("127.0.0.1", "address to listen on (%(default)s)")
    port: int = _row(8000, "port to listen on, 0 for a free one (%(default)s)", least=0, most=65535)
    name: str = _row("", "what callers are told the model is called (by default its own name, without folders)")
    log_level: str = _row("info", "debug, info, warning or error; no line ever holds a body or a query (%(default)s)")

    threads: int = _row(0, "CPU threads of the model, 0 for torch's own choice (%(default)s)", least=0)
    batch: int = _row(32, "most images that share a pass through the engine (%(default)s)", least=1)
    max_wait: float = _row(4.0, "milliseconds to wait for others when a batch is not full (%(default)s)", least=0)
    queue: int = _row(256, "images that may wait; beyond it callers get 503 (%(default)s)", least=1)
    deadline: float = _row(20.0, "seconds from the end of a body to its answer, else 503 (%(default)s)", least=0.001)
    grace: float = _row(45.0, "seconds that accepted requests have to finish after SIGTERM (%(default)s)", least=0)

    max_body: int = _row(32 * MEBI, "most bytes of one request's body (%(default)s)", least=1)
    max_buffered: int = _row(256 * MEBI, "most bytes of all bodies held at once (%(default)s)", least=1)
    max_images: int = _row(16, "most images of one request (%(default)s)", least=1)
    max_pixels: int = _row(25_000_000, "most pixels of one image, checked before decoding (%(default)s)", least=1)
    max_labels: int = _row(1000, "most prompts of one request: labels times templates (%(default)s)", least=1)
    max_label_length: int = _row(100, "most characters of one label or template (%(default)s)", least=1)
    max_connections: int = _row(256, "most open connections (%(default)s)", least=1)
    label_cache: int = _row(64, "label lists whose class features are kept (%(default)s)", least=1)
    decoders: int = _row(2, "threads that decode images (%(default)s)", least=1)

    header_timeout: float = _row(10.0, "seconds for a request's head to arrive (%(default)s)", least=0.001)
    body_timeout: float = _row(30.0, "seconds for a request's body to arrive, else 408 (%(default)s)", least=0.001)
    decode_timeout: float = _row(10.0, "seconds to decode one image, else 422 (%(default)s)", least=0.001)
    write_timeout: float = _row(30.0, "seconds that a caller may leave an answer unread (%(default)s)", least=0.001)
    keep_alive: float = _row(5.0, "seconds that an idle connection stays open (%(default)s)", least=0)

    secret_file: str = _row("", "file with the secret that keys the noise, 16 bytes or more")
    api_key_file: str = _row("", "file with one API key a line; without keys everybody may call")
    open_metrics: bool = _row(False, "let /metrics be read without an API key; it tells how often the gate opens")
    fixed_labels: bool = _row(False, "refuse labels in requests; answer for the labels given here only")
    diagnostics: bool = _row(False, "tell callers r, J, score, sigma, gate and passes; attackers profit from them")
    constant_work: bool = _row(False, "run every pass for every image, so that time does not betray the gate")
    demo: bool = _row(False, "add /v1/demo/attack, which attacks a caller's photo; implies --diagnostics")

    def __post_init__(self) -> None:
        for row in fields(self):
            least, value = row.metadata["least"], getattr(self, row.name)
            if least is not None and not (math.isfinite(value) and least <= value <= row.metadata["most"]):
                most = row.metadata["most"]
                span = f">= {least:g}" if math.isinf(most) else f"in {least:g} ... {most:g}"
                raise ReactClipError(f"--{row.name.replace('_', '-')} is {value}; it must be {span}")
        if self.queue < self.max_images:
            raise ReactClipError(
                f"--queue is {self.queue} but --max-images {self.max_images}; a queue shorter than one request could "
                "never take it, so make --queue at least as large"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ReactClipError(f"--log-level is {self.log_level!r}; choose debug, info, warning or error")

    @property
    def tells_diagnostics(self) -> bool:
        """Whether answers carry r, J, score, sigma, gate and passes."""
        return self.diagnostics or self.demo
