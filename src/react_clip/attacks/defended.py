"""A classifier behind a defence, as an attacker who knows it sees it.

The defence gives one of two answers, chosen by a gate:

.. math:: z_{def}(x) = z_{closed}(x) + 1[s(x) \\ge \\tau]\\,[z_{open}(x) - z_{closed}(x)]

The attacker forces the gate, so he knows both answers, the score and the threshold, all with gradients. A defence
without a gate has its answer as the open one, and that of plain CLIP as the closed one.
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch
from torch import Tensor

from react_clip.attacks.base import ADAPTIVE, Attack
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import Candidates, Model, Problem
from react_clip.defenses.base import DefendedModule, Defense, Forced, derived_seed, forced_answers
from react_clip.defenses.batch import PLAIN_GRADIENTS, Gradients
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.zeroshot import ZeroShotClassifier

JUDGE_DRAWS = 10
"""Draws of the noise that decide whether an attack on a defence succeeded; no attack optimises on them."""


class Draws(DefendedModule):
    """A defended classifier that draws new noise in every call; the sequence follows from the seed and the label.

    With ``views`` it is a cheaper copy for gradients: a defence that averages views averages at most so many. The mean
    of fewer has the same expectation, so its gradients point the same way with more noise. Results are judged on the
    defence itself.
    """

    def __init__(
        self, module: DefendedModule, label: str, *, views: int | None = None, how: Gradients = PLAIN_GRADIENTS
    ) -> None:
        defense, own = module.defense, getattr(module.defense, "views", None)
        if views is not None and isinstance(own, int):
            defense = defense.replace(views=min(views, own))
        super().__init__(module.clf, defense, seed=derived_seed(module.seed, label), fresh=True)
        self.how = how

    def forced(self, pixels: Tensor) -> Forced:
        """Both answers of one draw, with gradients where the pixels require them."""
        return forced_answers(self.defense, self.clf, pixels, self.next_seed(), self.how)

    def mean(self, images: Tensor, draws: int) -> Tensor:
        """Mean of the defended logits ``[n, K]`` over several draws."""
        return torch.stack([self(images) for _ in range(draws)]).mean(0)

    def judge(self, problem: Problem, images: Tensor, draws: int = JUDGE_DRAWS) -> Candidates:
        """The images with their fraction of wrong answers and mean margin over several draws."""
        wrong, loss = torch.zeros(2, len(images), device=images.device)
        with problem.counted():
            for _ in range(draws):
                logits = self(images)
                wrong = wrong + (logits.argmax(1) != problem.y)
                loss = loss + margin(logits, problem.y).float()
        return Candidates(images, wrong / draws, loss / draws)


def defended_answer(draw: Forced) -> tuple[Tensor, Tensor]:
    """The logits ``[n, K]`` and features ``[n, D]`` that the defence gives."""
    opened, closed, gated = draw.opened, draw.closed, draw.gate.open[:, None]
    return torch.where(gated, opened.logits, closed.logits), torch.where(gated, opened.features, closed.features)


class DefendedAttack(Attack, ABC):
    """An attack that knows the defence; its target is ``rc.as_module(clf, defense)``.

    Every step draws new noise, from seeds that no evaluation uses (:func:`~react_clip.defenses.base.derived_seed`).
    """

    threats: ClassVar[tuple[str, ...]] = (ADAPTIVE,)

    def target(self, clf: ZeroShotClassifier, defense: Defense) -> Model:
        """The defended classifier."""
        return DefendedModule(clf, defense)

    def why_not(self, module: DefendedModule) -> str:
        """The reason why the attack makes no sense on a defence; empty where it does."""
        return ""

    def run(self, problem: Problem) -> tuple[Candidates, Tensor, dict[str, Tensor]]:
        """Search, round to 8 bits, then judge by draws that no attack optimises on."""
        if reason := self.why_not(problem.defended):
            raise ReactClipError(f"{self.name} cannot be used here: {reason}; choose another attack")
        images = problem.ball.on_8_bits(self.found(problem))
        judged = Draws(problem.defended, "judge").judge(problem, images)
        return judged, judged.wrong > 0.5, {}

    def _prepared(self, target: Model, seed: Seed) -> tuple[Model, Seed]:
        if not isinstance(target, DefendedModule):
            raise ReactClipError(
                f"the target is a {type(target).__name__}, but an attack that knows the defence needs one; give "
                "rc.as_module(clf, defense)"
            )
        own = derived_seed(seed, "attack")
        return DefendedModule(target.clf, target.defense, seed=own), own
