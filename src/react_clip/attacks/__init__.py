"""Attacks on any map from [0, 1] pixels to logits, and on classifiers behind a defence; called on (target, x, y)."""

from react_clip.attacks.adaptive import Adaptive as Adaptive
from react_clip.attacks.apgd import APGD as APGD
from react_clip.attacks.autoattack import AutoAttack as AutoAttack
from react_clip.attacks.balls import L2PGD as L2PGD
from react_clip.attacks.balls import Patch as Patch
from react_clip.attacks.base import Attack as Attack
from react_clip.attacks.base import AttackResult as AttackResult
from react_clip.attacks.base import from_dict as from_dict
from react_clip.attacks.base import names as names
from react_clip.attacks.corruption import Corruption as Corruption
from react_clip.attacks.defended import DefendedAttack as DefendedAttack
from react_clip.attacks.di_fgsm import DIFGSM as DIFGSM
from react_clip.attacks.fab import FAB as FAB
from react_clip.attacks.imported import Imported as Imported
from react_clip.attacks.inside import LabelFree as LabelFree
from react_clip.attacks.inside import Targeted as Targeted
from react_clip.attacks.joint import Joint as Joint
from react_clip.attacks.pgd import CW as CW
from react_clip.attacks.pgd import PGD as PGD
from react_clip.attacks.problem import Problem as Problem
from react_clip.attacks.square import Square as Square
from react_clip.attacks.suite import Queries as Queries
from react_clip.attacks.suite import Rand as Rand
from react_clip.attacks.suite import Suite as Suite
from react_clip.attacks.suite import Transfer as Transfer
from react_clip.attacks.universal import Universal as Universal
