"""AutoAttack (Croce and Hein, 2020): several attacks in turn, each on the images that those before did not break."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from react_clip.attacks.apgd import APGD
from react_clip.attacks.base import Attack
from react_clip.attacks.fab import FAB
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.attacks.square import Square

_VERSIONS: dict[str, tuple[Attack, ...]] = {
    "ttc": (APGD(loss="ce"), APGD(loss="dlr")),
    "standard": (APGD(loss="ce"), APGD(loss="dlr-targeted"), FAB(), Square()),
}


class AutoAttack(Attack):
    """The worst case over an ensemble, 100 iterations and 1 restart each.

    ============ ============================================================ ===================================
    version      members                                                      for
    ============ ============================================================ ===================================
    ``ttc``      APGD-CE, APGD-DLR                                            comparing with the TTC line of work
    ``standard`` APGD-CE, APGD-T (9 targets), FAB-T (9 targets), Square       deterministic models
    ============ ============================================================ ===================================

    AutoAttack's ``rand``, for randomised models, is :class:`~react_clip.attacks.Rand` on a defended classifier.

    A member runs only on images that the model still classifies correctly after the members before it; the others keep
    the adversarial image that broke them. The reported loss is the margin; ``parts`` says which images each member met
    and broke.

    >>> import torch
    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.stack([torch.full((3, 2, 2), grey) for grey in (0.51, 0.6)]), torch.tensor([0, 0])
    >>> result = AutoAttack(eps=4/255, version="ttc")(model, x, y)
    >>> result.success
    tensor([ True, False])
    >>> result.queries  # clean pass and two to judge: 3; each member: clean pass, start, 100 steps, its outcome: 103
    tensor([106., 209.])
    """

    kind: ClassVar[str] = "autoattack"
    version: Literal["ttc", "standard"] = "standard"
    """The ensemble: ``standard``, or ``ttc`` as in the paper's line of work."""

    @property
    def name(self) -> str:
        """``autoattack-ttc`` or ``autoattack-standard``."""
        return f"autoattack-{self.version}"

    @property
    def members(self) -> tuple[Attack, ...]:
        """The attacks, in the order in which they run; the budget is that of the call, not theirs."""
        return _VERSIONS[self.version]

    def search(self, problem: Problem) -> Tensor:
        """The images of the first successful member, or those of largest margin."""

        def attempt(number: int, part: Problem, rows: Tensor) -> Candidates:
            member = self.members[number]
            found = part.candidates(member.search(part))
            name = f"{number + 1} of {len(self.members)}: {member.name}"
            problem.parts[name] = torch.full_like(problem.y, torch.nan, dtype=torch.float32)
            problem.parts[name][rows] = found.wrong
            return found

        attempts = [partial(attempt, number) for number in range(len(self.members))]
        return run_in_turn(problem, problem.candidates(problem.x), attempts).images
