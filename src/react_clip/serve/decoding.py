"""Untrusted bytes to validated requests and pixels.

Bodies stay in memory and are parsed and decoded in a few threads beside the event loop. What bounds the time of a
thread is checked before it starts: the number of JSON values, the format by its first bytes, the pixels by the header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from PIL import Image
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest

from react_clip import noise
from react_clip.errors import ReactClipError
from react_clip.preprocess import Limits, Preprocessing, open_image, to_8bit
from react_clip.serve.engine import Photo
from react_clip.serve.errors import RequestError, quote
from react_clip.serve.requests import ImageRequest, Request, request_error
from react_clip.serve.settings import Settings

_SIGNATURES = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM"),
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF and BigTIFF
)
"""First bytes of the formats that the library reads; WebP has its own after the length."""

_OTHER_FIELDS = 100
"""Parts of a form, or values in JSON, beside images and labels; it only bounds the work of parsing."""

_SMALL_BYTES, _SMALL_PIXELS = 2**15, 2**18
"""Largest image that is decoded on the event loop; other requests wait meanwhile."""

T = TypeVar("T")


class Decoder:
    """Parses request bodies and decodes images in ``settings.decoders`` threads."""

    def __init__(self, settings: Settings, *, preprocessing: Preprocessing, secret: bytes) -> None:
        self._settings, self._preprocessing, self._secret = settings, preprocessing, secret
        self._limits = Limits(max_bytes=settings.max_body, max_pixels=settings.max_pixels)
        self._threads = ThreadPoolExecutor(settings.decoders, thread_name_prefix="react-clip-decode")

    async def read(self, http: HttpRequest, model: type[Request]) -> Request:
        """The validated body of a request, which is JSON or a multipart form."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            return await self._run(_parse_json, model, await http.body(), self._settings)
        if kind == "multipart/form-data":
            fields = await _read_form(http, self._settings)
            validate = partial(_validate, model, lambda: model.model_validate(fields, context=self._settings))
            # Images that are files need no work here; a thread for nothing would take longer than the check itself.
            images = [image for name in ("images", "input") for image in fields.get(name, [])]
            return validate() if all(isinstance(image, bytes) for image in images) else await self._run(validate)
        raise RequestError(
            415,
            f"content-type is {quote(http.headers.get('content-type', ''))}; send application/json or "
            "multipart/form-data",
            field="content-type",
        )

    async def photos(self, images: list[bytes]) -> list[Photo]:
        """Pixels and noise keys of image files; cancelling this drops the files that still wait for a thread."""
        if len(images) == 1 and len(images[0]) <= _SMALL_BYTES:
            check_format(field := "images[0]", images[0])
            with _named(field):
                _, image = open_image(images[0], self._limits)
            if image.width * image.height <= _SMALL_PIXELS:
                # It takes a millisecond, and a fifth more in a thread.
                return [self._decode(field, image)]
        jobs = [self._run(self._decode, f"images[{i}]", image) for i, image in enumerate(images)]
        return list(await asyncio.gather(*jobs))

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _decode(self, field: str, image: bytes | Image.Image) -> Photo:
        if isinstance(image, bytes):
            check_format(field, image)
        with _named(field):
            pixels = to_8bit(image, self._preprocessing, self._limits)
        return Photo(pixels, int(noise.stream_keys(pixels[None], self._secret)))


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Refuse the request if its image in this field cannot be read."""
    try:
        yield
    except ReactClipError as error:
        raise RequestError(422, str(error).replace("the image", field, 1), field=field) from None


def check_format(field: str, data: bytes) -> None:
    """Refuse files that do not start like an image that the library reads: no other decoder sees a caller's bytes.

    >>> check_format("images[0]", b"<svg>")
    Traceback (most recent call last):
    ...
    react_clip.serve.errors.RequestError: images[0] is no JPEG, PNG, WebP, GIF, BMP or TIFF file; convert it
    """
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not (webp or data.startswith(_SIGNATURES)):
        line = f"{field} is no JPEG, PNG, WebP, GIF, BMP or TIFF file; convert it"
        raise RequestError(415, line, field=field)


def _validate(model: type[ImageRequest], validate: Callable[[], Request]) -> Request:
    try:
        return validate()
    except ValidationError as error:
        raise request_error(model, error) from None


def _parse_json(model: type[Request], body: bytes, settings: Settings) -> Request:
    # Counting is a thousand times faster than parsing: millions of small values must not fill the memory.
    limit = settings.max_images + settings.max_labels * (settings.max_label_length + 1) + _OTHER_FIELDS
    values = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    if values > limit:
        raise RequestError(422, f"the body has about {values:,} values; the limit is {limit:,}; send fewer")
    return _validate(model, lambda: model.model_validate_json(body, strict=True, context=settings))


class _MemoryParser(MultiPartParser):
    """Starlette's parser with files in memory only; ``ended`` tells whether the last boundary was seen."""

    spool_max_size = 0  # no limit: a file is never written to a disk
    ended = False

    def on_end(self) -> None:
        self.ended = True


async def _read_form(http: HttpRequest, settings: Settings) -> dict[str, Any]:
    """Fields of a form by name; images are bytes, labels are split at commas."""
    parser = _MemoryParser(
        http.headers,
        http.stream(),
        max_files=settings.max_images,
        max_fields=settings.max_labels + _OTHER_FIELDS,
        # Four bytes a character at most, and a comma and a space between two labels.
        max_part_size=settings.max_labels * (4 * settings.max_label_length + 2),
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        line = f"the multipart form cannot be read ({error.message.rstrip('.')}); let your client library write it"
        raise RequestError(400, line) from None
    if not parser.ended:
        raise RequestError(400, "the multipart form ends before its last boundary; the upload was cut short")
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        name = name.removesuffix("[]")
        data = await value.read() if isinstance(value, UploadFile) else value
        if name == "labels" and isinstance(data, str):
            fields.setdefault(name, []).extend(part.strip() for part in data.split(","))
        elif name in ("images", "input", "labels", "templates"):
            fields.setdefault(name, []).append(data)
        else:
            fields[name] = data
    return fields
