"""What a run costs: encoder passes per image for every attack and defence, and bytes on disk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from react_clip.attacks import Attack
from react_clip.defenses import Defense
from react_clip.evaluation.recipe import LabelledAttack, Recipe
from react_clip.zeroshot import ZeroShotClassifier

_BYTES = {"float16": 2, "uint8": 1, "none": 0}
_SHARD_OVERHEAD = 4096
_ROW_BYTES = 120
"""Bytes of one per-image result: about 40 in its shard, 40 in Parquet, and file-system blocks."""


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
        """Total in forward passes; a backward pass takes about twice as long."""
        return self.forward + 2 * self.backward


def crafting_cost(attack: Attack, defense: Defense, passes: Passes) -> Passes:
    """Most passes per image of an attack; ``passes`` are those of the defence, which adaptive attacks run too."""
    return Passes(*attack.cost(defense))


def defense_cost(defense: Defense, clf: ZeroShotClassifier, example: Tensor) -> Passes:
    """Most passes per image of a defence: its own ``cost()``, or measured on an example if it has none."""
    return Passes(*defense.cost())


@dataclass(frozen=True)
class SetCost:
    """Upper bounds for one set; how many images are attacked is not known before the run."""

    passes: Passes
    disk_bytes: int


def attacked_cost(recipe: Recipe, item: LabelledAttack, number: int, defenses: list[Passes]) -> Passes:
    """Passes per image to attack and run one defence; attacks shared by all defences are counted with the first."""
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
