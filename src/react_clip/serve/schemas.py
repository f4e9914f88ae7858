"""What requests and answers look like; the same models check both JSON and form fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from react_clip.serve.problems import RequestError, shown

ImageField = Annotated[
    str | bytes,
    WithJsonSchema(
        {
            "type": "string",
            "contentEncoding": "base64",
            "description": "A JPEG, PNG or WebP file as base64 or as data URI; addresses are not fetched.",
        }
    ),
]


class ImageRequest(BaseModel):
    """What all requests share."""

    model_config = ConfigDict(extra="forbid")

    images: list[ImageField] = Field(min_length=1, description="The photos.")
    labels: list[str] | None = Field(
        None, min_length=1, description="Names to choose from; by default the server's own. In a form: comma-separated."
    )
    templates: list[str] | None = Field(
        None, min_length=1, description="Prompts with {} for the name; several are averaged. Needs a text tower."
    )
    model: str | None = Field(None, description="If given, it must be the served model's name.")


class ClassifyRequest(ImageRequest):
    """Photos to name."""

    top_k: int = Field(5, ge=1, le=100_000, description="Answers per photo, best first.")


class EmbedRequest(ImageRequest):
    """Photos to embed."""

    # OpenAI's clients call it input.
    images: list[ImageField] = Field(
        min_length=1, description="The photos.", validation_alias=AliasChoices("images", "input")
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or the base64 of little-endian 32-bit floats."
    )


class AttackRequest(ImageRequest):
    """A photo to attack."""

    images: list[ImageField] = Field(min_length=1, max_length=1, description="One photo.")
    eps: float = Field(4.0, ge=0, le=16, allow_inf_nan=False, description="Largest change of a pixel, in 255ths.")
    top_k: int = Field(5, ge=1, le=100_000, description="Answers, best first.")


class Scored(BaseModel):
    """A name and its probability."""

    label: str
    probability: float = Field(ge=0, le=1.0001)


class Diagnostics(BaseModel):
    """Why the defence did what it did; null where it was not measured."""

    r: float | None = Field(description="Relative drift between the two probe noises.")
    J: float | None = Field(description="Instability of the prediction; null where r alone decided.")
    score: float | None = Field(description="r + J, compared with tau.")
    sigma: float | None = Field(description="Scale of the anchor's noise.")
    drift_low: float | None
    drift_high: float | None
    gated: bool = Field(description="Whether the correction was applied.")
    passes: int = Field(description="Encoder passes spent.")


class Result(BaseModel):
    """The answer for one photo."""

    index: int
    label: str
    probability: float
    answers: list[Scored]
    diagnostics: Diagnostics | None = Field(None, description="Only if the server was started with --diagnostics.")


class ClassifyResponse(BaseModel):
    """The answers, in the order of the photos."""

    model: str
    results: list[Result]


class Embedding(BaseModel):
    """The defended unit feature of one photo."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    diagnostics: Diagnostics | None = None


class Usage(BaseModel):
    """How much was asked for; there are no tokens."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    images: int


class EmbedResponse(BaseModel):
    """The features, in the order of the photos."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Scene(BaseModel):
    """What plain and defended CLIP say about one version of a photo."""

    image: str = Field(description="The photo as the model sees it, a PNG data URI.")
    plain: list[Scored]
    defended: list[Scored]
    diagnostics: Diagnostics


class AttackResponse(BaseModel):
    """A photo before and after an attack on plain CLIP that does not know the defence."""

    model: str
    eps: float = Field(description="In 255ths.")
    attacked_label: str = Field(description="Plain CLIP's answer on the clean photo, which the attack turned against.")
    clean: Scene
    attacked: Scene
    perturbation: str = Field(description="The change as PNG data URI, grey where nothing changed.")
    amplification: float = Field(description="How many times the change was enlarged for that picture.")


class Labels(BaseModel):
    """What the service can name."""

    preset: list[str] = Field(description="The names used by requests that bring none.")
    free: bool = Field(description="Whether requests may bring names.")
    source: Literal["text", "bank", "preset"] = Field(
        description="Text tower, label bank (its names only), or neither."
    )
    templates: bool = Field(description="Whether requests may bring prompt templates.")


class Limits(BaseModel):
    """What a request may hold."""

    body_bytes: int
    images: int
    pixels: int = Field(description="Of one image.")
    labels: int = Field(description="Labels times templates.")
    label_length: int
    deadline_seconds: float


class SigmaRange(BaseModel):
    """The anchor's noise for nearly all images (r in [0, 2]), and the map from r to it."""

    least: float
    most: float
    mapping: dict[str, Any]


class Span(BaseModel):
    """From the least to the most."""

    least: int
    most: int


class Defence(BaseModel):
    """The constants of the defence; its noise is keyed by a secret, they are not."""

    name: str
    tau: float | None = Field(description="The gate opens at score >= tau; null corrects every image.")
    alpha: float
    views: int
    probe_sigma: list[float]
    sigma: SigmaRange
    passes: Span = Field(description="Encoder passes an image can cost.")
    constant_work: bool


class DemoRange(BaseModel):
    """What the demo attack takes, in 255ths."""

    eps_least: int
    eps_most: int


class Info(BaseModel):
    """What a page needs to know before it asks."""

    service: Literal["react-clip"]
    version: str
    model: str
    image_size: int
    dim: int
    labels: Labels
    formats: list[str] = Field(description="Media types of images.")
    limits: Limits
    diagnostics: bool = Field(description="Whether answers carry diagnostics.")
    demo: DemoRange | None = Field(description="Null where /v1/demo/attack is not offered.")
    defence: Defence


class ServedModel(BaseModel):
    """The model, as OpenAI describes one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All models, which is one."""

    object: Literal["list"]
    data: list[ServedModel]


class Status(BaseModel):
    """How the process is."""

    status: Literal["alive", "ready"]


class ErrorLine(BaseModel):
    """One clear line, its kind, and the field it is about."""

    message: str
    type: str
    field: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 200."""

    error: ErrorLine


Model = TypeVar("Model", bound=ImageRequest)


def validate(model: type[Model], fields: dict[str, Any], *, strict: bool) -> Model:
    """Checked fields, or one line about the first that is wrong; ``strict`` where JSON knows types (forms do not)."""
    try:
        return model.model_validate(fields, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Past the field and the position, pydantic names branches of unions, which mean nothing to callers.
        name, *rest = [str(part) for part in first["loc"]] or ["body"]
        place = name[:60] + (f"[{rest[0]}]" if rest and rest[0].isdecimal() else "")
        known = ", ".join(model.model_fields)
        if first["type"] == "missing":
            line = f"{place} is missing; the fields are {known}"
        elif first["type"] == "extra_forbidden":
            line = f"{shown(name)} is no field of this request; the fields are {known}"
        else:
            line = f"{place} is {shown(first['input'])}; {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise RequestError(422, line, field=place.encode("ascii", "replace").decode()) from None
