"""Images from files: all formats and modes, limits, and one-line errors for bad files."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from react_clip import ReactClipError
from react_clip.preprocess import ImageSource, Limits, Preprocessing, as_pixels, read_image, to_8bit, to_float


def photo(width: int = 60, height: int = 40) -> Image.Image:
    """A picture whose corners differ, so that turns and flips show."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


SMALL = Preprocessing.paper(24)


def to_pixels(image: ImageSource, how: Preprocessing) -> torch.Tensor:
    return to_float(to_8bit(image, how))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_bytes_paths_and_images_give_the_same_pixels(format: str, tmp_path: Path) -> None:
    data = encoded(photo(), format)
    path = tmp_path / "photo"
    path.write_bytes(data)
    expected = to_pixels(Image.open(io.BytesIO(data)), SMALL)
    assert expected.shape == (3, 24, 24)
    assert expected.min() >= 0
    assert expected.max() <= 1
    for source in (data, path, str(path)):
        assert torch.equal(to_pixels(source, SMALL), expected)
    assert torch.equal(as_pixels([data, path], SMALL), torch.stack([expected, expected]))


def test_the_crop_is_torchvisions_resize_256_and_centre_crop_224() -> None:
    from torchvision import transforms

    published = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    for size in ((500, 375), (375, 500), (64, 64), (300, 301), (224, 225)):
        assert torch.equal(to_pixels(photo(*size), Preprocessing.paper(224)), published(photo(*size))), size
    once = Preprocessing.paper(224)(photo(300, 200))
    assert Preprocessing.paper(224)(once) is once


def test_exif_rotation_is_applied() -> None:
    upright = photo()
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn a quarter clockwise to see it upright"
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    assert np.abs(np.asarray(read_image(encoded(turned, "PNG", exif=exif)), int) - np.asarray(upright, int)).max() == 0


