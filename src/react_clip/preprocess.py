"""Bytes, paths and PIL images to float pixels in [0, 1], as encoders take them.

RGB on white, shorter side to 256 with bilinear filtering, centre crop to 224 (in proportion for encoders of another
size). An image that already has the encoder's size is taken as it is, so preprocessing twice equals preprocessing once.

Files are untrusted: length, format and pixel count are checked before a pixel is decoded.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from react_clip.errors import MissingFileError, ReactClipError, first_line

ImageSource = Image.Image | Path | str | bytes
Images = Tensor | ImageSource | Sequence[ImageSource]

PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
"""Endings of the files that are taken for photos in a folder."""

RESIZE_RATIO = 256 / 224
"""Shorter side before the crop, relative to the crop."""

_LONGEST_ASPECT = 8
"""Strips are cut to this aspect before resizing: the crop discards the rest, and resizing it could exhaust memory."""


@dataclass(frozen=True)
class Limits:
    """Limits on a file, checked before it is decoded."""

    max_bytes: int = 64 * 2**20
    max_pixels: int = 64_000_000
    formats: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


DEFAULT_LIMITS = Limits()


def read_image(source: ImageSource, limits: Limits = DEFAULT_LIMITS) -> Image.Image:
    """Decode to upright RGB: EXIF rotation applied, CMYK and 16-bit converted, the first frame of an animation.

    Transparent images are laid on white, as most viewers show them: colours under transparent pixels, which nobody
    sees, do not count.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source)
    name, image = _open(source, limits)
    with _decoding(name, limits):
        image.load()
    return _to_rgb(image)


def check_file(path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise what :func:`read_image` raises for a file by its length and header; no pixel is decoded."""
    _open(path, limits)


def _open(source: Path | str | bytes, limits: Limits) -> tuple[str, Image.Image]:
    """The name for messages and the image, of which only the header has been read."""
    name, data = _read_bytes(source, limits)
    if not data:
        raise ReactClipError(f"{name} is empty (0 bytes); give an image file")
    if len(data) > limits.max_bytes:
        raise ReactClipError(f"{name} has {len(data):,} bytes; the limit is {limits.max_bytes:,}; scale it down first")
    with _decoding(name, limits):
        image = Image.open(io.BytesIO(data), formats=limits.formats)
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ReactClipError(
            f"{name} has {width} x {height} = {width * height:,} pixels; the limit is {limits.max_pixels:,}; "
            "scale it down first"
        )
    return name, image


@contextmanager
def _decoding(name: str, limits: Limits) -> Iterator[None]:
    """Turn what decoders raise into one line."""
    try:
        with warnings.catch_warnings():
            # The limit is ours; Pillow's own warning would say the same a second time.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except UnidentifiedImageError:
        raise ReactClipError(
            f"{name} is not an image we read; convert it to one of {', '.join(limits.formats)}"
        ) from None
    except Image.DecompressionBombError:
        raise ReactClipError(f"{name} has more than {limits.max_pixels:,} pixels; scale it down first") from None
    except Exception as error:  # decoders raise almost anything on a damaged file
        reason = first_line(error)
        raise ReactClipError(f"{name} cannot be decoded ({reason}); the file is truncated or damaged") from None


def _read_bytes(source: Path | str | bytes, limits: Limits) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return "the image", source
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return str(path), stream.read(limits.max_bytes + 1)
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist; check the path") from None
    except IsADirectoryError:
        raise ReactClipError(f"{path} is a folder; give an image file") from None
    except OSError as error:
        raise ReactClipError(f"{path} cannot be read: {error.strerror}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow would clip 16-bit values at 255. Each becomes the nearest of 256 levels instead: round(v / 257), which
        # is (v + 128) // 257. All from 65407 up are white, and cut there the sum still has 16 bits.
        values = np.clip(np.asarray(image), 0, 65407).astype(np.uint16, copy=False)
        values += 128
        values //= 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image.convert("RGB"), mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def crop_to_size(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to ``size * 256 / 224`` (bilinear), then the central ``size x size`` square."""
    if image.size == (size, size):
        return image
    image = _cut_strip(image)
    width, height = image.size
    short = round(size * RESIZE_RATIO)
    if width <= height:
        target = (short, max(short, int(short * height / width)))
    else:
        target = (max(short, int(short * width / height)), short)
    image = image.resize(target, Image.Resampling.BILINEAR)
    left, top = round((target[0] - size) / 2), round((target[1] - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _cut_strip(image: Image.Image) -> Image.Image:
    width, height = image.size
    longest = _LONGEST_ASPECT * min(width, height)
    if max(width, height) <= longest:
        return image
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return image.crop((left, top, left + min(width, longest), top + min(height, longest)))


def to_pixels(image: ImageSource, size: int, limits: Limits = DEFAULT_LIMITS) -> Tensor:
    """One image as float pixels ``[3, size, size]`` in [0, 1].

    >>> to_pixels(Image.new("RGB", (640, 480), "white"), 224).shape
    torch.Size([3, 224, 224])
    """
    array = np.array(crop_to_size(read_image(image, limits), size), dtype=np.float32)
    return torch.from_numpy(array).permute(2, 0, 1).div(255.0).contiguous()


def as_pixels(images: Images, size: int, limits: Limits = DEFAULT_LIMITS) -> Tensor:
    """Images of any kind as one batch ``[B, 3, size, size]``; tensors stay as they are (the encoder checks them).

    >>> as_pixels([Image.new("L", (32, 32)), Image.new("RGB", (300, 200))], 224).shape
    torch.Size([2, 3, 224, 224])
    """
    if isinstance(images, Tensor):
        return images
    if isinstance(images, Image.Image | Path | str | bytes):
        images = [images]
    if not isinstance(images, Sequence):
        raise ReactClipError(
            f"images are of type {type(images).__name__}; give a float tensor [B, 3, H, W] in [0, 1], or a list of PIL "
            "images, paths or bytes"
        )
    if not images:
        raise ReactClipError("the list of images is empty; give at least one")
    pixels = []
    for source in images:
        if not isinstance(source, Image.Image | Path | str | bytes):
            raise ReactClipError(
                f"an image is of type {type(source).__name__}; lists hold PIL images, paths or bytes (stack tensors "
                "into one [B, 3, H, W] batch)"
            )
        pixels.append(to_pixels(source, size, limits))
    return torch.stack(pixels)


def to_float(pixels: Tensor) -> Tensor:
    """Float pixels in [0, 1] of uint8 pixels; floats stay as they are."""
    return pixels.float().div(255.0) if pixels.dtype == torch.uint8 else pixels.float()


def to_image(pixels: Tensor) -> Image.Image:
    """An 8-bit RGB image of float pixels ``[3, H, W]`` in [0, 1]; the opposite of :func:`to_pixels`."""
    array = pixels.detach().mul(255).round().clamp(0, 255).to("cpu", torch.uint8).permute(1, 2, 0).contiguous()
    return Image.fromarray(array.numpy())


def data_uri(image: Image.Image, kind: str = "png") -> str:
    """An image as ``data:`` address for pages: PNG, or ``webp`` and ``jpeg`` with quality 80."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, quality=80, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
