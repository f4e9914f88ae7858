"""Attacks for plain models used on a defended classifier, and suites: the worst case over several attacks."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from react_clip.attacks.adaptive import Adaptive
from react_clip.attacks.apgd import APGD
from react_clip.attacks.base import Attack
from react_clip.attacks.defended import DefendedAttack, Draws, defended_answer
from react_clip.attacks.pgd import PGD
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.attacks.square import Square
from react_clip.config import Count
from react_clip.defenses.base import DefendedModule, derived_seed
from react_clip.defenses.batch import Gradients
from react_clip.errors import ReactClipError


class Queries(DefendedAttack):
    """Square on the defended classifier, without gradients; every query is the mean of ``eot`` fresh answers.

    >>> Queries(queries=500).name
    'adaptive-square-500'
    """

    kind: ClassVar[str] = "adaptive-square"
    queries: Count = 1000
    """Most queries per image."""
    eot: Count = 4
    """Answers averaged per query."""

    def search(self, problem: Problem) -> Tensor:
        """Adversarial images ``[n, C, H, W]`` of Square."""
        draws = Draws(problem.defended, self.kind)
        target = problem.on(lambda images: draws.mean(images, self.eot), draws.seed)
        return Square(queries=self.queries).search(target)


class Rand(DefendedAttack):
    """AutoAttack's ``rand`` on the defended classifier: APGD-CE and APGD-DLR, gradients averaged over ``eot`` draws.

    Both attack every image that the mean of ``eot`` answers gets right; the defaults are AutoAttack's.

    >>> Rand().name
    'adaptive-rand-100'
    """

    kind: ClassVar[str] = "adaptive-rand"
    steps: Count = 100
    """Gradient steps of each of the two attacks."""
    eot: Count = 20
    """Draws over which a gradient is averaged."""
    checkpoint: bool = True
    """Encode again in the backward pass instead of keeping activations; off is a third faster where memory allows."""
    views: Count | None = None
    """Most views of the copy of the defence that gradients are taken of; all of them by default."""

    def search(self, problem: Problem) -> Tensor:
        """The better image of the two members."""
        best, ce = Candidates.none(problem.x), APGD(loss="ce", steps=self.steps, eot=self.eot)
        for member in (ce, ce.replace(loss="dlr")):
            images = self._search(member, problem)
            chosen = Draws(problem.defended, f"{self.kind} {member.name} chosen")
            best = best.or_better(chosen.judge(problem, images, self.eot))
        return best.images

    def _search(self, member: APGD, problem: Problem) -> Tensor:
        """The images of one member: single draws where it takes a gradient, the mean of several where an answer."""
        label, how = f"{self.kind} {member.name}", Gradients(checkpoint=self.checkpoint)
        answers = Draws(problem.defended, f"{label} answers")
        draws = Draws(problem.defended, label, views=self.views, how=how)

        def target(images: Tensor) -> Tensor:
            return defended_answer(draws.forced(images))[0] if images.requires_grad else answers.mean(images, self.eot)

        return member.search(problem.on(target, draws.seed))


class Transfer(DefendedAttack):
    """PGD on undefended CLIP: what an attacker does who does not know the defence. A suite with it is never weaker.

    >>> Transfer(steps=10).name
    'adaptive-transfer-10'
    """

    kind: ClassVar[str] = "adaptive-transfer"
    steps: Count = 20
    """Gradient steps."""

    def search(self, problem: Problem) -> Tensor:
        """Adversarial images ``[n, C, H, W]`` of PGD."""
        plain = problem.on(problem.defended.clf, derived_seed(problem.defended.seed, self.kind))
        return PGD(steps=self.steps, step_size="eps/4").search(plain)


class Suite(DefendedAttack):
    """The worst case over its members, with one budget for all; members that make no sense on a defence are left out.

    All members' images are judged on the same fresh draws; per image the one that is wrong in most of them is returned.
    With ``in_turn`` a member attacks only images that the members before it left right in some of these draws: the
    worst case is the same for a fraction of the work, but a member's own fraction then covers only those images.

    >>> Suite(members=(Adaptive(steps=5), Transfer(steps=5))).name
    'adaptive-suite-2'
    """

    kind: ClassVar[str] = "adaptive-suite"
    members: Annotated[tuple[Attack, ...], Field(min_length=1)] = (
        Transfer(),
        Adaptive(objective="both"),
        Adaptive(objective="through"),
        Adaptive(objective="evade"),
        Adaptive(objective="bpda"),
        Adaptive(objective="feature"),
        Rand(steps=20, eot=4),
        Queries(queries=500, eot=4),
    )
    in_turn: bool = False
    """Attack with a member only the images that the members before it left right."""

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        for member in self.members:
            single = isinstance(member, DefendedAttack) and not isinstance(member, Suite)
            if not single or member.eps != Attack.eps or names.count(member.name) > 1:
                raise ReactClipError(
                    f"suite member {member.name!r} is a suite, does not know the defence, is listed twice or has an "
                    "eps of its own; list attacks such as adaptive-both once each, and give eps to the suite"
                )

    @property
    def name(self) -> str:
        """``adaptive-suite-8``: the number of members."""
        return f"{self.kind}-{len(self.members)}"

    def why_not(self, module: DefendedModule) -> str:
        """Only if every member has a reason."""
        reasons = [one.why_not(module) for one in self.members if isinstance(one, DefendedAttack)]
        return reasons[0] if all(reasons) else ""

    def search(self, problem: Problem) -> Tensor:
        """The worst images over the members."""
        return self.run(problem)[0].images

    def run(self, problem: Problem) -> tuple[Candidates, Tensor, dict[str, Tensor]]:
        """The worst images over the members, and each member's fraction of wrong answers."""
        known = [member for member in self.members if isinstance(member, DefendedAttack)]
        members = [member for member in known if not member.why_not(problem.defended)]
        parts = {member.name: torch.full_like(problem.y, torch.nan, dtype=torch.float32) for member in members}

        def attempt(member: DefendedAttack, part: Problem, rows: Tensor) -> Candidates:
            judged, _, _ = member.run(part)
            parts[member.name][rows] = judged.wrong
            return judged

        attempts = [partial(attempt, member) for member in members]
        worst = run_in_turn(problem, Candidates.none(problem.x), attempts, spare_broken=self.in_turn)
        return worst, worst.wrong > 0.5, parts
