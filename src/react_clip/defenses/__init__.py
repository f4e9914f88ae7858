"""Defences: one file each, one small protocol for all (see :class:`Defense`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from react_clip.defenses.anti_adv import AntiAdv
from react_clip.defenses.base import Defended, Defense, as_module
from react_clip.defenses.config import BaseDefense
from react_clip.defenses.doc import DOC
from react_clip.defenses.fixed_anchor import AOM, DefendCLIP
from react_clip.defenses.hd import HD
from react_clip.defenses.mac import MAC
from react_clip.defenses.r_tpt import RTPT
from react_clip.defenses.react import ReACT
from react_clip.defenses.second_look import SecondLook
from react_clip.defenses.ss_tpt import SSTPT
from react_clip.defenses.ttc import TTC
from react_clip.defenses.tte import TTE
from react_clip.defenses.undefended import Undefended

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
    "from_dict",
    "names",
]


def names() -> list[str]:
    """The kinds of defence, those of other installed packages included.

    >>> names()[:3]
    ['anti-adv', 'aom', 'defend-clip']
    """
    return BaseDefense.registry.names()


def from_dict(data: Mapping[str, Any] | str) -> BaseDefense:
    """A defence from its kind or from ``{"kind": kind, field: value, ...}``.

    >>> from_dict({"kind": "react", "tau": 0.4}).tau
    0.4
    """
    return BaseDefense.registry.read(data)
