"""The strongest attack on a defended classifier that we have: one objective for all its paths, from many starts."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from react_clip.attacks.adaptive import Adaptive, Aim
from react_clip.attacks.apgd import APGD
from react_clip.attacks.base import Attack, check_inner
from react_clip.attacks.defended import Draws
from react_clip.attacks.di_fgsm import DIFGSM
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.config import Count
from react_clip.defenses.base import DefendedModule, Defense, derived_seed


class Joint(Adaptive):
    """``Adaptive(objective="joint")`` from a random start, from oblivious images, and from attacks on other defences.

    A start is a candidate itself, so the worst case is never milder than that of the best oblivious attack, nor than
    that of images made for a rival. The starts take turns on images that some draw still gets right. A defence that
    answers two draws alike is differentiated once per step.

    >>> Joint(steps=50).name
    'adaptive-joint-50'
    """

    kind: ClassVar[str] = "adaptive-joint"
    objective: Literal["joint"] = "joint"
    """All paths at once."""
    eot: Count = 8
    """Draws of the noise per gradient."""
    oblivious: tuple[Attack, ...] = (APGD(), DIFGSM(steps=20))
    """Attacks on plain CLIP; the images of each are a start."""
    rivals: tuple[Defense, ...] = ()
    """Other defences; the images of the same attack on each are a start."""

    def __post_init__(self) -> None:
        for attack in self.oblivious:
            check_inner(self, attack)

    @property
    def name(self) -> str:
        """``adaptive-joint-100``."""
        return f"{self.kind}-{self.steps}"

    @property
    def members(self) -> tuple[Attack | Defense, ...]:
        """The attacks and defences that the starts come from."""
        return (*self.oblivious, *self.rivals)

    def search(self, problem: Problem) -> Tensor:
        """The best images over all starts."""
        module = problem.defended
        with problem.counted(), torch.no_grad():
            features, draws = module.clf.encoder(problem.x), Draws(module, f"{self.kind} probe")
            drawn = not torch.equal(draws(problem.x), draws(problem.x))
        climb = (self if drawn else self.replace(eot=1))._climb

        def attempt(source: Attack | Defense | None, part: Problem, rows: Tensor) -> Candidates:
            """The better of the start and of what climbing from it finds."""
            label, start = f"{self.kind} {source!r}", None if source is None else self._start(source, part)
            judge = Draws(module, f"{label} compared").judge
            best = Candidates.none(part.x) if start is None else judge(part, start)
            return best.or_better(judge(part, climb(part, label, Aim(part.y, features[rows]), start=start)))

        attempts = [partial(attempt, source) for source in (*self.members, None)]
        return run_in_turn(problem, Candidates.none(problem.x), attempts).images

    def _start(self, source: Attack | Defense, problem: Problem) -> Tensor:
        """The images of an attack on plain CLIP, or of this one on another defence."""
        module = problem.defended
        seed = derived_seed(module.seed, repr(source))
        if isinstance(source, Attack):
            return source.search(problem.on(module.clf, seed))
        same = {name: getattr(self, name) for name in ("objective", "steps", "eot", "checkpoint", "views")}
        return Adaptive(**same).search(problem.on(DefendedModule(module.clf, source, seed=seed), seed))
