"""Photos of the command line: which files they are, and their pixels in batches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.choices import PHOTO_SUFFIXES
from react_clip.cli import common, options
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

_BUNDLED = {
    "skimage": ("data/chelsea.png", "data/coffee.png", "data/rocket.jpg", "data/motorcycle_left.png"),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}


def add_photo_argument(parser: argparse.ArgumentParser, *, nargs: str = "+", note: str = "") -> None:
    """Add the photos a command works on, as ``args.photos_in``."""
    parser.add_argument(
        "photos_in", nargs=nargs, type=options.existing, metavar="PHOTO", help=f"image files or folders of them{note}"
    )


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
    files: list[Path] = []
    for path in inputs:
        found = [path] if not path.is_dir() else [p for p in path.rglob("*") if p.suffix.lower() in PHOTO_SUFFIXES]
        if not found:
            raise ReactClipError(f"{path} holds no photos ({', '.join(PHOTO_SUFFIXES)}); give another folder or files")
        files += sorted(found)
    return files


class PhotoReader:
    """Reads photos (bundled ones if none are given) as pixel batches, with progress.

    A photo that cannot be read is an entry of ``failed`` and a line on stderr; the others are still read.
    """

    def __init__(self, photos: Sequence[Path], args: argparse.Namespace) -> None:
        self.files = expand_inputs(photos or bundled_photos())
        self.failed: list[dict[str, str]] = []
        self.bar: tqdm[Any]
        self._args = args

    def batches(self, encoder: rc.Encoder, stage: str) -> Iterator[tuple[list[Path], Tensor]]:
        """Paths and pixels ``[B, 3, S, S]`` of the photos that can be read; ``stage`` is what the progress says."""
        import torch

        batch = common.batch_size(encoder, 32)
        with common.progress(self._args, "photo", len(self.files), stage) as self.bar:
            for start in range(0, len(self.files), batch):
                some = self.files[start : start + batch]
                good = {path: pixels for path in some if (pixels := self._read(path, encoder)) is not None}
                if good:
                    yield [*good], torch.cat([*good.values()])
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

    def _read(self, path: Path, encoder: rc.Encoder) -> Tensor | None:
        try:
            return encoder.prepare([path])
        except ReactClipError as error:
            self.failed.append({"file": str(path), "error": str(error)})
            common.say(f"react-clip: {error}", error=True)
            return None
