"""Deprecated name: attacks that know the defence are part of :mod:`react_clip.attacks`."""

from react_clip.attacks import *  # noqa: F403
from react_clip.attacks import AttackResult as AdaptiveResult
from react_clip.attacks import DefendedAttack as AdaptiveAttack

__all__ = ["AdaptiveAttack", "AdaptiveResult"]
