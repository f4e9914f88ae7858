"""Attacks for plain models used on a defended classifier, and suites: the worst case over several attacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from react_clip.attacks import targets
from react_clip.attacks.apgd import APGD
from react_clip.attacks.base import JUDGE_DRAWS, Attack, DefendedAttack
from react_clip.attacks.pgd import PGD
from react_clip.attacks.problem import Candidates, Problem, relay
from react_clip.attacks.square import Square
from react_clip.attacks.targets import Passes, Target
from react_clip.attacks.whitebox import BPDA, Both, Evade, Feature, Through
from react_clip.config import Count
from react_clip.defenses.base import DefendedModule, Defense, derived_seed
from react_clip.errors import ReactClipError
from react_clip.noise import Seed


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

    def search_cost(self, defense: Defense) -> Passes:
        """The answers on the clean images and to the queries."""
        return targets.total((defense.cost(), (self.queries + 1) * self.eot))

    def search(self, problem: Problem) -> Tensor:
        """Adversarial images ``[B, C, H, W]`` of Square."""
        noisy = targets.with_own_noise(problem.defended, self.kind)

        def answer(images: Tensor) -> Tensor:
            return targets.mean_answer(noisy, images, self.eot)

        target = Target(answer, answer, targets.total((noisy.defense.cost(), self.eot)))
        return Square(queries=self.queries).search(problem.on(target, noisy.seed))


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
    """Encode again in the backward pass instead of keeping activations."""
    views: Count | None = None
    """Most anchor views of the copy of the defence that gradients are taken of; all of them by default."""

    @property
    def total_steps(self) -> int:
        """Those of both members."""
        return 2 * self.steps

    def search_cost(self, defense: Defense) -> Passes:
        """For each member a gradient at the start and after every step, the clean answer, and the comparison."""
        gradient = targets.gradient_passes(targets.with_views(defense, self.views), self.checkpoint)
        return targets.total((gradient, 2 * self.eot * (self.steps + 1)), (defense.cost(), 4 * self.eot))

    def search(self, problem: Problem) -> Tensor:
        """The better image of the two members."""
        best, ce = Candidates.none(problem.x), APGD(loss="ce", steps=self.steps, eot=self.eot)
        for member in (ce, ce.replace(loss="dlr")):
            label = f"{self.kind} {member.name}"
            target, seed = self._target(problem.defended, label)
            images = member.search(problem.on(target, seed))
            problem.spend(target.answer_passes)
            judging = targets.with_own_noise(problem.defended, f"{label} chosen")
            best = best.or_better(Candidates(images, *targets.judge(judging, images, problem.y, self.eot)))
        return best.images

    def _target(self, defended: DefendedModule, label: str) -> tuple[Target, Seed]:
        """Single draws where a gradient is taken, which APGD averages; the mean of several where only an answer is."""
        copy = targets.with_views(defended.defense, self.views)
        answers = targets.with_own_noise(defended, f"{label} answers")
        model = targets.with_own_noise(defended, label, copy, differentiable=True, checkpoint=self.checkpoint)
        target = Target(
            lambda images: targets.mean_answer(answers, images, self.eot),
            model,
            targets.total((defended.defense.cost(), self.eot)),
            targets.gradient_passes(copy, self.checkpoint),
        )
        return target, model.seed


class Transfer(DefendedAttack):
    """PGD on undefended CLIP: what an attacker does who does not know the defence. A suite with it is never weaker.

    >>> from react_clip.defenses import ReACT
    >>> Transfer(steps=10).search_cost(ReACT())  # the cost of the defence does not matter
    (10, 10)
    """

    kind: ClassVar[str] = "adaptive-transfer"
    steps: Count = 20
    """Gradient steps."""

    def search_cost(self, defense: Defense) -> Passes:
        """One gradient of the plain classifier per step."""
        return self.steps, self.steps

    def search(self, problem: Problem) -> Tensor:
        """Adversarial images ``[B, C, H, W]`` of PGD."""
        defended = problem.defended
        plain = problem.on(Target(defended.clf, defended.clf), derived_seed(defended.seed, self.kind))
        return PGD(steps=self.steps, step_size="eps/4").search(plain)


class Suite(DefendedAttack):
    """The worst case over its members, with one budget for all; members that make no sense on a defence are left out.

    All members' images are judged on the same fresh draws; per image the one that is wrong in most of them is returned.
    With ``in_turn`` a member attacks only images that the members before it left right in some of these draws: the
    worst case is the same for a fraction of the work, but a member's own share then covers only those images.

    >>> Suite(members=(Both(steps=5), Evade(steps=5, lambdas=(1.0,)))).name
    'adaptive-suite-2'
    """

    kind: ClassVar[str] = "adaptive-suite"
    members: tuple[Attack, ...] = (
        Transfer(),
        Both(),
        Through(),
        Evade(),
        BPDA(),
        Feature(),
        Rand(steps=20, eot=4),
        Queries(queries=500, eot=4),
    )
    in_turn: bool = False
    """Attack with a member only the images that the members before it left right."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ReactClipError("a suite has no members; give at least one, such as adaptive-both")
        names = [member.name for member in self.members]
        for member in self.members:
            if not isinstance(member, DefendedAttack) or isinstance(member, Suite):
                raise ReactClipError(
                    f"suite member {member.name!r} is a suite or does not know the defence; choose others, such as "
                    "adaptive-both"
                )
            if names.count(member.name) > 1:
                raise ReactClipError(f"suite member {member.name!r} is listed twice; list each once")

    @property
    def name(self) -> str:
        """``adaptive-suite-8``: the number of members."""
        return f"{self.kind}-{len(self.members)}"

    @property
    def total_steps(self) -> int:
        """Those of all members."""
        return sum(member.total_steps for member in self.members)

    def members_for(self, defense: Defense) -> tuple[Attack, ...]:
        """The members that make sense on a defence, with the suite's budget."""
        return tuple(member.replace(eps=self.eps) for member in self.members if not member.obstacle(defense))

    def obstacle(self, defense: Defense) -> str:
        """Only if every member has one."""
        return "" if self.members_for(defense) else self.members[0].obstacle(defense)

    def search_cost(self, defense: Defense) -> Passes:
        """The members' costs less one judging, which :meth:`cost` adds."""
        costs = [(member.cost(defense), 1) for member in self.members_for(defense)]
        return targets.total(*costs, (defense.cost(), -JUDGE_DRAWS))

    def search(self, problem: Problem) -> Tensor:
        """The worst images over the members."""
        return self.run(problem)[0].images

    def run(self, problem: Problem) -> tuple[Candidates, dict[str, Tensor]]:
        """The worst images over the members, and each member's share of wrong answers."""
        members = self.members_for(problem.defended.defense)
        parts = {member.name: torch.full_like(problem.y, torch.nan, dtype=torch.float32) for member in members}

        def attempt(member: Attack, part: Problem, rows: Tensor) -> Candidates:
            judged, _ = member.run(part)
            parts[member.name][rows] = judged.wrong
            return judged

        attempts = [partial(attempt, member) for member in members]
        return relay(problem, Candidates.none(problem.x), attempts, spare_broken=self.in_turn), parts

    def to_dict(self) -> dict[str, Any]:
        """Plain values; members have no budget of their own."""
        values = super().to_dict()
        return {**values, "members": [{k: v for k, v in member.items() if k != "eps"} for member in values["members"]]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The suite from plain values; a member is a kind or a mapping."""
        entries = data.get("members", ())
        if isinstance(entries, list) and any(isinstance(entry, Mapping) and "eps" in entry for entry in entries):
            raise ReactClipError("a suite member has an eps of its own; give eps to the suite")
        return super().from_dict(data)
