"""Bytes, paths and PIL images to float pixels in [0, 1], as encoders take them.

RGB on white. Every encoder says how to resize (:class:`Preprocessing`): as its checkpoint was made, or as the paper
does. An image that already has the encoder's size is taken as it is, so preprocessing twice equals preprocessing once.

Files are untrusted: length, format and pixel count are checked before a pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from react_clip.errors import ReactClipError, first_line, missing_or_wrong
from react_clip.storage import photo_files

ImageSource = Image.Image | Path | str | bytes | io.BytesIO | NDArray[np.uint8]
"""One image; a NumPy array is ``[H, W, 3]`` (or grey, or with alpha) in uint8, RGB as in Pillow."""
Images = Tensor | ImageSource | Iterable[ImageSource]
"""Pixels in [0, 1] ``[B, 3, S, S]`` or ``[3, S, S]``, an image, a folder of photos, or any series of images."""
_GIVE = "give a float tensor [B, 3, H, W] in [0, 1], a folder, or PIL images, paths, bytes or uint8 arrays"
_KINDS = (Image.Image, Path, str, bytes, io.BytesIO, np.ndarray)

_LEVELS_OF_16_BITS = [(value + 128) // 257 for value in range(65536)]
"""The nearest of 256 levels for each number of 16 bits; Pillow takes the ends for numbers beyond them."""
_LONGEST_ASPECT = 8
"""Strips are cut to this aspect before resizing: the crop discards the rest, and resizing it could exhaust memory."""


@dataclass(frozen=True)
class Limits:
    """Limits on a file, checked before it is decoded."""

    max_bytes: int = 64 * 2**20
    max_pixels: int = 64_000_000


_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
DEFAULT_LIMITS = Limits()


def read_image(source: ImageSource, limits: Limits = DEFAULT_LIMITS) -> Image.Image:
    """Decode to upright RGB: EXIF rotation applied, CMYK and 16-bit converted, the first frame or page of several.

    Transparent images are laid on white, as most viewers show them: colours under transparent pixels, which nobody
    sees, do not count.
    """
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    name, image = ("the image", source) if isinstance(source, Image.Image) else open_image(source, limits)
    with _decoding(name, limits):
        image.load()
        return _to_rgb(image, name)


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ReactClipError(f"an image of shape {list(array.shape)}: got {layout(array)}; give HWC uint8 0..255")
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)


def layout(pixels: Tensor | NDArray[Any]) -> str:
    """Order of the axes, type and range of pixels, for messages.

    >>> layout(torch.full((2, 224, 224, 3), 255.0))
    'NHWC float32 255..255'
    """
    values = pixels.detach().cpu().numpy() if isinstance(pixels, Tensor) else pixels
    colours = ("HWC" if values.shape[-1] in (1, 3, 4) else "CHW") if values.ndim > 2 else "HW"
    axes = {len(colours): f"{colours} ", len(colours) + 1: f"N{colours} "}.get(values.ndim, "")
    span = f" {values.min():.4g}..{values.max():.4g}" if values.size and values.dtype.kind in "uif" else ""
    return f"{axes}{values.dtype}{span}"


def open_image(source: Path | str | bytes | io.BytesIO, limits: Limits = DEFAULT_LIMITS) -> tuple[str, Image.Image]:
    """The name for messages and the image, of which only the header has been read."""
    name, data = _read_bytes(source, limits)
    if not data:
        raise ReactClipError(f"{name} is empty (0 bytes); give an image file")
    if len(data) > limits.max_bytes:
        raise ReactClipError(f"{name} has {len(data):,} bytes; the limit is {limits.max_bytes:,}; scale it down first")
    with _decoding(name, limits):
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    if (pixels := image.width * image.height) > limits.max_pixels:
        raise ReactClipError(f"{name} has {pixels:,} pixels; the limit is {limits.max_pixels:,}; scale it down first")
    return name, image


@contextmanager
def _decoding(name: str, limits: Limits) -> Iterator[None]:
    """Turn what decoders raise into one line."""
    try:
        with warnings.catch_warnings():
            # The limit is ours; Pillow's own warning would say the same a second time.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except ReactClipError:
        raise
    except UnidentifiedImageError:
        raise ReactClipError(f"{name} is not an image we read; convert it to one of {', '.join(_FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ReactClipError(f"{name} has more than {limits.max_pixels:,} pixels; scale it down first") from None
    except Exception as error:  # decoders raise almost anything on a damaged file
        reason = first_line(error)
        raise ReactClipError(f"{name} cannot be decoded ({reason}); the file is truncated or damaged") from None


def _read_bytes(source: Path | str | bytes | io.BytesIO, limits: Limits) -> tuple[str, bytes]:
    if isinstance(source, bytes | io.BytesIO):
        return "the image", source if isinstance(source, bytes) else source.getvalue()
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return str(path), stream.read(limits.max_bytes + 1)
    except OSError as error:
        raise missing_or_wrong(path, f"{path} cannot be read: {error.strerror}") from None


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "F":
        raise ReactClipError(f"{name} has float pixels, whose range is not known; convert it to 8 or 16 bits")
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit values at 255.
        return image.convert("I").point(_LEVELS_OF_16_BITS, "L").convert("RGB")
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image.convert("RGB"), mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


@dataclass(frozen=True)
class Preprocessing:
    """From an image to a square of pixels: resize, then cut out (or pad to) the central square.

    >>> Preprocessing.paper(224)
    Preprocessing(size=224, resize=256, mode='shorter', interpolation='bilinear', rounds_down=False, fill=0)
    """

    size: int
    """Side of the square."""
    resize: int
    """Length of the resized side or sides."""
    mode: Literal["shorter", "longer", "squash"] = "shorter"
    """Which side gets this length; the other follows in proportion, or with ``squash`` both have it."""
    interpolation: str = "bilinear"
    """Name of a filter of Pillow."""
    rounds_down: bool = False
    """Round half a pixel at the crop's edge down, as in transformers, and not to even numbers, as in torchvision."""
    fill: int = 0
    """Grey value, 0 to 255, beside images that do not fill the square."""

    @classmethod
    def paper(cls, size: int) -> Preprocessing:
        """The paper's, in proportion: shorter side to 256, bilinear, and the central 224 x 224 pixels."""
        return cls(size, round(size * 256 / 224))

    def __call__(self, image: Image.Image) -> Image.Image:
        """The square of an RGB image."""
        size = self.size
        if image.size == (size, size):
            return image
        image = _cut_strip(image) if self.mode == "shorter" else image
        width, height = target = self._target(*image.size)
        image = image.resize(target, Image.Resampling[self.interpolation.upper()])
        square = Image.new("RGB", (size, size), (self.fill,) * 3)
        square.paste(image, (self._start(width), self._start(height)))
        return square

    def _start(self, side: int) -> int:
        """Where a side of the resized image begins in the square: before it, if there is something to cut off."""
        beyond = side - self.size
        return -beyond // 2 if beyond < 0 else -(beyond // 2 if self.rounds_down else round(beyond / 2))

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing."""
        side = self.resize
        if self.mode == "squash":
            return side, side
        if self.mode == "longer":
            ratio = max(width, height) / side
            return max(1, round(width / ratio)), max(1, round(height / ratio))
        if width <= height:
            return side, max(side, int(side * height / width))
        return max(side, int(side * width / height)), side


def _cut_strip(image: Image.Image) -> Image.Image:
    width, height = image.size
    longest = _LONGEST_ASPECT * min(width, height)
    if max(width, height) <= longest:
        return image
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    return image.crop((left, top, left + min(width, longest), top + min(height, longest)))


def to_8bit(image: ImageSource, how: Preprocessing, limits: Limits = DEFAULT_LIMITS) -> Tensor:
    """One image as uint8 pixels ``[3, size, size]``.

    >>> to_8bit(Image.new("RGB", (640, 480), "white"), Preprocessing.paper(224)).shape
    torch.Size([3, 224, 224])
    """
    square = how(read_image(image, limits))
    return torch.from_numpy(np.asarray(square).transpose(2, 0, 1).copy())


def to_float(pixels: Tensor) -> Tensor:
    """Float pixels in [0, 1] of uint8 pixels; floats stay as they are."""
    return from_levels(pixels.float()) if pixels.dtype == torch.uint8 else pixels.float()


def from_levels(levels: Tensor) -> Tensor:
    """Pixels in [0, 1] of floats from 0 to 255, the same bits on every device, because random numbers depend on them.

    >>> from_levels(torch.tensor([0.0, 51.0, 255.0]))
    tensor([0.0000, 0.2000, 1.0000])
    """
    # Divided by a tensor: CUDA replaces a division by a number with a multiplication, which rounds differently.
    return levels / torch.full((), 255.0, dtype=levels.dtype, device=levels.device)


def as_pixels(images: Images, how: Preprocessing, limits: Limits = DEFAULT_LIMITS) -> Tensor:
    """Images of any kind as one batch ``[B, 3, size, size]``; tensors stay as they are (the encoder checks them).

    >>> as_pixels([Image.new("L", (32, 32)), Image.new("RGB", (300, 200))], Preprocessing.paper(224)).shape
    torch.Size([2, 3, 224, 224])
    """
    if isinstance(images, Tensor):
        return images[None] if images.ndim == 3 else images
    return torch.stack([to_float(to_8bit(source, how, limits)) for source in listed(images)])


def listed(images: Images) -> list[ImageSource]:
    """The images of a folder, of a stack ``[N, H, W, 3]``, of a generator or of another series, or the only one."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        return [*photo_files(Path(images))]
    if isinstance(images, _KINDS) and not (isinstance(images, np.ndarray) and images.ndim == 4):
        return [images]
    if not isinstance(images, Iterable):
        raise ReactClipError(f"images are of type {type(images).__name__}; {_GIVE}")
    if not (found := list(images)):
        raise ReactClipError("the list of images is empty; give at least one")
    if wrong := [source for source in found if not isinstance(source, _KINDS)]:
        raise ReactClipError(f"an image is of type {type(wrong[0]).__name__}; {_GIVE}")
    return found


