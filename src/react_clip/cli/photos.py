"""Photos of the command line: which files they are, and their pixels in batches."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.cli import common, options
from react_clip.errors import ReactClipError
from react_clip.storage import photo_files

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

    from react_clip.preprocess import ImageSource

STDIN = Path("-")
"""Stands for JSON lines on standard input."""

_BUNDLED = {
    "skimage": ("data/chelsea.png", "data/coffee.png", "data/rocket.jpg", "data/motorcycle_left.png"),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}


def add_photo_argument(
    parser: argparse.ArgumentParser, *, nargs: str = "+", note: str = "", stdin: bool = False
) -> None:
    """Add the photos a command works on, as ``args.photos_in``; with ``stdin`` also :data:`STDIN`."""

    def photo(text: str) -> Path:
        return STDIN if stdin and text == str(STDIN) else options.existing(text)

    parser.add_argument("photos_in", nargs=nargs, type=photo, metavar="PHOTO", help=f"image files or folders{note}")


def bundled_photos() -> list[Path]:
    """Photos that come with scikit-image and scikit-learn; neither package is imported."""
    photos = []
    for package, names in _BUNDLED.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ReactClipError(f"the bundled photos come with {package}, of the extra `demo`; give others")
        photos += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return [path for path in photos if path.is_file()]


def expand_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Files as given; folders as the photos in them, sorted."""
    return [file for path in inputs for file in (photo_files(path) if path.is_dir() else [path])]


class PhotoReader:
    """Reads photos (bundled ones if none are given, or those of standard input) as pixel batches, with progress.

    A photo that cannot be read is an entry of ``failed`` and a line on stderr; the others are still read.
    """

    def __init__(self, photos: Sequence[Path], args: argparse.Namespace) -> None:
        self.files = [] if [*photos] == [STDIN] else expand_inputs(photos or bundled_photos())
        self.failed: list[dict[str, str]] = []
        self.bar: tqdm[Any]
        self._args = args

    def batches(self, encoder: rc.Encoder, stage: str) -> Iterator[tuple[list[Path], Tensor]]:
        """Paths and pixels ``[B, 3, S, S]`` of the photos that can be read; ``stage`` is what the progress says.

        A photo of standard input has the path or the name that its line says, or the number of the line.
        """
        import torch

        batch = common.batch_size(encoder, 32)
        photos = ((path, path) for path in self.files) if self.files else self._lines()
        with common.progress(self._args, "photo", len(self.files) or None, stage) as self.bar:
            while some := list(itertools.islice(photos, batch)):
                read = [(path, self._read(path, source, encoder)) for path, source in some]
                good = [(path, pixels) for path, pixels in read if pixels is not None]
                if good:
                    yield [path for path, _ in good], torch.cat([pixels for _, pixels in good])
                self.bar.update(len(some))

    def sample(self, count: int, encoder: rc.Encoder) -> Tensor:
        """Pixels ``[N, 3, S, S]`` of at most ``count`` photos, spread evenly over all of them; ``files`` are these."""
        import torch

        count = min(count, len(self.files))
        self.files = [self.files[number * len(self.files) // count] for number in range(count)]
        batches = list(self.batches(encoder, "reading photos"))
        if not batches:
            raise ReactClipError(f"none of the {count} photos could be read; give others")
        self.files = [path for paths, _ in batches for path in paths]
        return torch.cat([pixels for _, pixels in batches])

    @property
    def exit_code(self) -> int:
        """2 if any photo could not be read."""
        return 2 if self.failed else 0

    def _lines(self) -> Iterator[tuple[Path, ImageSource | None]]:
        """Names and images of JSON lines; ``None`` for a line that holds no image."""
        for number, line in enumerate(sys.stdin, start=1):
            if line.strip():
                try:
                    yield _read_line(line, f"line {number}")
                except (ValueError, TypeError, KeyError):
                    yield Path(f"line {number}"), None

    def _read(self, path: Path, source: ImageSource | None, encoder: rc.Encoder) -> Tensor | None:
        try:
            if source is None:
                raise ReactClipError(f'{path} is no photo; write {{"file": PATH}} or {{"image": BASE64, "file": NAME}}')
            return encoder.prepare([source])
        except ReactClipError as error:
            self.failed.append({"file": str(path), "error": str(error)})
            common.say(f"react-clip: {error}", error=True)
            return None


def _read_line(line: str, name: str) -> tuple[Path, ImageSource]:
    """Name and image of ``{"file": path}``, or of ``{"image": base64 or data URI}`` with a name in ``file`` or none."""
    from react_clip.preprocess import from_data_uri

    fields = json.loads(line)
    if "image" not in fields:
        return Path(fields["file"]), Path(fields["file"])
    return Path(fields.get("file", name)), from_data_uri(fields["image"])
