"""Requests of the HTTP API as pydantic models, and the decoding of their photos.

JSON and forms use the same models; in JSON the types are strict.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import torch
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from torch import Tensor

from react_clip import noise
from react_clip.errors import ReactClipError
from react_clip.preprocess import Limits, from_data_uri, open_image, to_8bit
from react_clip.serve.errors import RequestError, quote
from react_clip.serve.responses import Info, Schema
from react_clip.serve.settings import LABEL_LENGTH, MAX_EPS, TEXT_LENGTH, Settings
from react_clip.zeroshot import DEFAULT_TEMPLATES, check_names

if TYPE_CHECKING:
    from react_clip.serve.app import Service

_FILE = "A JPEG, PNG, WebP, GIF, BMP or TIFF file as base64 or data URL; addresses are not fetched."
_IMAGE_SCHEMA = {"type": "string", "contentEncoding": "base64", "description": _FILE}
Images = Annotated[list[Annotated[Any, WithJsonSchema(_IMAGE_SCHEMA)]], Field(min_length=1)]
Inputs = Annotated[Images, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
Label = Annotated[str, Field(max_length=LABEL_LENGTH)]


class ImageRequest(Schema):
    """Fields of all requests."""

    model_config = ConfigDict(extra="forbid")

    images: Images
    """The photos."""
    labels: Annotated[list[Label], Field(min_length=1)] | None = None
    """Names to choose from; by default the server's own. In a form: comma-separated, or a JSON list."""
    model: str | None = None
    """If given, it must be the served model's name."""


class ClassifyRequest(ImageRequest):
    """Photos to classify."""

    top_k: int = Field(5, ge=1, le=100_000)
    """Answers per photo, best first."""


class EmbeddingsRequest(ImageRequest):
    """Images and texts to embed, in the shape of OpenAI's clients."""

    images: Inputs = Field(validation_alias=AliasChoices("input", "images"))
    """An image or a text, or a list of them; texts where the model has a text tower."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or the base64 of little-endian 32-bit floats."""
    dimensions: int | None = None
    """If given, it must be the model's."""
    user: Annotated[str, Field(max_length=1000)] | None = None
    """Not used."""


class AttackRequest(ClassifyRequest):
    """One photo to attack."""

    images: Annotated[Images, Field(max_length=1)]
    """One photo."""
    eps: float = Field(4.0, ge=0, le=MAX_EPS, allow_inf_nan=False)
    """Largest change of a pixel, in 255ths."""


Request = TypeVar("Request", bound=ImageRequest)


@dataclass(frozen=True, eq=False)
class Asked(Generic[Request]):
    """A request whose photos are decoded."""

    body: Request
    labels: list[str]
    """Names to choose from."""
    pixels: Tensor
    """``[N, 3, S, S]`` in 8 bits, of the photos that could be read."""
    keys: list[int]
    """Key of the noise of each of these."""
    errors: dict[int, str]
    """One line about each photo that could not be read, by its place in the request."""
    texts: dict[int, str]
    """Texts among the entries of a request for embeddings, by their place."""


def prepare(model: type[Request], content: bytes | dict[str, Any], service: Service) -> Asked[Request]:
    """Validate a JSON document, or the fields of a form (lists of texts and files, by name), and decode its photos.

    It runs on a thread. What bounds its time is checked first: the number of JSON values, of photos and of labels, the
    format of a photo by its first bytes, its pixels by its header.
    """
    info, settings = service.client.info, service.settings
    values = sum(map(content.count, (b",", b":", b"[", b"{"))) if isinstance(content, bytes) else 0
    if values > (most := settings.max_images + settings.max_labels * (LABEL_LENGTH + 1) + 100):
        raise RequestError(422, f"the body has about {values:,} values; the limit is {most:,}; send fewer")
    try:
        if isinstance(content, bytes):
            body = model.model_validate_json(content, strict=True)
        else:
            body = model.model_validate(_of_form(content))
    except ValidationError as error:
        raise _request_error(model, error) from None
    if body.model not in (None, "", info.model):
        raise _invalid("model", f"model is {quote(body.model)}; this service has {info.model!r}")
    if body.labels is not None:
        _check_labels(body.labels, info, settings)
    name, texts = "images", dict[int, str]()
    if isinstance(body, EmbeddingsRequest):
        name, texts = "input", _texts(body, info, settings)
    images = {index: data for index, data in enumerate(body.images) if index not in texts}
    if len(images) > (most := settings.max_images):
        raise _invalid(name, f"{name} has {len(images)} images, at most {most}; send several requests")
    limits, pixels, errors = Limits(max_bytes=settings.max_body, max_pixels=settings.max_pixels), [], dict[int, str]()
    for index, image in images.items():
        try:
            if not isinstance(image, bytes | str):
                raise ReactClipError(f"the image is {quote(image)}; send a file, or its bytes as base64")
            source = from_data_uri(image) if isinstance(image, str) else image
            pixels.append(to_8bit(source, service.client.preprocessing, limits))
        except ReactClipError as error:
            errors[index] = str(error).replace("the image", f"{name}[{index}]", 1)
    # Embeddings go to programs that expect one for every entry.
    if errors and (not pixels or name == "input"):
        index, line = next(iter(errors.items()))
        raise _invalid(f"{name}[{index}]", f"{line} ({len(errors)} wrong of {len(body.images)})")
    keys = [noise.secret_key(image, service.secrets.noise) for image in pixels]
    stacked = torch.stack(pixels) if pixels else torch.empty(0)
    return Asked(body, body.labels or info.labels["preset"], stacked, keys, errors, texts)


