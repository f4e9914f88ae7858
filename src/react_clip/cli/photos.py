"""Photos of the command line: which files they are, and their pixels in batches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.cli import common
from react_clip.cli.progress import Progress
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip import Encoder
    from react_clip.preprocess import Preprocessing

_BUNDLED = {
    "skimage": ("data/chelsea.png", "data/coffee.png", "data/rocket.jpg", "data/motorcycle_left.png"),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}


def add_photo_argument(parser: argparse.ArgumentParser, *, nargs: str = "+", note: str = "") -> None:
    """Add the photos a command works on, as ``args.photos_in``."""
    parser.add_argument(
        "photos_in", nargs=nargs, type=Path, metavar="PHOTO", help=f"image files or folders of them{note}"
    )


def bundled_photos() -> list[Path]:
    """Photos that come with scikit-image and scikit-learn; neither package is imported."""
    photos = []
    for package, names in _BUNDLED.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ReactClipError(
                f"the demo's own photos come with {package}; run `pip install 'react-clip[demo]'` or give others"
            )
        photos += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return [path for path in photos if path.is_file()]


def expand_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Files as given; folders as the photos in them, sorted."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            photos = sorted(p for p in path.rglob("*") if p.suffix.lower() in PHOTO_SUFFIXES)
            if not photos:
                raise ReactClipError(
                    f"{path} holds no photos ({', '.join(PHOTO_SUFFIXES)}); give another folder or files"
                )
            files += photos
        else:
            common.check_exists(path)
            files.append(path)
    return files


class PhotoReader:
    """Reads the photos of the command line (bundled ones if none are given) as pixel batches, with progress.

    A photo that cannot be read is an entry of ``failed`` and a line on stderr; the others are still read.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.files = expand_inputs(args.photos_in or bundled_photos())
        if len(self.files) == 1:
            from react_clip.preprocess import check_file

            check_file(self.files[0])  # a photo that cannot be used is refused before the model is loaded
        self.failed: list[dict[str, str]] = []
        self._progress = Progress(quiet=args.quiet, unit="photo", total=len(self.files))

    def batches(self, encoder: Encoder, stage: str) -> Iterator[tuple[list[Path], Tensor]]:
        """Paths and pixels ``[B, 3, S, S]`` of the photos that can be read; ``stage`` is what the progress says."""
        yield from self._batches(encoder.preprocessing, common.batch_size(encoder, 32), stage)

    def _batches(self, how: Preprocessing, batch: int, stage: str) -> Iterator[tuple[list[Path], Tensor]]:
        import torch

        with self._progress as progress:
            progress.show(stage, total=len(self.files))
            for start in range(0, len(self.files), batch):
                chunk = self.files[start : start + batch]
                good = [(path, pixels) for path in chunk if (pixels := self._read(path, how)) is not None]
                if good:
                    yield [path for path, _ in good], torch.stack([pixels for _, pixels in good])
                progress.advance(len(chunk))

    def show(self, note: str) -> None:
        """Add a note to the progress, such as the step of an attack."""
        self._progress.show(note=note)

    def write(self, line: str) -> None:
        """Print a line to stdout, above the progress bar."""
        self._progress.write(line)

    def sample(self, count: int, how: Preprocessing) -> Tensor:
        """Pixels ``[N, 3, size, size]`` of at most ``count`` photos, spread evenly over all of them."""
        import torch

        count = min(count, len(self.files))
        self.files = [self.files[number * len(self.files) // count] for number in range(count)]
        batches = [pixels for _, pixels in self._batches(how, 1, "reading photos")]
        if not batches:
            raise ReactClipError(f"none of the {count} photos could be read; give others")
        return torch.cat(batches)

    @property
    def exit_code(self) -> int:
        """2 if any photo could not be read."""
        return 2 if self.failed else 0

    def _read(self, path: Path, how: Preprocessing) -> Tensor | None:
        from react_clip.preprocess import to_pixels

        try:
            return to_pixels(path, how)
        except ReactClipError as error:
            self.failed.append({"file": str(path), "error": str(error)})
            self._progress.write(f"react-clip: {error}", error=True)
            return None
