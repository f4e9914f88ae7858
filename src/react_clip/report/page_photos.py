"""Photos of a run for its page: small, in the page itself, each with what the attack added to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import features
from PIL.Image import Resampling
from torch import Tensor

from react_clip.evaluation.images import to_float
from react_clip.evaluation.pictures import Pictures
from react_clip.preprocess import data_uri, to_image
from react_clip.report.page_data import Rows

SIDE = 160
"""Longest side in pixels."""


def embedded_photos(folders: Sequence[Path], rows: Rows, count: int) -> dict[str, Any]:
    """Pictures of at most ``count`` images by ``set:index``, the instructive ones first.

    Each is ``{"clean": uri, "attacked": {attack: [uri, perturbation's uri, its magnification]}}``; where the attack
    knew the defence the key is ``attack:defence``, for each defence met images of its own.
    """
    albums = [Pictures(folder) for folder in folders]
    found: dict[str, Any] = {}
    for number, index in rows.instructive() if count else []:
        dataset = rows.sets[number]
        album, clean = next(
            ((album, photo) for album in albums if (photo := album.clean(dataset, index)) is not None), (None, None)
        )
        if album is None or clean is None:
            continue
        attacked: dict[str, list[Any]] = {}
        for attack, (name, eps) in enumerate(rows.attacks):
            for key, defense in (f"{attack}", None), *((f"{attack}:{i}", d) for i, d in enumerate(rows.defenses)):
                photo = album.attacked(dataset, name, eps, index, defense) if eps else None
                if photo is not None and photo.shape == clean.shape:
                    attacked[key] = _attacked(to_float(photo), to_float(clean), eps)
        found[f"{number}:{index}"] = {"clean": _data_uri(to_float(clean)), "attacked": attacked}
        if len(found) == count:
            break
    return found


def _attacked(photo: Tensor, clean: Tensor, eps: float) -> list[Any]:
    # The budget fills the range from black to white; an attack without a fixed budget sets the range itself.
    reach = max(eps, float((photo - clean).abs().max())) or 1.0
    perturbation = ((photo - clean) / reach / 2 + 0.5).clamp(0, 1)
    # No averaging of pixels here: it would show the perturbation weaker than it is.
    return [_data_uri(photo), _data_uri(perturbation, Resampling.NEAREST), round(0.5 / reach, 1)]


def _data_uri(pixels: Tensor, resampling: Resampling = Resampling.LANCZOS) -> str:
    picture = to_image(pixels)
    if max(picture.size) > SIDE:
        scale = SIDE / max(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), resampling)
    return data_uri(picture, "webp" if features.check("webp") else "jpeg")