def _texts(body: EmbeddingsRequest, info: Info, settings: Settings) -> dict[int, str]:
    """Texts among the entries, by their place, where the model can embed them."""
    if body.dimensions not in (None, info.dim):
        raise _invalid("dimensions", f"dimensions is {body.dimensions}; this model has {info.dim}; leave it out")
    if (number := len(body.images)) > (most := max(settings.max_images, settings.max_labels)):
        raise _invalid("input", f"input has {number:,} entries, at most {most:,}; send several requests")
    if not all(isinstance(entry, bytes | str) for entry in body.images):
        line = "input has what is no image and no text; send no tokens (LangChain: check_embedding_ctx_length=False)"
        raise _invalid("input", line)
    texts = {index: entry for index, entry in enumerate(body.images) if isinstance(entry, str) and _is_text(entry)}
    for field, text in ((f"input[{index}]", text) for index, text in texts.items()):
        if not text.strip():
            raise _invalid(field, f"{field} is empty; send an image or a text")
        if not info.text:
            raise _invalid(field, f"{field} is no image, and this model has no text tower; send base64 or data URLs")
    return texts


def _is_text(entry: str) -> bool:
    """True for what is short, no address, and no image as base64 or data URL.

    >>> _is_text("a cat"), _is_text("cats"), _is_text("data:image/png;base64,iVBO"), _is_text("x" * 5000)
    (True, True, False, False)
    """
    if len(entry) > TEXT_LENGTH or entry[:8].lower().startswith(("data:", "http://", "https://")):
        return False
    try:
        open_image(from_data_uri(entry))
    except ReactClipError:
        return True
    return False


def _invalid(field: str, line: str) -> RequestError:
    return RequestError(422, line, field=field)


def _check_labels(names: list[str], info: Info, settings: Settings) -> None:
    if not info.labels["free"]:
        raise _invalid("labels", "labels are given, but this service answers for its own only; leave them out")
    prompts, most = len(names) * len(settings.template or DEFAULT_TEMPLATES), settings.max_labels
    if prompts > most:
        raise _invalid("labels", f"labels times templates makes {prompts} prompts; the limit is {most}; send fewer")
    try:
        check_names(names)
    except ReactClipError as error:
        raise _invalid("labels", str(error)) from None


def _of_form(fields: dict[str, list[Any]]) -> dict[str, Any]:
    """Fields as the models take them: lists of images and labels, the last of every other field."""
    lists: dict[str, Callable[[list[Any]], list[Any]]]
    lists = {"images": list, "input": list, "labels": _labels}
    return {name: lists[name](given) if name in lists else given[-1] for name, given in fields.items()}


def _labels(given: list[Any]) -> list[Any]:
    """Labels of a form's fields: each a JSON list, or separated by commas.

    >>> _labels(['["cat", "dog, wet"]']), _labels(["cat, dog", "teapot"])
    (['cat', 'dog, wet'], ['cat', 'dog', 'teapot'])
    """
    labels = list[Any]()
    for text in map(str, given):
        try:
            labels += json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
        except (ValueError, RecursionError):
            raise _invalid("labels", "labels starts like a JSON list and is none; check it") from None
    return labels


def _request_error(model: type[ImageRequest], error: ValidationError) -> RequestError:
    """One line about the first wrong field of a request, as status 422; 400 where the body is no JSON at all."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        return RequestError(400, f"the body is no valid JSON ({problem['ctx']['error']}); check how it is written")
    name, *rest = [str(part) for part in problem["loc"]] or ["body"]
    field = name[:60].encode("ascii", "replace").decode() + "".join(f"[{part}]" for part in rest)
    line = f"{field} is {quote(problem['input'])}; {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] in ("missing", "extra_forbidden"):
        fields = model.model_json_schema()["properties"]  # by the names that callers use
        line = f"{field}: {problem['msg']}; the fields are {', '.join(fields)}"
    return RequestError(422, line, field=field)


EXAMPLE = "R0lGODdhCgAKAIEAAEaCyNIoKAAAAAAAACwAAAAACgAKAAAIHwABCBxIsKDBgQECHEyYsCBDhgQfNowI0eDEgxgPBgQAOw=="
"""A drawing of a red ball on blue, so that examples can be run as they are."""


def described(model: type[ImageRequest], **fields: Any) -> dict[str, Any]:
    """The OpenAPI description of a body that FastAPI cannot infer: JSON with base64, with an example, or a form."""
    schema = model.model_json_schema()
    name = "input" if "input" in schema["properties"] else "images"
    files = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
    form = schema | {"properties": schema["properties"] | {name: files}}
    content = {
        "application/json": {"schema": schema, "example": {name: [EXAMPLE], **fields}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}
