"""Defences: one file for each family, one base class for all (see :class:`Defense`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from react_clip.defenses.agc import AGC as AGC
from react_clip.defenses.anti_adv import AntiAdv as AntiAdv
from react_clip.defenses.aom import AOM as AOM
from react_clip.defenses.aom import DefendCLIP as DefendCLIP
from react_clip.defenses.base import Defense as Defense
from react_clip.defenses.base import Undefended as Undefended
from react_clip.defenses.base import as_module as as_module
from react_clip.defenses.clipure import CLIPure as CLIPure
from react_clip.defenses.csr import CSR as CSR
from react_clip.defenses.dbd import DBD as DBD
from react_clip.defenses.doc import DOC as DOC
from react_clip.defenses.et3 import ET3 as ET3
from react_clip.defenses.hd import HD as HD
from react_clip.defenses.mac import MAC as MAC
from react_clip.defenses.prompt_tuning import RTPT as RTPT
from react_clip.defenses.prompt_tuning import SSTPT as SSTPT
from react_clip.defenses.react import ReACT as ReACT
from react_clip.defenses.result import Defended as Defended
from react_clip.defenses.second_look import SecondLook as SecondLook
from react_clip.defenses.ttc import TTC as TTC
from react_clip.defenses.tte import TTE as TTE
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError


def names() -> list[str]:
    """The kinds of defence, those of other installed packages included.

    >>> names()[:3]
    ['agc', 'anti-adv', 'aom']
    """
    return Defense.registry.names()


def from_dict(data: Mapping[str, Any] | str) -> Defense:
    """A defence from its kind or from ``{"kind": kind, field: value, ...}``.

    >>> from_dict({"kind": "react", "tau": 0.4}).tau
    0.4
    """
    return Defense.registry.read(data)


def default_for(encoder: Encoder) -> ReACT | SecondLook:
    """The defence of an encoder where a user gives none: SecondLook if we ship a threshold, otherwise ReACT.

    Raises for encoders that neither has constants for.
    """
    with suppress(ReactClipError):
        guard = SecondLook.for_encoder(encoder)
        # The threshold was measured with smaller copies, which not every exported encoder takes.
        if guard.size(encoder) is not None:
            return guard
    return ReACT.for_encoder(encoder)
