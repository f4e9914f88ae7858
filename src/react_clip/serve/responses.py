"""Responses of the HTTP API as pydantic models."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from react_clip.environment import __version__
from react_clip.serve.errors import KINDS
from react_clip.serve.settings import Settings, public_name
from react_clip.zeroshot import can_name

if TYPE_CHECKING:
    from react_clip.defenses.base import Defense
    from react_clip.encoders.base import Encoder


class Schema(BaseModel):
    """Base of all requests and answers; texts below fields are their descriptions in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Scored(Schema):
    """A name and its probability."""

    label: str
    probability: float = Field(ge=0, le=1.0001)


def top(names: list[str], probs: Tensor, count: int) -> list[Scored]:
    """The ``count`` most probable names, best first; ``probs`` is ``[K]``."""
    values, indices = probs.topk(min(count, len(names)))
    return [Scored(label=names[i], probability=p) for p, i in zip(values.tolist(), indices.tolist(), strict=True)]


def encode_feature(feature: Tensor, encoding: Literal["float", "base64"]) -> list[float] | str:
    """A feature ``[D]`` as numbers, or as base64 of little-endian 32-bit floats, as OpenAI does.

    >>> import torch
    >>> encode_feature(torch.tensor([1.0, -0.5]), "float"), encode_feature(torch.tensor([1.0, -0.5]), "base64")
    ([1.0, -0.5], 'AACAPwAAAL8=')
    """
    if encoding == "float":
        return list(feature.tolist())
    return base64.b64encode(feature.numpy().astype("<f4").tobytes()).decode("ascii")


class Diagnostics(Schema):
    """Measurements of the defence for one photo, under its own names beside these."""

    model_config = ConfigDict(extra="allow")

    gated: bool
    """True if the photo was corrected: the feature of the answer is not plain CLIP's."""
    suspicious: bool
    """True if the photo counts as attacked."""
    passes: float
    """Encoder passes; a view of another size counts as its fraction of a photo's tokens."""

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Diagnostics:
        """From the numbers that a defence measured; NaN was not."""
        measured = {name: value for name, value in numbers.items() if value == value}
        return cls.model_validate(measured | {"passes": round(numbers["passes"], 4)})


class Result(Schema):
    """The answer for one photo, or the error of one that could not be read."""

    index: int
    label: str | None = None
    probability: float | None = None
    answers: list[Scored] = []
    diagnostics: Diagnostics | None = None
    """Null unless the server was started with --diagnostics."""
    error: str | None = None
    """One line about a photo that could not be read; all else is null then."""


class ClassifyResponse(Schema):
    """The answers, in the order of the photos."""

    model: str
    results: list[Result]


class Embedding(Schema):
    """The defended unit feature of one photo, or the feature of a text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    diagnostics: Diagnostics | None = None


class EmbeddingsResponse(Schema):
    """The features, in the order of the entries."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: dict[str, int]
    """OpenAI's count of tokens, which is zero, and the number of photos."""


class Info(Schema):
    """Model, labels, limits and defence of this service."""

    version: str
    model: str
    image_size: int
    dim: int
    text: bool
    """True if /v1/embeddings takes texts."""
    labels: dict[str, Any]
    """``preset``: the names for requests without labels; ``free``: whether requests may send names; ``source``: text
    tower, label bank (its names only) or neither."""
    limits: dict[str, float]
    """Limits of one request, by the names of the settings: bytes, images, pixels, labels and seconds."""
    diagnostics: bool
    """True if answers carry diagnostics."""
    demo: bool
    """True if there is /v1/demo/attack."""
    defence: dict[str, Any]
    """Its name, the threshold ``tau`` of its gate (or null), and all constants: they are public; the secret that keys
    the noise is not."""

    @classmethod
    def of(cls, encoder: Encoder, defense: Defense, preset: list[str], settings: Settings) -> Info:
        """The description of a model and its defence."""
        source = "preset" if settings.fixed_labels else label_source(encoder)
        tau = getattr(defense, "tau", getattr(defense, "threshold", None))
        names = ("max_body", "max_images", "max_pixels", "max_labels", "deadline")
        return cls(
            version=__version__,
            model=public_name(encoder.name),
            image_size=encoder.image_size,
            dim=encoder.dim,
            text=encoder.has_text,
            labels={"preset": preset, "free": source != "preset", "source": source},
            limits={name: getattr(settings, name) for name in names},
            diagnostics=settings.diagnostics or settings.demo,
            demo=settings.demo,
            defence={"name": defense.name, "tau": tau, "config": defense.to_dict()},
        )


def label_source(encoder: Encoder) -> Literal["text", "bank", "preset"]:
    """Source of class features: text tower, label table, or neither (only the server's own labels)."""
    return "text" if encoder.has_text else "bank" if can_name(encoder) else "preset"


class Status(Schema):
    """State of the process."""

    status: Literal["alive", "ready"]


class ErrorLine(Schema):
    """One line of text, the kind of error, and the field that it is about, by the names of OpenAI's errors."""

    message: str
    type: str
    param: str | None


class ErrorBody(Schema):
    """Every answer that is not 200."""

    error: ErrorLine


ERRORS: dict[int | str, dict[str, Any]]
ERRORS = {status: {"model": ErrorBody, "description": text} for status, (_, text) in KINDS.items()}
"""Descriptions of error answers."""
