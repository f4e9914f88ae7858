"""Defences: one file for each family, one base class for all (see :class:`Defense`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from react_clip.defenses.base import BaseDefense, Defended, Defense, Undefended, as_module
from react_clip.defenses.counterattack import DOC, HD, MAC, TTC, AntiAdv
from react_clip.defenses.prompt_tuning import RTPT, SSTPT
from react_clip.defenses.react import AOM, DefendCLIP, ReACT
from react_clip.defenses.second_look import SecondLook
from react_clip.defenses.tte import TTE
from react_clip.encoders.base import Encoder

__all__ = [
    "AOM",
    "DOC",
    "HD",
    "MAC",
    "RTPT",
    "SSTPT",
    "TTC",
    "TTE",
    "AntiAdv",
    "BaseDefense",
    "DefendCLIP",
    "Defended",
    "Defense",
    "ReACT",
    "SecondLook",
    "Undefended",
    "as_module",
    "default_for",
    "from_dict",
    "names",
]


def names() -> list[str]:
    """The kinds of defence, those of other installed packages included.

    >>> names()[:3]
    ['anti-adv', 'aom', 'defend-clip']
    """
    return Defense.registry.names()


def from_dict(data: Mapping[str, Any] | str) -> Defense:
    """A defence from its kind or from ``{"kind": kind, field: value, ...}``.

    >>> from_dict({"kind": "react", "tau": 0.4}).tau
    0.4
    """
    return Defense.registry.read(data)


def default_for(encoder: Encoder, *, features: bool = False) -> ReACT:
    """The defence of an encoder where a user gives none; raises for encoders without known constants.

    With ``features`` its anchors have all M views, for callers who store or compare features; without, it may stop
    drawing views once the label is settled.
    """
    return ReACT.constants_for(encoder) if features else ReACT.for_encoder(encoder)
