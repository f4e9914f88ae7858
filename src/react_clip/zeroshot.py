"""The zero-shot classifier: an encoder and one unit feature per class, computed once.

Class features come from prompts, from ready features, from folders of photos or, for the offline tower, from the label
table. Features that take long to compute are stored in the user's cache, keyed by weights, names and templates.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from react_clip import functional
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError, missing_or_wrong
from react_clip.label_table import LabelTable
from react_clip.preprocess import as_pixels
from react_clip.storage import cache_dir, class_folders, write_tensors

DEFAULT_TEMPLATES = ("This is a photo of a {}.",)
_PHOTOS = 64
"""Photos that are encoded at a time."""
_FEW_PROMPTS = 64
"""Prompts whose features are computed as fast as the cache is asked for them."""


class ZeroShotClassifier(nn.Module):
    """CLIP with a list of names: ``clf(pixels)`` gives the logits :math:`scale \\cos(f_v, f_t^k) + bias`.

    Scale and bias are the model's own (:class:`react_clip.functional.Similarity`): about 100 and 0 for OpenAI's.

    Args:
        encoder: from :func:`react_clip.load`.
        names: the classes, in the order of the logits.
        templates: prompts with ``{}`` for the name; several are averaged into one feature (prompt ensemble). An encoder
            without a text tower looks the names up in the label table instead; it ignores templates, with a warning.
        unique: refuse a name that is given twice.
    """

    class_features: Tensor
    _empty_prompt: Tensor | None

    def __init__(
        self, encoder: Encoder, names: Sequence[str], *, templates: Sequence[str] | None = None, unique: bool = True
    ) -> None:
        names = check_names(names, unique=unique)
        prompts = tuple(templates or DEFAULT_TEMPLATES)
        if encoder.has_text:
            self._set(encoder, names, _prompt_features(encoder, names, prompts), prompts)
        else:
            self._set(encoder, names, _table_features(encoder, names, templates))

    def _set(
        self, encoder: Encoder, names: tuple[str, ...], features: Tensor, templates: tuple[str, ...] = DEFAULT_TEMPLATES
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.names = names
        self.templates = templates
        self.register_buffer("class_features", features.to(encoder.device), persistent=False)
        self.register_buffer("_empty_prompt", None, persistent=False)

    @classmethod
    def from_features(
        cls, encoder: Encoder, names: Sequence[str], features: Tensor, *, unique: bool = True
    ) -> ZeroShotClassifier:
        """Use ready-made class features ``[len(names), encoder.dim]``; they are scaled to unit length."""
        names = check_names(names, unique=unique)
        features = torch.as_tensor(features).detach()
        if features.shape != (len(names), encoder.dim):
            raise ReactClipError(f"class features have shape {list(features.shape)}, not [{len(names)}, {encoder.dim}]")
        features = features if features.dtype == torch.float64 else features.float()
        lengths = features.norm(dim=1)
        if not bool(torch.isfinite(lengths).all() & (lengths > 0).all()):
            raise ReactClipError("class features hold NaN, infinity or an all-zero row; compute them again")
        self = cls.__new__(cls)
        self._set(encoder, names, functional.normalize(features))
        return self

    @classmethod
    def from_folder(cls, encoder: Encoder, folder: str | Path, *, progress: bool = False) -> ZeroShotClassifier:
        """One class per sub-folder, its feature the mean of its photos' unit features."""
        photos = check_class_folders(Path(folder))
        shape = len(photos), encoder.dim
        features = _cached(_folder_key(encoder, photos), shape, lambda: _folder_features(encoder, photos, progress))
        return cls.from_features(encoder, list(photos), features)

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return self.encoder.device

    def empty_prompt(self) -> Tensor:
        """Unit feature ``[dim]`` of the templates with an empty name; computed once.

        Where there is no text tower, the mean of the class features stands in for it. Where class features were given,
        the templates are :data:`DEFAULT_TEMPLATES`.
        """
        if self._empty_prompt is None:
            # The first call may be in inference mode, a later one may need gradients.
            with torch.inference_mode(False), torch.no_grad():
                if self.encoder.has_text:
                    features = self.encoder.encode_text([template.replace("{}", "") for template in self.templates])
                else:
                    features = self.class_features
                self._empty_prompt = functional.normalize(features.mean(0)).to(self.class_features)
        return self._empty_prompt

    def logits(self, features: Tensor) -> Tensor:
        """Logits of unit features."""
        return self.encoder.similarity.logits(features, self.class_features.to(features.dtype))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of float pixels ``[B, 3, S, S]`` in [0, 1]."""
        return self.logits(self.encoder(pixels))

    def extra_repr(self) -> str:
        """Number of classes and the first few names."""
        shown = ", ".join(self.names[:4]) + (", ..." if len(self.names) > 4 else "")
        return f"{len(self.names)} classes: {shown}"


def can_name(encoder: Encoder) -> bool:
    """True if there is a text tower, or the label table belongs to the encoder."""
    return encoder.has_text or encoder.feature_space == LabelTable.load().encoder


def check_names(names: Sequence[str], *, unique: bool = True) -> tuple[str, ...]:
    """Refuse an empty list, blank names and (unless a data set is known to have them) duplicates."""
    if isinstance(names, str):
        raise ReactClipError(f"the labels are one string, {names!r}; give a list such as ['cat', 'dog']")
    stripped = tuple(str(name).strip() for name in names)
    if not stripped:
        raise ReactClipError("the list of labels is empty; give at least one, such as ['cat', 'dog']")
    if "" in stripped:
        raise ReactClipError(f"label {stripped.index('') + 1} of {len(stripped)} is blank; remove it or name it")
    if unique and len(set(stripped)) < len(stripped):
        twice = next(name for name in stripped if stripped.count(name) > 1)
        raise ReactClipError(f"label {twice!r} is given {stripped.count(twice)} times; each label may appear once")
    return stripped


def fill_template(template: str, name: str) -> str:
    """The template with the name in place of ``{}``; other braces stay as they are.

    >>> fill_template("a {} of {x}", "cat")
    'a cat of {x}'
    """
    if template.count("{}") != 1:
        raise ReactClipError(f"template {template!r} needs exactly one {{}} where the label goes")
    return template.replace("{}", name)


def check_class_folders(folder: Path) -> dict[str, list[Path]]:
    """Photos by class of a ``folder/class/photo`` tree; refuses one without classes and a class without photos."""
    photos = class_folders(folder)
    if not photos:
        raise missing_or_wrong(folder, f"{folder} has no sub-folders; put the photos of each class into one of its own")
    if empty := [name for name, paths in photos.items() if not paths]:
        raise ReactClipError(f"{folder / empty[0]} holds no photos; add some, or remove it")
    return photos


def _table_features(encoder: Encoder, names: tuple[str, ...], templates: Sequence[str] | None) -> Tensor:
    table = LabelTable.load()
    if encoder.feature_space != table.encoder:
        raise ReactClipError(
            f"{encoder.name!r} has no text tower and the label table belongs to {table.encoder!r}; "
            "give photos of each class (--photos; ZeroShotClassifier.from_folder) or ready features (from_features)"
        )
    if templates is not None:
        warnings.warn(f"{encoder.name!r} has no text tower: the templates are ignored", stacklevel=3)
    return table.features(names)


def _prompt_features(encoder: Encoder, names: tuple[str, ...], templates: tuple[str, ...]) -> Tensor:
    prompts = [fill_template(template, name) for template in templates for name in names]

    def compute() -> Tensor:
        features = encoder.encode_text(prompts)
        return functional.normalize(features.reshape(len(templates), len(names), -1).mean(0)).cpu()

    if len(prompts) <= _FEW_PROMPTS:
        return compute()
    key = hashlib.sha256(json.dumps(["prompts", encoder.fingerprint(), names, templates]).encode()).hexdigest()
    return _cached(key, (len(names), encoder.dim), compute)


def _folder_key(encoder: Encoder, photos: dict[str, list[Path]]) -> str:
    """Photos are keyed by content: reading them is cheap beside encoding them."""
    digest = hashlib.sha256(f"folder{encoder.fingerprint()}".encode())
    for name, paths in photos.items():
        digest.update(f"{name}/{len(paths)}".encode())
        for path in paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@torch.no_grad()
def _folder_features(encoder: Encoder, photos: dict[str, list[Path]], progress: bool) -> Tensor:
    labelled = [(index, path) for index, paths in enumerate(photos.values()) for path in paths]
    sums = torch.zeros(len(photos), encoder.dim)
    with tqdm(total=len(labelled), desc="class features", unit="photo", disable=None if progress else True) as bar:
        for start in range(0, len(labelled), _PHOTOS):
            batch = labelled[start : start + _PHOTOS]
            features = encoder(as_pixels([path for _, path in batch], encoder.preprocessing)).float().cpu()
            sums.index_add_(0, torch.tensor([index for index, _ in batch]), features)
            bar.update(len(batch))
    return functional.normalize(sums)


def _cached(key: str, shape: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
    """Read class features from the cache; a missing, damaged or foreign file is computed again and replaced."""
    path = cache_dir() / "class-features" / f"{key}.safetensors"
    try:
        features = load_file(path)["features"]
        if tuple(features.shape) == shape and bool(torch.isfinite(features).all()):
            return features
    except (OSError, SafetensorError, KeyError):
        pass
    features = compute()
    # A cache that cannot be written (read-only home, full disk) costs time on the next start, not the answer now.
    with suppress(ReactClipError):
        write_tensors(path, {"features": features})
    return features
