"""Requests of the HTTP API as pydantic models.

They are validated with the service's ``Settings`` as context, which holds the limits. JSON and forms use the same
models; in JSON the types are strict.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from react_clip.errors import ReactClipError
from react_clip.serve.errors import RequestError, quote
from react_clip.serve.settings import Settings
from react_clip.zeroshot import check_names

MAX_EPS = 16
"""Strongest attack of the demo, in 255ths."""

_SENTENCE = "sentence"
"""Type of our own validation errors: their text follows the field's name, or stands alone."""


def _wrong(text: str, **context: Any) -> PydanticCustomError:
    return PydanticCustomError(_SENTENCE, "{text}", {"text": text, **context})


def _image_bytes(image: Any) -> bytes:
    """Bytes of an image that was sent as a file, as base64 or as a data URI. URLs are never fetched."""
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise _wrong(f"is {quote(image)}; send a file, or its bytes as base64")
    start = image[:200].lower()
    if start.startswith("data:"):
        prefix, comma, _ = start.partition(",")
        if not comma or not prefix.endswith(";base64"):
            raise _wrong("is a data URI without base64; write data:image/jpeg;base64,...")
        image = image[len(prefix) + 1 :]
    elif "://" in start:
        raise _wrong("is an address; this service fetches nothing, so send the bytes")
    try:
        data = base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("is no valid base64; encode the file's bytes") from None
    if not data:
        raise _wrong("is empty (0 bytes); give an image file")
    return data


def _check_count(images: list[bytes], info: ValidationInfo[Settings]) -> list[bytes]:
    if len(images) > (limit := info.context.max_images):
        raise _wrong(f"has {len(images)} entries; the limit is {limit}; send several requests")
    return images


def _check_length(text: str, info: ValidationInfo[Settings]) -> str:
    if len(text) > (limit := info.context.max_label_length):
        raise _wrong(f"has {len(text)} characters; the limit is {limit}; shorten it")
    return text


def _check_template(text: str) -> str:
    if text.count("{}") != 1:
        raise _wrong(f"is {quote(text)}; it needs exactly one {{}} where the label goes")
    return text


def _check_names(labels: list[str]) -> list[str]:
    try:
        return list(check_names(labels))
    except ReactClipError as error:
        raise _wrong(str(error), field="labels") from None


ImageBytes = Annotated[
    bytes,
    PlainValidator(_image_bytes),
    WithJsonSchema(
        {
            "type": "string",
            "contentEncoding": "base64",
            "description": "A JPEG, PNG, WebP, GIF, BMP or TIFF file as base64 or data URI; addresses are not fetched.",
        }
    ),
]
Images = Annotated[list[ImageBytes], Field(min_length=1), FailFast(), AfterValidator(_check_count)]
Label = Annotated[str, AfterValidator(_check_length)]
Template = Annotated[Label, AfterValidator(_check_template)]


class Schema(BaseModel):
    """Base of all requests and answers; texts below fields are their descriptions in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ImageRequest(Schema):
    """Fields of all requests."""

    model_config = ConfigDict(extra="forbid")

    images: Images
    """The photos."""
    labels: Annotated[list[Label], Field(min_length=1), AfterValidator(_check_names)] | None = None
    """Names to choose from; by default the server's own. In a form: comma-separated."""
    templates: Annotated[list[Template], Field(min_length=1)] | None = None
    """Prompts with {} for the name; several are averaged. Needs a text tower."""
    model: str | None = None
    """If given, it must be the served model's name."""
    suspicious: bool = False
    """Tell for each photo whether it counts as attacked; the server must allow it (--suspicious)."""

    @model_validator(mode="after")
    def _check_prompts(self, info: ValidationInfo[Settings]) -> ImageRequest:
        if self.labels is None and self.templates is not None:
            raise _wrong("templates are given without labels; give both or neither", field="templates")
        prompts = len(self.labels or []) * len(self.templates or [""])
        if prompts > (limit := info.context.max_labels):
            raise _wrong(
                f"labels times templates makes {prompts} prompts; the limit is {limit}; send fewer", field="labels"
            )
        return self


class ClassifyRequest(ImageRequest):
    """Photos to classify."""

    top_k: int = Field(5, ge=1, le=100_000)
    """Answers per photo, best first."""


class EmbedRequest(ImageRequest):
    """Photos to embed."""

    # OpenAI's clients call it input.
    images: Images = Field(validation_alias=AliasChoices("images", "input"))
    """The photos."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or the base64 of little-endian 32-bit floats."""


class AttackRequest(ClassifyRequest):
    """One photo to attack."""

    images: Annotated[Images, Field(max_length=1)]
    """One photo."""
    eps: float = Field(4.0, ge=0, le=MAX_EPS, allow_inf_nan=False)
    """Largest change of a pixel, in 255ths."""


Request = TypeVar("Request", bound=ImageRequest)


def request_error(model: type[ImageRequest], error: ValidationError) -> RequestError:
    """One line about the first wrong field of a request, as status 422; 400 where the body is no JSON at all."""
    problem = error.errors(include_url=False)[0]
    context = problem.get("ctx", {})
    if problem["type"] == "json_invalid":
        return RequestError(400, f"the body is no valid JSON ({context['error']}); check how it is written")
    # Behind the field and the index pydantic names branches of unions, which mean nothing to callers.
    name, *rest = [str(part) for part in problem["loc"]] or [context.get("field", "body")]
    index = next((part for part in rest if part.isdecimal()), None)
    field = name[:60] + (f"[{index}]" if index else "")
    fields = ", ".join(model.model_fields)
    if problem["type"] == "missing":
        line = f"{field} is missing; the fields are {fields}"
    elif problem["type"] == "extra_forbidden":
        line = f"{quote(name)} is no field of this request; the fields are {fields}"
    elif problem["type"] == _SENTENCE:
        line = context["text"] if "field" in context else f"{field} {context['text']}"
    elif not problem["loc"]:
        line = f"the body is a JSON {type(problem['input']).__name__}; send an object such as " + '{"images": [...]}'
    elif problem["type"] == "too_short":
        line = f"{field} is empty; give at least {context['min_length']}"
    else:
        reason = problem["msg"].replace("Input should", "it should").replace("List should", "it should")
        line = f"{field} is {quote(problem['input'])}; {reason}"
    return RequestError(422, line, field=field.encode("ascii", "replace").decode())
