"""Webdataset shards: ``*.tar`` files in which ``x.jpg`` and ``x.cls`` (or ``x.json``) are one photo and its label.

A shard is indexed once and its members are then read in place, so a set far larger than memory opens at random.
"""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path, PurePosixPath

from react_clip.data.dataset import ImageDataset
from react_clip.data.folder import EXTENSIONS
from react_clip.data.spec import DatasetSpec
from react_clip.data.tagged import Tagged, build
from react_clip.errors import ReactClipError


def find_shards(root: Path, name: str, splits: tuple[str, ...]) -> list[Path]:
    """The shards of the first of these splits that has any."""
    return next((found for split in splits if (found := sorted((root / name / split).glob("*.tar")))), [])


def load_shards(shards: list[Path], name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read shards; ``classnames.txt`` above them, where there is one, is the class list their indices mean."""
    rows = [row for shard in shards for row in _index(shard)]
    listed = shards[0].parent.parent / "classnames.txt"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    return build(rows, [line for line in lines if line.strip()], name, split, spec)


def _index(shard: Path) -> list[Tagged]:
    rows = []
    try:
        with tarfile.open(shard, "r:") as archive:
            samples: dict[str, dict[str, tarfile.TarInfo]] = {}
            for member in archive:
                if member.isfile():
                    sample, extension = _split_name(member.name)
                    samples.setdefault(sample, {})[extension] = member
            for sample, members in samples.items():
                photo = next(
                    (member for extension, member in members.items() if _suffix(extension) in EXTENSIONS), None
                )
                if photo is not None:
                    read = partial(_read, shard, photo.offset_data, photo.size)
                    rows.append(Tagged(f"{shard.stem}/{sample}", _tag(archive, members, sample), read))
    except (tarfile.TarError, OSError) as error:
        raise ReactClipError(f"shard {shard} cannot be read ({error}); get it again") from error
    return rows


def _split_name(member: str) -> tuple[str, str]:
    """Webdataset's rule: everything after the first dot of the file name is the extension."""
    path = PurePosixPath(member)
    stem, _, extension = path.name.partition(".")
    return (path.parent / stem).as_posix(), f".{extension.lower()}"


def _suffix(extension: str) -> str:
    return f".{extension.rpartition('.')[2]}"


def _tag(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], sample: str) -> int | str:
    for extension in (".cls", ".json"):
        if (member := members.get(extension)) is None or (stream := archive.extractfile(member)) is None:
            continue
        text = stream.read().decode("utf-8", errors="replace").strip()
        try:
            tag = json.loads(text)
        except json.JSONDecodeError:
            tag = text  # a class name, written bare
        if isinstance(tag, dict):
            tag = next((tag[field] for field in ("cls", "label", "class") if field in tag), None)
        if isinstance(tag, int | str):
            return tag
    raise ReactClipError(
        f"photo {sample} in {archive.name!s} has no label; add {sample}.cls with a class index, or {sample}.json with "
        '{"label": ...}'
    )


def _read(shard: Path, offset: int, size: int) -> bytes:
    with shard.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)
