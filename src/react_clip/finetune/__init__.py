"""Adversarially finetuned image towers: TeCoA, PMG-AFT, FARE and CLIP-FT, trained so that a run can be resumed.

>>> from react_clip import finetune
>>> finetune.names()
['clip-ft', 'fare', 'pmg-aft', 'tecoa']
"""

from react_clip.finetune.inner import InnerAttack
from react_clip.finetune.methods import CLIPFT, FARE, PMGAFT, Method, TeCoA, get, names
from react_clip.finetune.run import Finetuned, finetune
from react_clip.finetune.settings import Settings

__all__ = [
    "CLIPFT",
    "FARE",
    "PMGAFT",
    "Finetuned",
    "InnerAttack",
    "Method",
    "Settings",
    "TeCoA",
    "finetune",
    "get",
    "names",
]
