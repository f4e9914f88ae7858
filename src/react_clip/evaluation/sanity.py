"""Checks that attacks which know the defence are strong enough for their robust accuracy to mean something.

A defence looks strong under a weak attack (Carlini et al., 2019, "On Evaluating Adversarial Robustness"). So accuracy
must fall with the budget and with the number of steps, go to about 0 where the budget allows any image, not be lower
without gradients than with them, and not be higher than what an attacker achieves who does not even know the defence.
Where an interval of 95 % cannot exclude that it does, the check passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from react_clip.attacks import PGD, Attack, GradientAttack, Queries, Suite
from react_clip.errors import ReactClipError
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import LabelledAttack, LabelledDefense, Recipe, format_eps
from react_clip.evaluation.result import AttackRow, Check, Row
from react_clip.evaluation.runner import Block
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import ShardStore, Tensors
from react_clip.evaluation.threats import ADAPTIVE

HUGE = 64 / 255
LIMIT = 0.1
"""Largest accuracy that may be left at the huge budget."""

Measure = Callable[[Tensor, Tensor], Tensor]
"""``(images, labels) -> [B]``: share of draws in which each image is answered wrongly."""

_IMAGES = 16
_FEW, _MANY = 5, 20


def wanted(recipe: Recipe) -> bool:
    """Whether a run has to pass these checks."""
    return recipe.self_check and recipe.threat == ADAPTIVE and bool(recipe.attacks)


def probes(recipe: Recipe, subject: EvaluationSet, blocks: Sequence[Block], store: ShardStore) -> list[Check]:
    """Checks by extra attacks on the first few images of a set that undefended CLIP gets right."""
    eps = min(item.eps for item in recipe.attacks)
    strongest = [item for item in recipe.attacks if item.eps == eps]
    found: list[Check] = []
    for chosen in recipe.defenses:
        own = [block for block in blocks if block.defense == chosen.label and block.attack in strongest]
        columns = own[0].columns
        rows = ((columns["clean_prediction"] == columns["label"]) & columns["attacked"]).nonzero().flatten()[:_IMAGES]
        if len(rows):
            few = _Few(recipe, subject, chosen, rows, eps, store)
            found += few.step_and_budget_checks(strongest)
            found.append(few.oblivious_check(own))
    return found


@dataclass(frozen=True, eq=False)
class _Few:
    """A few images against one defence."""

    recipe: Recipe
    subject: EvaluationSet
    chosen: LabelledDefense
    rows: Tensor
    eps: float
    store: ShardStore

    def step_and_budget_checks(self, items: Sequence[LabelledAttack]) -> Iterator[Check]:
        """More steps and a huge budget must make the first gradient attack stronger."""
        probe = next(filter(None, (_with_gradients(item.attack, self.chosen) for item in items)), None)
        if probe is None:
            return
        few, many, huge = (
            self._accuracy(replace(probe, eps=eps, steps=steps))
            for eps, steps in ((self.eps, _FEW), (self.eps, _MANY), (HUGE, _MANY))
        )
        title = f"{probe.kind} {format_eps(self.eps)}"
        expected = f"{_MANY} steps leave no more than {_FEW}"
        yield _compared("steps", self.chosen.label, title, expected, few, many, len(self.rows))
        expected = f"next to nothing is left at {format_eps(HUGE)}"
        title = f"{probe.kind} {format_eps(HUGE)}"
        yield Check("huge budget", self.chosen.label, title, expected, LIMIT, huge, 0.0, huge <= LIMIT)

    def oblivious_check(self, blocks: Sequence[Block]) -> Check:
        """PGD on undefended CLIP must not be stronger than the strongest of the recipe's attacks."""
        attack = PGD(eps=self.eps, steps=_MANY, step_size="eps/4")
        oblivious = 1.0 - self._stored(attack, lambda x, y: self._replay(attack, x, y))
        by_attack: dict[str, list[float]] = {}
        for block in blocks:
            right = (block.columns["prediction"] == block.columns["label"])[self.rows]
            by_attack.setdefault(block.attack.title, []).append(float(right.double().mean()))
        shares = {title: math.fsum(values) / len(values) for title, values in by_attack.items()}
        title = min(shares, key=shares.__getitem__)
        expected = f"it leaves no more than {attack.name} on undefended CLIP"
        return _compared("oblivious", self.chosen.label, title, expected, oblivious, shares[title], len(self.rows))

    def _accuracy(self, attack: GradientAttack) -> float:
        clf, defense, seed = self.subject.attack_clf, self.chosen.defense, self.recipe.seed
        return 1.0 - self._stored(attack, lambda x, y: attack(attack.target(clf, defense), x, y, seed=seed).broken)

    def _replay(self, attack: PGD, x: Tensor, y: Tensor) -> Tensor:
        images = attack(self.subject.attack_clf, x, y, seed=self.recipe.seed).images
        wrong = [self.chosen.defense(self.subject.clf, images, seed=seed).labels != y for seed in self.recipe.seeds]
        return torch.stack(wrong).float().mean(0)

    def _stored(self, attack: Attack, broken: Measure) -> float:
        """The share of wrong answers, measured once and stored."""
        path = (self.subject.name, "checks", self.chosen.label, f"{attack.name} {format_eps(attack.eps)}")
        about = {
            "work": "sanity check",
            "attack": repr(attack),
            "defense": self.chosen.defense.to_dict(),
            "seed": self.recipe.seed,
            "draws": self.recipe.draws,
            "rows": self.rows.tolist(),
            **self.subject.identity(),
        }
        shard = self.store.read(path, about)
        if shard is None:
            device = self.subject.clf.device
            pixels = torch.cat([self.subject.batch(row, row + 1) for row in self.rows.tolist()])
            shares = broken(pixels, self.subject.labels[self.rows].to(device))
            tensors: Tensors = {"broken": shares.float().cpu()}
            shard = self.store.write(path, about, tensors)
        return float(shard.tensors["broken"].double().mean())


