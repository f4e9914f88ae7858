"""Photos whose answer a defence changes, side by side: shown by ``react-clip check`` and ``classify --shadow``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from react_clip.intervals import share_in_words
from react_clip.report.page import MOST_IMAGES, Photo, Section, Shown, picture


def changed_photo(name: str, pixels: Tensor, plain: str, defended: str, label: str = "") -> Photo:
    """The row of a photo ``[3, S, S]`` with both answers; without its label none of them counts as right."""
    answers = tuple(Shown(answer, answer == label if label else None) for answer in (plain, defended))
    return Photo(f"{name}: {label}" if label else name, (picture(pixels, name),), answers)


def changed_section(photos: Sequence[Photo], count: int) -> Section:
    """The part of a page with the photos, of ``count``, whose answers change."""
    text = [f"The answer changes for {share_in_words(len(photos), count)} photos, although nobody attacked them."]
    if len(photos) > MOST_IMAGES:
        text.append(f"The first {MOST_IMAGES} of them are shown.")
    return Section("Honest answers that change", text, columns=("plain CLIP", "defended"), photos=photos[:MOST_IMAGES])
