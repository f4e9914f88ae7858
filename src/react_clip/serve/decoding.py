"""Untrusted bytes to validated requests and pixels.

Bodies stay in memory and are parsed and decoded in a few threads beside the event loop. What bounds the time of a
thread is checked before it starts: the number of JSON values, the format by its first bytes, the pixels by the header.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from PIL import Image
from pydantic import ValidationError
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request as HttpRequest

from react_clip import noise
from react_clip.errors import ReactClipError
from react_clip.preprocess import Limits, Preprocessing, open_image, to_8bit
from react_clip.serve.answers import Photo
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
                # About a millisecond of work, which is not worth a thread.
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
        return Photo(pixels, noise.secret_key(pixels, self._secret))


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


class _Form:
    """Fields of a multipart form by name, in memory: bytes of files, texts of fields, labels split at commas.

    It takes what python-multipart calls back while it parses. Starlette's parser puts files into temporary ones, which
    takes more processor time.
    """

    def __init__(self, settings: Settings) -> None:
        self.fields: dict[str, Any] = {}
        self.ended = False
        self._most = {"files": settings.max_images, "fields": settings.max_labels + _OTHER_FIELDS}
        # Four bytes a character at most, and a comma and a space between two labels.
        self._longest = settings.max_labels * (4 * settings.max_label_length + 2)
        self._parts = Counter[str]()

    @property
    def callbacks(self) -> Any:
        """Functions for the parser, by its names."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_to_header,
            "on_header_value": self._add_to_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._header = self._value = self._disposition = b""
        self._chunks: list[bytes] = []
        self._length = 0

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _check_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise FormParserError('a part has no "name" in its content-disposition')
        self._name = options[b"name"].decode("utf-8", "replace").removesuffix("[]")
        self._is_file = b"filename" in options
        kind = "files" if self._is_file else "fields"
        self._parts[kind] += 1
        if self._parts[kind] > (limit := self._most[kind]):
            raise RequestError(400, f"the form has more than {limit:,} {kind}; send several requests")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._length += end - start
        if self._length > self._longest and not self._is_file:
            line = f"{quote(self._name)} has more than {self._longest:,} bytes; send fewer or shorter texts"
            raise RequestError(400, line)
        self._chunks.append(data[start:end])

    def _end_part(self) -> None:
        content = b"".join(self._chunks)
        value = content if self._is_file else content.decode("utf-8", "replace")
        if self._name == "labels" and isinstance(value, str):
            self.fields.setdefault("labels", []).extend(part.strip() for part in value.split(","))
        elif self._name in ("images", "input", "labels", "templates"):
            self.fields.setdefault(self._name, []).append(value)
        else:
            self.fields[self._name] = value

    def _end(self) -> None:
        self.ended = True


async def _read_form(http: HttpRequest, settings: Settings) -> dict[str, Any]:
    """Fields of a form as :class:`_Form` gives them."""
    _, options = parse_options_header(http.headers["content-type"])
    form = _Form(settings)
    try:
        if not options.get(b"boundary"):
            raise FormParserError("its content-type has no boundary")
        parser = MultipartParser(options[b"boundary"], form.callbacks)
        async for chunk in http.stream():
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        line = f"the multipart form cannot be read ({error}); let your client library write it"
        raise RequestError(400, line) from None
    if not form.ended:
        raise RequestError(400, "the multipart form ends before its last boundary; the upload was cut short")
    return form.fields
