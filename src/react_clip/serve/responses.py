"""Responses of the HTTP API as pydantic models."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    ConfigDict,
    Field,
)
from torch import Tensor

from react_clip.defenses.react import ReACT
from react_clip.defenses.second_look import SecondLook
from react_clip.encoders.base import Encoder
from react_clip.environment import __version__
from react_clip.preprocess import DEFAULT_LIMITS
from react_clip.serve.answers import Answer
from react_clip.serve.engine import Engine
from react_clip.serve.labels import label_source
from react_clip.serve.requests import MAX_EPS, Schema

_TYPICAL_DRIFTS = (0.0, 2.0)
"""Nearly all images have a drift r of ReACT in this range; ``/v1/info`` gives sigma for it."""


class Scored(Schema):
    """A name and its probability."""

    label: str
    probability: float = Field(ge=0, le=1.0001)


def top(names: tuple[str, ...], probs: Tensor, count: int) -> list[Scored]:
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
    """Measurements of the defence for one photo; null where a value was not measured."""

    r: float | None
    """SecondLook: distance between the features of photo and look. ReACT: relative drift between two probe noises."""
    J: float | None
    """Divergence of the predictions for two views. ReACT: null where r alone decided; SecondLook does not use it."""
    score: float | None
    """The value compared with tau. SecondLook: r. ReACT: r + J."""
    sigma: float | None
    """ReACT: scale of the anchor's noise."""
    drift_low: float | None
    drift_high: float | None
    gated: bool
    """True if the photo was corrected; SecondLook also corrects below tau if photo and look have different answers."""
    passes: int | float
    """Encoder passes spent; a smaller look of SecondLook counts as its share of a photo's tokens."""

    @classmethod
    def of(cls, answer: Answer) -> Diagnostics:
        """Diagnostics of one image."""
        values = answer.diagnostics | {"r": answer.diagnostics["drift"], "J": answer.diagnostics["instability"]}
        return cls.model_validate(values | {"passes": round(values["passes"], 4)})


class Result(Schema):
    """The answer for one photo."""

    index: int
    label: str
    probability: float
    answers: list[Scored]
    diagnostics: Diagnostics | None
    """Null unless the server was started with --diagnostics."""
    suspicious: bool | None
    """True if the photo counts as attacked; null unless the request asked for it."""


class ClassifyResponse(Schema):
    """The answers, in the order of the photos."""

    model: str
    results: list[Result]


class Embedding(Schema):
    """The defended unit feature of one photo."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    diagnostics: Diagnostics | None
    suspicious: bool | None


class Usage(Schema):
    """OpenAI's count of tokens, which is zero, and the number of photos."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    images: int


class EmbedResponse(Schema):
    """The features, in the order of the photos."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Comparison(Schema):
    """Answers of plain and of defended CLIP for one version of a photo."""

    image: str
    """The photo as the model sees it, a PNG data URI."""
    plain: list[Scored]
    defended: list[Scored]
    diagnostics: Diagnostics


class AttackResponse(Schema):
    """A photo before and after an attack on plain CLIP that does not know the defence."""

    model: str
    eps: float
    """In 255ths."""
    attacked_label: str
    """Plain CLIP's answer on the clean photo, which the attack changes."""
    clean: Comparison
    attacked: Comparison
    perturbation: str
    """The change as PNG data URI, grey where nothing changed."""
    amplification: float
    """Factor by which the change is enlarged in that picture."""


class AttackProgress(Schema):
    """Steps of the demo's attack that runs now; both are 0 while none runs."""

    done: int = 0
    steps: int = 0


class Labels(Schema):
    """Label lists that requests may use."""

    preset: list[str]
    """The names for requests without labels."""
    free: bool
    """True if requests may send names."""
    source: Literal["text", "bank", "preset"]
    """Text tower, label bank (its names only), or neither."""
    templates: bool
    """True if requests may send prompt templates."""


class Limits(Schema):
    """Limits of one request, read from ``Settings``."""

    model_config = ConfigDict(from_attributes=True)

    body_bytes: int = Field(validation_alias="max_body")
    images: int = Field(validation_alias="max_images")
    pixels: int = Field(validation_alias="max_pixels")
    """Pixels of one image."""
    labels: int = Field(validation_alias="max_labels")
    """Labels times templates."""
    label_length: int = Field(validation_alias="max_label_length")
    deadline_seconds: float = Field(validation_alias="deadline")


