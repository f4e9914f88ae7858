"""Attacks on any map from [0, 1] pixels to logits: config objects, called on (model, x, y)."""

from react_clip.attacks.apgd import APGD
from react_clip.attacks.autoattack import AutoAttack
from react_clip.attacks.base import Attack, AttackResult, from_dict, names
from react_clip.attacks.fab import FAB
from react_clip.attacks.pgd import CW, PGD
from react_clip.attacks.square import Square

__all__ = ["APGD", "CW", "FAB", "PGD", "Attack", "AttackResult", "AutoAttack", "Square", "from_dict", "names"]
