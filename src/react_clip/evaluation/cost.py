"""Upper bounds on what a run costs: encoder passes per image, and bytes on disk.

How many images are attacked is not known before the run, so all of them are counted.
"""

from __future__ import annotations

from react_clip.attacks.targets import Passes, total
from react_clip.evaluation.recipe import Recipe

PLAIN: Passes = (1, 0)
"""Passes of an undefended prediction."""
_BYTES = {"float16": 2, "uint8": 1, "none": 0}
_SHARD_OVERHEAD = 4096
_ROW_BYTES = 120
"""Bytes of one per-image result: about 40 in its shard, 40 in Parquet, and file-system blocks."""


def work(passes: Passes) -> int:
    """Total in forward passes; a backward pass takes about twice as long.

    >>> work((11, 10))
    31
    """
    return passes[0] + 2 * passes[1]


def defense_cost(recipe: Recipe, number: int) -> Passes:
    """Passes per image to attack and run one defence; attacks shared by all defences are counted with the first."""
    defense = recipe.defenses[number].defense
    costs = [(defense.cost(), recipe.draws * (1 + len(recipe.attacks)))]
    for item in recipe.attacks:
        if number == 0 or item.adaptive:
            # Beside the attack, a plain prediction on the stored image.
            costs += [(item.attack.cost(defense), 1), (PLAIN, 1)]
    return total(*costs)


def image_cost(recipe: Recipe) -> Passes:
    """Passes per image of the whole recipe."""
    return total((PLAIN, 1), *((defense_cost(recipe, number), 1) for number in range(len(recipe.defenses))))


def disk_bytes(recipe: Recipe, images: int, size: int) -> int:
    """Bytes that the shards and results of ``images`` images of ``size`` pixels a side take."""
    shards = -(-images // recipe.batch)
    crafted = sum(len(recipe.defenses) if item.adaptive else 1 for item in recipe.attacks)
    results = (1 + len(recipe.attacks)) * len(recipe.defenses) * recipe.draws
    stored = images * 3 * size * size * _BYTES[recipe.images.store] * crafted
    stored += results * (images * _ROW_BYTES + shards * _SHARD_OVERHEAD) + shards * _SHARD_OVERHEAD * (1 + crafted)
    if recipe.images.store != "none":
        # Clean photos are stored beside the attacked ones, as bytes.
        stored += images * 3 * size * size + shards * _SHARD_OVERHEAD
    return stored
