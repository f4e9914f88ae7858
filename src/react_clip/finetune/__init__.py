"""Adversarially finetuned image towers: TeCoA, PMG-AFT, FARE and CLIP-FT; an interrupted run can be continued.

>>> from react_clip import finetune
>>> finetune.names()
['clip-ft', 'fare', 'pmg-aft', 'tecoa']
"""

from react_clip.finetune.methods import CLIPFT, FARE, PMGAFT, Method, TeCoA, get, names
from react_clip.finetune.optimiser import Optimiser
from react_clip.finetune.training import Finetuned, InnerAttack, Settings, finetune

__all__ = ["CLIPFT", "FARE", "PMGAFT", "Finetuned", "InnerAttack", "Method", "Optimiser", "Settings", "TeCoA"]
__all__ += ["finetune", "get", "names"]