class SigmaRange(Schema):
    """Range of the anchor's noise for r in [0, 2], which holds for nearly all images, and the map from r to sigma."""

    least: float
    most: float
    mapping: dict[str, Any]


class PassRange(Schema):
    """Smallest and largest number of encoder passes."""

    least: int | float
    most: int | float


class Defence(Schema):
    """The constants of the defence. They are public; the secret that keys the noise is not."""

    name: str
    """``second_look``, ``react`` or another kind of ReACT."""
    tau: float | None
    """The gate opens at score >= tau; null corrects every image."""
    alpha: float
    passes: PassRange
    """Encoder passes of one image; a smaller look of SecondLook counts as its share of an image's tokens."""
    constant_work: bool
    views: int | None = None
    """Views of ReACT's anchor."""
    probe_sigma: list[float] | None = None
    """Scales of ReACT's probe noises."""
    sigma: SigmaRange | None = None
    """Noise of ReACT's anchor."""
    look_sizes: list[int] | None = None
    """Sides of SecondLook's look and moved look, in pixels."""

    @classmethod
    def of(cls, guard: ReACT | SecondLook, encoder: Encoder) -> Defence:
        """The constants of a defence of this encoder."""
        if isinstance(guard, SecondLook):
            sizes = [guard.look_size(encoder), guard.moved_look_size(encoder)]
            look, moved_look = map(encoder.token_share, sizes)
            least, most = round(1 + look, 4), round(1 + look + moved_look, 4)
            own: dict[str, Any] = {"tau": guard.threshold, "look_sizes": sizes}
        else:
            low, high = sorted(guard.mapping(torch.tensor(_TYPICAL_DRIFTS)).tolist())
            least, most = 1 + 2 * guard.probe_samples, guard.cost()[0]
            own = {
                "tau": guard.tau,
                "views": guard.views,
                "probe_sigma": [guard.sigma_low, guard.sigma_high],
                "sigma": SigmaRange(least=low, most=high, mapping=guard.mapping.to_dict()),
            }
        return cls(
            name=guard.name,
            alpha=guard.alpha,
            passes=PassRange(least=least if guard.lazy else most, most=most),
            constant_work=not guard.lazy,
            **own,
        )


class DemoRange(Schema):
    """Strengths that the demo attack takes, in 255ths."""

    eps_least: int = 0
    eps_most: int = MAX_EPS


class Info(Schema):
    """Model, labels, limits and defence of this service."""

    service: Literal["react-clip"] = "react-clip"
    version: str
    model: str
    image_size: int
    dim: int
    labels: Labels
    formats: list[str]
    """Media types of images."""
    limits: Limits
    diagnostics: bool
    """True if answers carry diagnostics."""
    demo: DemoRange | None
    """Null where /v1/demo/attack is not offered."""
    defence: Defence

    @classmethod
    def of(cls, engine: Engine, *, demo: bool) -> Info:
        """The description of an engine's model and settings."""
        encoder, settings = engine.encoder, engine.settings
        source = label_source(encoder)
        free = source != "preset" and not settings.fixed_labels
        return cls(
            version=__version__,
            model=settings.name or public_name(encoder.name),
            image_size=encoder.image_size,
            dim=encoder.dim,
            labels=Labels(
                preset=list(engine.preset.names),
                free=free,
                source=source if free else "preset",
                templates=free and source == "text",
            ),
            formats=[f"image/{name.lower()}" for name in DEFAULT_LIMITS.formats],
            limits=Limits.model_validate(settings),
            diagnostics=settings.sends_diagnostics,
            demo=DemoRange() if demo else None,
            defence=Defence.of(engine.guard, encoder),
        )


def public_name(name: str) -> str:
    """A model's name without the folders of this machine.

    >>> public_name("openai/clip-vit-base-patch32"), public_name("clip-vit-b-16+/data/runs/tecoa.safetensors")
    ('openai/clip-vit-base-patch32', 'clip-vit-b-16+tecoa.safetensors')
    """
    base, plus, file = name.partition("+")
    base = Path(base).resolve().name if Path(base).is_dir() else base
    return base + plus + Path(file).name


class ServedModel(Schema):
    """The model, in the shape of OpenAI's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["react-clip"] = "react-clip"


class ModelList(Schema):
    """A list of the one model."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class Status(Schema):
    """State of the process."""

    status: Literal["alive", "ready"]


class ErrorLine(Schema):
    """One line of text, the kind of error, and the field it is about."""

    message: str
    type: str
    field: str | None


class ErrorBody(Schema):
    """Every answer that is not 200."""

    error: ErrorLine
