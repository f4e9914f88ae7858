"""Reasons to doubt a number of a table, computed from a run: AutoAttack's five flags, and convergence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

RANDOM, SOFTMAX, ZERO, BLACK_BOX = "random", "softmax output", "zero gradient", "a black box beats it"
OPTIMISES, UNCONVERGED, SMALLER = "optimises at inference", "not converged", "a smaller budget beats it"
MOVED = 0.02
"""Largest accuracy that more steps or a smaller budget may take away from a converged attack."""
FLAT = 0.1
"""Largest fraction of attacked images whose first gradient may be zero."""
_KEY = ["attack", "eps", "defense"]
_BLACK_BOX = re.compile(r"(adaptive-)?square-\d+$")
_LENGTH = re.compile(r"-(\d+)(?=-|$)")

Cell = tuple[str, float, str]
"""Attack, budget and defence."""


def flags(images: pd.DataFrame) -> dict[Cell, tuple[str, ...]]:
    """The flags of each cell of a run, from its rows: one per photo, attack, budget, defence and draw.

    - ``random``: some answer differs between draws. Where more photos change between draws than are wrong in all of
      them, randomness decides the number: ``random, and that decides``;
    - ``softmax output``: the defence gives probabilities instead of logits, of which gradients vanish;
    - ``zero gradient``: of more than a tenth of the attacked photos the first gradient was zero;
    - ``a black box beats it``: Square leaves less at the same budget;
    - ``optimises at inference``: the defence takes gradients of its own, which no attack sees through;
    - ``not converged``: the same attack with more steps leaves 2 points less;
    - ``a smaller budget beats it``: the same attack leaves 2 points less at a smaller budget.

    Columns ``flat`` and ``softmax`` may be missing; their flags are then not raised.
    """
    attacked = images[images["attacked"] & (images["eps"] > 0)].astype({"attack": str, "defense": str})
    optional = {name: float("nan") for name in ("flat", "softmax") if name not in attacked}
    cells = attacked.assign(**optional).groupby(_KEY)
    left = images[images["eps"] > 0].astype({"attack": str, "defense": str}).groupby(_KEY)["robust"].mean().to_dict()
    found = {}
    for cell, rows in cells:
        attack, eps, defense = cell
        right = rows.groupby(["dataset", "index"], observed=True)["correct"].mean()
        changing, broken = int(((right > 0) & (right < 1)).sum()), int((right == 0).sum())
        others = {name: value for (name, budget, one), value in left.items() if (budget, one) == (eps, defense)}
        raised = {
            RANDOM if changing <= broken else f"{RANDOM}, and that decides": changing > 0,
            SOFTMAX: bool((rows["softmax"] == 1).any()),
            ZERO: float(rows["flat"].mean()) > FLAT,
            BLACK_BOX: any(_BLACK_BOX.match(name) and value < others[attack] for name, value in others.items()),
            OPTIMISES: bool((rows["backward_passes"] > 0).any()),
            UNCONVERGED: any(
                _longer(name, attack) and value < others[attack] - MOVED for name, value in others.items()
            ),
            SMALLER: any(
                (name, one) == (attack, defense) and budget < eps and value < others[attack] - MOVED
                for (name, budget, one), value in left.items()
            ),
        }
        found[cell] = tuple(flag for flag, on in raised.items() if on)
    return found


def _longer(name: str, attack: str) -> bool:
    """True for the same attack with more steps.

    >>> _longer("pgd-100-quarter", "pgd-40-quarter"), _longer("pgd-100", "cw-40"), _longer("fab", "fab")
    (True, False, False)
    """
    mine, other = _LENGTH.search(attack), _LENGTH.search(name)
    if mine is None or other is None or _LENGTH.sub("", attack, 1) != _LENGTH.sub("", name, 1):
        return False
    return int(other[1]) > int(mine[1])
