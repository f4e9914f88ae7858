"""Options and building blocks that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip import ReACT, ReactClipError, ZeroShotClassifier, load, pull
from react_clip.bank import LabelBank
from react_clip.encoders import Encoder, offline
from react_clip.preprocess import PHOTO_SUFFIXES, to_pixels


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which encoder, where, in which precision."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=offline.NAME,
        help="hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT, onnx:DIR, openvino:DIR (%(default)s)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (CUDA if there is one)")
    group.add_argument(
        "--dtype", default="fp32", help="fp32, bf16, fp16, or auto: fp16 on a GPU where that is safe (%(default)s)"
    )


def add_label_options(parser: argparse.ArgumentParser) -> None:
    """Which classes, and what defends them."""
    group = parser.add_argument_group("labels")
    group.add_argument("--labels", help="comma-separated names, such as 'cat, dog, teapot'")
    group.add_argument("--labels-file", type=Path, help="a text file with one name a line")
    group.add_argument("--photos", type=Path, help="a folder with one sub-folder of photos per class, instead of names")
    group.add_argument("--template", action="append", help="prompt with {} for the name; repeat for an ensemble")
    group = parser.add_argument_group("defence")
    group.add_argument(
        "--config", help="JSON written by `react-clip calibrate`, or `paper` (by default: what suits the model)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the defence's noise (%(default)s)")


def add_photo_argument(parser: argparse.ArgumentParser, *, nargs: str = "+", note: str = "") -> None:
    """The photos a command works on."""
    parser.add_argument(
        "photos_in", nargs=nargs, type=Path, metavar="PHOTO", help=f"image files or folders of them{note}"
    )


def notice(args: argparse.Namespace, line: str) -> None:
    """Tell people, not machines: to stderr, and not at all with --quiet."""
    if not args.quiet:
        print(line, file=sys.stderr)


def load_encoder(args: argparse.Namespace, *, pull_missing: bool = False) -> Encoder:
    """The encoder asked for; with ``pull_missing`` the offline tower is fetched when it is not there."""
    if pull_missing and args.model == offline.NAME and not offline.is_pulled():
        pull(offline.NAME, say=lambda line: notice(args, line))
    return load(args.model, device=args.device, dtype=args.dtype)


def build_classifier(args: argparse.Namespace, encoder: Encoder) -> ZeroShotClassifier:
    """The classifier that --labels, --labels-file or --photos describe; the label bank's vocabulary without them."""
    given = [name for name in ("labels", "labels_file", "photos") if getattr(args, name) is not None]
    if len(given) > 1:
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ReactClipError(f"{options} are both given; choose one of them")
    if args.photos is not None:
        return ZeroShotClassifier.from_folder(encoder, args.photos, progress=not args.quiet)
    if args.labels is not None:
        names = args.labels.split(",")
        # A comma at the end is a habit, not a blank label.
        names = names[:-1] if len(names) > 1 and not names[-1].strip() else names
        if not any(name.strip() for name in names):
            raise ReactClipError("--labels is empty; give names such as --labels 'cat, dog, teapot'")
    elif args.labels_file is not None:
        names = _read_lines(args.labels_file)
    else:
        bank = LabelBank.load()
        if encoder.base != bank.encoder:
            raise ReactClipError(f"{encoder.name!r} needs names; give --labels 'cat, dog', --labels-file or --photos")
        names = list(bank.vocabulary())
    return ZeroShotClassifier(encoder, names, templates=args.template)


def build_guard(args: argparse.Namespace, encoder: Encoder, *, features: bool = False) -> ReACT:
    """The defence: --config where given, else what suits the encoder; whoever keeps features wants whole anchors."""
    if args.config is None:
        return ReACT.constants_for(encoder) if features else ReACT.for_encoder(encoder)
    return ReACT() if args.config == "paper" else ReACT.load(args.config)


def _read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ReactClipError(f"{path} cannot be read: {reason}") from None
    return [line for line in lines if line.strip()]


def expand_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Files as given; folders as the photos in them, sorted."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in PHOTO_SUFFIXES)
            if not found:
                raise ReactClipError(
                    f"{path} holds no photos ({', '.join(PHOTO_SUFFIXES)}); give another folder or files"
                )
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise ReactClipError(f"{path} does not exist; check the path")
    return files


class PhotoReader:
    """Photos as pixel batches under a progress bar; one that cannot be read costs one line, not the job."""

    def __init__(self, args: argparse.Namespace, *, batch: int = 32) -> None:
        self.files = expand_inputs(args.photos_in)
        self._batch = batch
        self._quiet = args.quiet
        self.failed: list[dict[str, str]] = []

    def batches(self, size: int) -> Iterator[tuple[list[Path], Tensor]]:
        """Paths and pixels of the photos that can be read."""
        with tqdm(total=len(self.files), unit="photo", disable=self._quiet or None) as bar:
            for start in range(0, len(self.files), self._batch):
                chunk = self.files[start : start + self._batch]
                good = [(path, pixels) for path in chunk if (pixels := self._read(path, size)) is not None]
                if good:
                    yield [path for path, _ in good], torch.stack([pixels for _, pixels in good])
                bar.update(len(chunk))

    @property
    def exit_code(self) -> int:
        """2 if any photo could not be read."""
        return 2 if self.failed else 0

    def _read(self, path: Path, size: int) -> Tensor | None:
        try:
            return to_pixels(path, size)
        except ReactClipError as error:
            self.failed.append({"file": str(path), "error": str(error)})
            tqdm.write(f"react-clip: {error}", file=sys.stderr)
            return None
