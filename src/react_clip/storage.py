"""Files: the cache folder, atomic writes, locked folders, digests."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.errors import MissingFileError, ReactClipError, missing_or_wrong

if TYPE_CHECKING:
    from torch import Tensor


def cache_dir() -> Path:
    """Folder for models and features: ``$REACT_CLIP_CACHE``, else the system's (``~/.cache/react-clip`` on Linux)."""
    chosen = os.environ.get("REACT_CLIP_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("react-clip", appauthor=False)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that replaces it on success and is removed on any failure.

    Readers see the old file or the new one, never a part; after a full disk or a kill the old one is still there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise ReactClipError(f"cannot write {path}: {error.strerror}; choose another place") from error
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ReactClipError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process; a second process gets an error.

    The kernel's lock ends with the process, however it ends. Temporary files of a killed process are removed.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout:
        line = f"{folder} is in use by another process; wait for it to finish, or choose another --out"
        raise ReactClipError(line) from None
    except OSError as error:
        raise ReactClipError(f"cannot use {folder} for a run: {error.strerror}; choose another --out") from error
    with lock:
        for leftover in folder.glob(".*.part"):
            leftover.unlink(missing_ok=True)
        yield


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds something, and a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReactClipError(f"{folder} is there already; remove it, or choose another --out")


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The photos in each sub-folder of ``folder``, both sorted by name; empty where there is no such folder.

    Hidden files and folders are left out.
    """
    if not folder.is_dir():
        return {}
    return {
        child.name: [
            path
            for path in sorted(child.iterdir())
            if path.suffix.lower() in PHOTO_SUFFIXES and path.is_file() and not path.name.startswith(".")
        ]
        for child in sorted(folder.iterdir())
        if child.is_dir() and not child.name.startswith(".")
    }


def photo_files(folder: Path) -> list[Path]:
    """The photos in a folder and below it, sorted; raises where there are none."""
    if found := sorted(path for path in folder.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES):
        return found
    raise ReactClipError(f"{folder} holds no photos ({', '.join(PHOTO_SUFFIXES)}); give another folder or files")


@contextmanager
def reserved_space(path: Path, size: int) -> Iterator[None]:
    """Hold ``size`` bytes on the disk of a file that will be written afterwards: a full disk is known before the work.

    They belong to a file without a name, of which nothing is left however the process ends.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (closed below)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(held.fileno(), 0, size)
    except OSError as error:
        raise ReactClipError(f"cannot write {path}, {size:,} bytes: {error.strerror}; choose another place") from error
    with held:
        yield


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: Path, advice: str = "check the path") -> str:
    """A UTF-8 text file's content; errors end with the advice."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise missing_or_wrong(path, f"{path} cannot be read: {error.strerror}; {advice}", advice) from None
    except UnicodeDecodeError:
        raise ReactClipError(f"{path} cannot be read: not UTF-8 text; {advice}") from None


def read_json(path: Path, advice: str) -> Any:
    """A JSON file's content; errors end with the advice."""
    try:
        return json.loads(read_text(path, advice))
    except json.JSONDecodeError as error:
        raise ReactClipError(f"{path} is no valid JSON ({error}); {advice}") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save

    # Serialised in memory and written by Python, so that a full disk is an OSError like any other.
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verified(folder: Path, name: str, digest: str | None) -> Path:
    """The file ``name`` of ``folder``; raises if it is missing, lies outside, or has another SHA-256."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ReactClipError(f"the manifest names {name}, which is outside of {folder}; use files inside of it")
    if not path.is_file():
        raise MissingFileError(f"{path} is missing; get all files of the folder")
    if sha256_of(path) != digest:
        raise ReactClipError(f"{path} has another hash than in the manifest; get it again")
    return path


def tensor_digest(tensors: Tensor | Mapping[str, Tensor]) -> str:
    """Hex SHA-256 of the names, types, shapes and values of one or several tensors."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in (tensors if isinstance(tensors, Mapping) else {"": tensors}).items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