def check_range(pixels: Tensor) -> None:
    """Raise on pixels outside [0, 1] and on NaN; waits for a GPU."""
    low, high = torch.stack(torch.aminmax(pixels.detach())).tolist()
    if not (low >= 0 and high <= 1):  # NaN fails too
        raise ReactClipError(f"pixels span {low:.9g} to {high:.9g}; they must lie in [0, 1] without NaN")


def to_image(pixels: Tensor) -> Image.Image:
    """An 8-bit RGB image of float pixels ``[3, H, W]`` in [0, 1]; the opposite of :func:`to_float`."""
    array = pixels.detach().mul(255).round().clamp(0, 255).to("cpu", torch.uint8).permute(1, 2, 0).contiguous()
    return Image.fromarray(array.numpy())


def data_uri(image: Image.Image, kind: str = "png") -> str:
    """An image as ``data:`` address for pages: PNG, or ``webp`` and ``jpeg`` with quality 80."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, quality=80, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def from_data_uri(text: str) -> bytes:
    """Bytes of a file that is written as base64 or as a data URI. Other addresses are never fetched.

    >>> from_data_uri("data:image/png;base64,iVBORw0KGgo="), from_data_uri("AAEC")
    (b'\\x89PNG\\r\\n\\x1a\\n', b'\\x00\\x01\\x02')
    """
    prefix, found, encoded = text.partition(";base64,") if text[:5].lower() == "data:" else ("", "", text)
    try:
        return base64.b64decode(encoded if found or not prefix else prefix, validate=True)
    except (binascii.Error, ValueError):
        line = "the image is no valid base64; encode the file's bytes (addresses are not fetched)"
        raise ReactClipError(line) from None
