"""Attacks on any map from [0, 1] pixels to logits, and on classifiers behind a defence; called on (target, x, y)."""

from react_clip.attacks.apgd import APGD
from react_clip.attacks.autoattack import AutoAttack
from react_clip.attacks.base import Attack, AttackResult, DefendedAttack, from_dict, names
from react_clip.attacks.corruption import Corruption
from react_clip.attacks.fab import FAB
from react_clip.attacks.pgd import CW, PGD
from react_clip.attacks.square import Square
from react_clip.attacks.suite import Queries, Rand, Suite, Transfer
from react_clip.attacks.whitebox import BPDA, Both, Evade, Feature, GradientAttack, Through

__all__ = [
    "APGD",
    "BPDA",
    "CW",
    "FAB",
    "PGD",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "Both",
    "Corruption",
    "DefendedAttack",
    "Evade",
    "Feature",
    "GradientAttack",
    "Queries",
    "Rand",
    "Square",
    "Suite",
    "Through",
    "Transfer",
    "from_dict",
    "names",
]