def from_rows(rows: Sequence[Row], attacks: Sequence[AttackRow]) -> list[Check]:
    """Checks from the numbers of a run: accuracy falls with the budget, and queries do not beat gradients."""
    return [*_budget_checks(rows), *_query_checks(attacks)]


def insist(checks: Sequence[Check]) -> None:
    """Raise if a check failed."""
    for check in checks:
        if not check.passed:
            raise ReactClipError(
                f"sanity check {check.name!r} failed for {check.attack} on {check.defense!r}: {check.expected}, but "
                f"{100 * check.second:.1f} % are left against {100 * check.first:.1f} %; the attack is too weak or "
                "broken, so nothing is reported; give it more steps, draws (eot) or members, or set self_check: false "
                "(finished work is kept)"
            )


def _budget_checks(rows: Sequence[Row]) -> Iterator[Check]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.eps:
            groups.setdefault((row.dataset, row.attack, row.defense), []).append(row)
    for group in groups.values():
        ordered = sorted(group, key=lambda row: row.eps)
        for small, large in itertools.pairwise(ordered):
            title = f"{large.attack} {format_eps(large.eps)} on {large.dataset}"
            expected = f"it leaves no more than {format_eps(small.eps)}"
            yield _compared("budget", large.defense, title, expected, small.accuracy, large.accuracy, small.n)


def _query_checks(attacks: Sequence[AttackRow]) -> Iterator[Check]:
    groups: dict[tuple[str, float, str], list[AttackRow]] = {}
    for row in attacks:
        if row.attacked:
            groups.setdefault((row.dataset, row.eps, row.defense), []).append(row)
    for (dataset, eps, defense), group in groups.items():
        # A suite mixes gradients and queries, so its members are compared instead.
        singles = [row for row in group if row.part or not row.config.startswith(f"{Suite.__name__}(")]
        blind = [row for row in singles if (row.part or row.config).startswith((Queries.kind, f"{Queries.__name__}("))]
        seeing = [row for row in singles if row not in blind]
        # With members in turn, Square attacked only what gradients had left, so there is nothing to compare.
        seeing = [row for row in seeing if blind and row.attacked == blind[0].attacked]
        if blind and seeing:
            without, with_gradients = (1.0 - max(row.success_rate for row in side) for side in (blind, seeing))
            title = f"the best gradient attack {format_eps(eps)} on {dataset}"
            expected = "it leaves no more than Square, which needs no gradients"
            yield _compared("queries", defense, title, expected, without, with_gradients, blind[0].attacked)


def _compared(name: str, defense: str, attack: str, expected: str, first: float, second: float, n: int) -> Check:
    """Whether ``second`` is at most ``first``, as far as ``n`` images can tell.

    >>> [_compared("steps", "react", "both", "", 0.2, more, n=16).passed for more in (0.1, 0.4, 0.9)]
    [True, True, False]
    """
    one, two = metrics.wilson(_share(first), n), metrics.wilson(_share(second), n)
    slack = one.high - one.value + two.value - two.low
    return Check(name, defense, attack, expected, one.value, two.value, slack, two.low <= one.high)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _with_gradients(attack: Attack | None, chosen: LabelledDefense) -> GradientAttack | None:
    members = () if attack is None else attack.members_for(chosen.defense) or (attack,)
    return next((member for member in members if isinstance(member, GradientAttack)), None)
