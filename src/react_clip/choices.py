"""Names and values that ``--help`` lists. Nothing heavy is imported here, so that help and bad options take no time."""

from __future__ import annotations

import tomllib
from importlib.resources import files

PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Endings of the files that are taken for photos in a folder."""

# ---------------------------------------------------------------------- kinds; a test compares them with the registries

ATTACKS = (
    *("apgd", "autoattack", "corruption", "di-fgsm", "fab", "imported", "l2-pgd", "label-free", "patch", "pgd"),
    *("square", "targeted", "universal"),
)
"""Attacks that do not know a defence."""
DEFENSES = (
    *("agc", "anti-adv", "aom", "clipure", "csr", "dbd", "defend-clip", "doc", "et3", "hd", "mac", "r-tpt"),
    *("react", "second_look", "ss-tpt", "ttc", "tte", "undefended"),
)
FINETUNING = ("clip-ft", "fare", "pmg-aft", "tecoa")
"""Finetuning methods."""

MAPPINGS = ("linear", "logistic", "power_law")
"""Curves that ReACT's calibration fits."""


def dataset_names() -> tuple[str, ...]:
    """Names of the data sets in ``data/sets.toml``; ``react_clip.data`` describes them.

    >>> len(dataset_names()), dataset_names()[0]
    (17, 'cifar10')
    """
    return tuple(tomllib.loads(files("react_clip").joinpath("data", "sets.toml").read_text(encoding="utf-8")))
