"""What a run costs: encoder passes per image for every attack and defence, and bytes on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from react_clip.adaptive import AdaptiveAttack
from react_clip.attacks import Attack
from react_clip.defenses import Defense
from react_clip.defenses.base import Priced
from react_clip.evaluation.recipe import LabelledAttack, Recipe
from react_clip.evaluation.threats import AnyAttack
from react_clip.zeroshot import ZeroShotClassifier

_BYTES = {"float16": 2, "uint8": 1, "none": 0}
_SHARD_OVERHEAD = 4096
_ROW_BYTES = 120
"""A per-image result: about 40 bytes in its shard, as much again in Parquet, and room for file-system blocks."""


@dataclass(frozen=True)
class Passes:
    """Encoder passes, forward and backward."""

    forward: int
    backward: int = 0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Passes:
        return Passes(self.forward * times, self.backward * times)

    @property
    def work(self) -> int:
        """In forward passes; a backward pass takes about twice as long."""
        return self.forward + 2 * self.backward


def attack_cost(attack: Attack) -> Passes:
    """Passes per image at most, counted by letting the attack loose on a tiny model that nothing can break.

    >>> from react_clip.attacks import PGD
    >>> attack_cost(PGD(steps=10))
    Passes(forward=11, backward=10)
    """
    # What cannot be broken costs the same at every budget: count each kind once.
    return _count_passes(replace(attack, eps=4 / 255))


@cache
def _count_passes(attack: Attack) -> Passes:
    count = {"forward": 0, "backward": 0}

    def unbreakable(images: Tensor) -> Tensor:
        count["forward"] += 1
        if images.requires_grad:
            images = images * 1.0
            images.register_hook(lambda _: count.update(backward=count["backward"] + 1))  # type: ignore[no-untyped-call]
        wrong = images.flatten(1).sum(1, keepdim=True) * 1e-6 * torch.arange(10.0)
        return torch.cat([wrong[:, :1] + 1.0, wrong[:, 1:]], dim=1)

    attack(unbreakable, torch.full((1, 3, 4, 4), 0.5), torch.tensor([0]), seed=0)
    return Passes(count["forward"], count["backward"])


def crafting_cost(attack: AnyAttack, defense: Defense, passes: Passes) -> Passes:
    """Passes per image at most; an attack that knows the defence runs it too, whose own ``passes`` these are."""
    if isinstance(attack, AdaptiveAttack):
        return Passes(*attack.cost(defense, (passes.forward, passes.backward)))
    return attack_cost(attack)


def defense_cost(defense: Defense, clf: ZeroShotClassifier, example: Tensor) -> Passes:
    """Passes per image: the most a defence says it can need, or what one that does not say needs on an example."""
    if isinstance(defense, Priced):
        return Passes(*defense.cost())
    defended = defense(clf, example, seed=0)
    return Passes(int(defended.passes.max()), int(defended.backward_passes.max()))


@dataclass(frozen=True)
class SetCost:
    """Upper bounds for one set: how many images an attack spares is not known before the run."""

    passes: Passes
    disk_bytes: int


def attacked_cost(recipe: Recipe, item: LabelledAttack, number: int, defenses: list[Passes]) -> Passes:
    """Passes per image to attack and answer one defence; what defences share is counted with the first."""
    answers = defenses[number] * recipe.draws
    if item.attack is None or (number and not item.adaptive):
        return answers
    # The attack, the plain answer on what was stored, and the defence.
    return crafting_cost(item.attack, recipe.defenses[number].defense, defenses[number]) + Passes(1) + answers


def set_cost(recipe: Recipe, images: int, size: int, defenses: list[Passes]) -> SetCost:
    """Cost of ``images`` images of ``size`` pixels; ``defenses`` are the passes of the recipe's defences."""
    total = Passes(1)
    crafted = 0
    for item in recipe.all_attacks:
        for number in range(len(defenses)):
            total += attacked_cost(recipe, item, number, defenses)
        if item.attack is not None:
            crafted += len(defenses) if item.adaptive else 1
    shards = -(-images // recipe.batch)
    results = len(recipe.all_attacks) * len(recipe.defenses) * recipe.draws
    disk = images * 3 * size * size * _BYTES[recipe.store] * crafted
    disk += results * (images * _ROW_BYTES + shards * _SHARD_OVERHEAD) + shards * _SHARD_OVERHEAD * (1 + crafted)
    if recipe.store != "none":
        # Clean photos are kept beside the attacked ones, as bytes.
        disk += images * 3 * size * size + shards * _SHARD_OVERHEAD
    return SetCost(total * images, disk)
