"""Defences: one file each, one small protocol for all (see :class:`Defense`)."""

from __future__ import annotations

from typing import Any

from react_clip.defenses.anti_adv import AntiAdv
from react_clip.defenses.base import Defended, Defense, as_module
from react_clip.defenses.config import Configuration
from react_clip.defenses.doc import DOC
from react_clip.defenses.fixed_anchor import AOM, DefendCLIP
from react_clip.defenses.hd import HD
from react_clip.defenses.mac import MAC
from react_clip.defenses.r_tpt import RTPT
from react_clip.defenses.react import ReACT
from react_clip.defenses.ss_tpt import SSTPT
from react_clip.defenses.ttc import TTC
from react_clip.defenses.tte import TTE
from react_clip.defenses.undefended import Undefended
from react_clip.errors import ReactClipError

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
    "DefendCLIP",
    "Defended",
    "Defense",
    "ReACT",
    "Undefended",
    "as_module",
    "from_dict",
    "names",
]

_DEFENSES: dict[str, type[Configuration]] = {
    cls.name: cls for cls in (Undefended, ReACT, AOM, DefendCLIP, TTC, DOC, MAC, AntiAdv, HD, TTE, RTPT, SSTPT)
}


def names() -> list[str]:
    """Every defence by the name that recipes and tables use.

    >>> names()[:3]
    ['undefended', 'react', 'aom']
    """
    return list(_DEFENSES)


def from_dict(data: dict[str, Any] | str) -> Defense:
    """A defence from its name or from ``{"defense": name, field: value, ...}``.

    >>> from_dict({"defense": "react", "tau": 0.4}).tau
    0.4
    """
    values = {"defense": data} if isinstance(data, str) else dict(data)
    kind = values.get("defense")
    if kind not in _DEFENSES:
        raise ReactClipError(f"defence {kind!r} is unknown; choose one of {', '.join(names())}")
    defense = _DEFENSES[kind].from_dict(values)
    assert isinstance(defense, Defense)
    return defense