def test_cmyk_gray_alpha_and_palette_become_rgb() -> None:
    image = photo()
    cmyk = read_image(encoded(image.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(np.asarray(cmyk, int) - np.asarray(image, int)).mean() < 6
    for mode in ("L", "LA", "RGBA", "P", "1"):
        assert read_image(encoded(image.convert(mode), "PNG")).mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_whatever_lies_under_them(mode: str) -> None:
    hidden = photo().convert("RGBA")
    hidden.putalpha(0)
    hidden.paste((255, 0, 0, 255), (0, 0, 10, 40))
    image = hidden.quantize(16) if mode == "P" else hidden.convert(mode)
    for source in (encoded(image, "PNG"), image):
        read = np.asarray(read_image(source), int)
        assert (read[:, 10:] == 255).all(), "transparent"
        assert (read[:, :10, 1] < 100).all(), "opaque"


def test_half_transparent_pixels_are_mixed_with_white_and_opaque_ones_are_untouched() -> None:
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert np.abs(np.asarray(read_image(half))[0, 0].astype(int) - [255, 127, 127]).max() <= 1
    assert np.array_equal(np.asarray(read_image(photo().convert("RGBA"))), np.asarray(photo()))


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bit_grey_is_rounded_to_the_nearest_level(mode: str) -> None:
    values = np.arange(65536).reshape(256, 256)
    if mode == "I":
        image = Image.fromarray(values.astype(np.int32))
    else:
        dtype = ">u2" if mode == "I;16B" else "<u2"
        image = Image.frombytes(mode, (256, 256), values.astype(dtype).tobytes())
    assert image.mode == mode
    # 257 is odd, so that no value lies half-way between two levels: there is only one right answer.
    expected = np.rint(values / 257).astype(np.uint8)
    assert np.array_equal(np.asarray(read_image(image)), np.stack([expected] * 3, -1))
    beyond = Image.fromarray(np.array([[-(2**31), -1, 65536, 2**31 - 1]], np.int32))
    assert np.asarray(read_image(beyond))[0, :, 0].tolist() == [0, 0, 255, 255]


def test_of_several_frames_or_pages_the_first_counts() -> None:
    frames = [photo(), Image.new("RGB", (60, 40), "red")]
    for format in ("GIF", "WEBP", "TIFF"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.abs(np.asarray(read_image(data), int) - np.asarray(frames[0], int)).mean() < 12


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing: what a decompression bomb looks like from outside."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"hello, this is no image", "is not an image we read; convert it to one of JPEG, PNG"),
        (encoded(photo(), "JPEG")[:300], "truncated or damaged"),
        (encoded(photo(), "PNG")[:200], "truncated or damaged"),
        (png_header(60_000, 60_000), "more than 64,000,000 pixels"),
        (png_header(9_000, 9_000), "81,000,000 pixels; the limit is 64,000,000; scale it down"),
        (encoded(Image.new("F", (40, 30), 0.5), "TIFF"), "has float pixels, whose range is not known"),
        (encoded(photo(), "PPM"), "is not an image we read"),
    ],
    ids=["empty", "text", "cut jpeg", "cut png", "bomb", "large", "float tiff", "ppm"],
)
def test_bad_files_get_one_clear_line(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(ReactClipError, match=says) as caught:
            read_image(source)
    assert str(path) in str(caught.value)


def test_limits_are_checked_before_decoding() -> None:
    data = encoded(photo(), "PNG")
    with pytest.raises(ReactClipError, match="bytes; the limit is 100"):
        read_image(data, Limits(max_bytes=100))
    with pytest.raises(ReactClipError, match="has 2,400 pixels; the limit is 2,000"):
        read_image(data, Limits(max_pixels=2000))


def test_a_long_strip_is_cut_before_it_is_resized() -> None:
    strip = Image.new("RGB", (400_000, 1), "white")
    assert to_pixels(strip, Preprocessing.paper(224)).shape == (3, 224, 224)
    wide, cut = photo(2000, 20), photo(2000, 20).crop((920, 0, 1080, 20))
    assert torch.allclose(to_pixels(wide, SMALL), to_pixels(cut, SMALL), atol=0.02)


def test_what_people_hold_gives_the_same_pixels(tmp_path: Path) -> None:
    images = [photo(40, 30), photo(30, 40).rotate(90)]
    arrays = [np.asarray(image) for image in images]
    files = [io.BytesIO(), io.BytesIO()]
    for number, (image, file) in enumerate(zip(images, files, strict=True)):
        image.save(file, format="PNG")
        image.save(tmp_path / f"{number}.png")
    expected = as_pixels(images, SMALL)
    same_size = np.stack([np.asarray(image.resize((50, 50))) for image in images])
    for held in (arrays, files, tuple(arrays), (image for image in images), tmp_path, str(tmp_path)):
        assert torch.equal(as_pixels(held, SMALL), expected)
    assert torch.equal(as_pixels(arrays[0], SMALL), expected[:1])
    assert torch.equal(as_pixels(same_size, SMALL), as_pixels(list(same_size), SMALL))
    assert torch.equal(as_pixels(arrays[0][..., :1], SMALL), as_pixels(arrays[0][..., 0], SMALL))
    assert torch.equal(as_pixels(expected[0], SMALL), expected[:1])


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([], "the list of images is empty"),
        (12, "images are of type int"),
        ([np.zeros((4, 4))], r"of shape \[4, 4\]: got HW float64 0\.\.0; give HWC uint8"),
        (np.full((4, 5, 3), 255, np.float32), r"got HWC float32 255\.\.255"),
        (np.zeros((3, 8, 9), np.uint8), r"got CHW uint8 0\.\.0"),
        ([object()], "an image is of type object"),
        ([torch.zeros(3, 4, 4)], r"an image is of type Tensor; give a float tensor \[B, 3, H, W\]"),
        ("no/such/file.jpg", "does not exist"),
        (Path(__file__).parent / "bench", "bench holds no photos"),
    ],
)
def test_other_types_than_images_are_refused(images: object, says: str) -> None:
    with pytest.raises(ReactClipError, match=says):
        as_pixels(images, SMALL)  # type: ignore[arg-type]
