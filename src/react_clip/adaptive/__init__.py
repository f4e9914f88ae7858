"""The attacker who knows the defence: config objects, called on (clf, defense, x, y)."""

from react_clip.adaptive.base import AdaptiveAttack, AdaptiveResult, from_dict, names
from react_clip.adaptive.gradient import GradientAttack
from react_clip.adaptive.objectives import BPDA, Both, Evade, Feature, Through
from react_clip.adaptive.suite import Suite
from react_clip.adaptive.wrapped import Queries, Rand, Transfer

__all__ = [
    "BPDA",
    "AdaptiveAttack",
    "AdaptiveResult",
    "Both",
    "Evade",
    "Feature",
    "GradientAttack",
    "Queries",
    "Rand",
    "Suite",
    "Through",
    "Transfer",
    "from_dict",
    "names",
]
