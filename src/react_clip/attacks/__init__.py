"""Attacks on any map from [0, 1] pixels to logits, and on classifiers behind a defence; called on (target, x, y)."""

from react_clip.attacks.adaptive import Adaptive
from react_clip.attacks.apgd import APGD
from react_clip.attacks.autoattack import AutoAttack
from react_clip.attacks.base import Attack, AttackResult, from_dict, names
from react_clip.attacks.corruption import Corruption
from react_clip.attacks.defended import DefendedAttack
from react_clip.attacks.fab import FAB
from react_clip.attacks.pgd import CW, PGD
from react_clip.attacks.problem import Problem
from react_clip.attacks.square import Square
from react_clip.attacks.suite import Queries, Rand, Suite, Transfer

__all__ = [
    "APGD",
    "CW",
    "FAB",
    "PGD",
    "Adaptive",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "Corruption",
    "DefendedAttack",
    "Problem",
    "Queries",
    "Rand",
    "Square",
    "Suite",
    "Transfer",
    "from_dict",
    "names",
]
