"""The typed result of a run: numbers with their intervals, and versions, seeds and hashes to repeat them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from react_clip import storage
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import MEAN

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that may be NaN, which JSON writes as null."""


@dataclass(frozen=True)
class Row:
    """One defence under one attack on one set, or on the mean over sets. Shares lie in [0, 1]; NaN is not measured."""

    dataset: str
    attack: str
    eps: Number
    defense: str
    threat: str
    scoring: str
    n: int
    attacked: int
    """Images that were attacked; the rest passed through the defence unperturbed."""
    accuracy: Number
    """Over the whole set, the mean over draws."""
    low: Number
    high: Number
    worst: Number
    """Only images that are right in every draw."""
    majority: Number
    """Only images that are right in more than half of the draws."""
    leakage: Number
    """Attacked images that undefended CLIP gets wrong clean and the defence gets right (mean over draws)."""
    leakage_share: Number
    """The same as a share of all images: the part of the accuracy that is due to leakage."""
    gate_rate: Number
    """Share of images whose gate opened, among those that undefended CLIP gets right clean."""
    passes: Number
    """Encoder passes per image."""
    backward_passes: Number


@dataclass(frozen=True)
class AttackRow:
    """Success and cost of an attack on one set, against undefended CLIP or the defence that it knows."""

    dataset: str
    attack: str
    eps: Number
    config: str
    attacked: int
    success_rate: Number
    """Share of attacked images that undefended CLIP (or the defence, over its draws) gets wrong, as stored."""
    lost_to_rounding: int
    """Attacks that had succeeded and no longer do on the stored image (or in the precision of the defended encoder)."""
    queries: Number
    """Forward passes the attack spent per attacked image."""
    defense: str = ""
    """The defence that the attack knows; its success is then that on the defended answers. Empty for other attacks."""
    part: str = ""
    """For one member of a suite: its name; ``success_rate`` is then as the suite saw it."""


@dataclass(frozen=True)
class SetInfo:
    """Description of one set."""

    name: str
    images: int
    classes: int
    fingerprint: str
    class_source: str
    model_fingerprint: str
    notes: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    """Class name of each label; empty in results of earlier versions."""


@dataclass(frozen=True)
class SelfCheck:
    """PGD-10 at 1/255 on undefended CLIP: if it does not hurt, the attack or the model is broken."""

    enabled: bool
    dataset: str
    images: int
    clean_accuracy: Number
    robust_accuracy: Number
    limit: Number
    """Largest share of the clean accuracy that may be left."""


@dataclass(frozen=True)
class Check:
    """A sanity check of one attack on one defence."""

    name: str
    defense: str
    attack: str
    expected: str
    """The expectation, in words."""
    first: Number
    second: Number
    """The two accuracies compared, or an accuracy and its limit."""
    slack: Number
    """Width of the 95 % intervals that the comparison allows."""
    passed: bool


@dataclass(frozen=True)
class EvaluationResult:
    """Everything a run reports; :meth:`save` writes it as ``result.json``."""

    schema: Literal[1]
    title: str
    paper: str
    created: str
    command: str
    versions: dict[str, str]
    device: str
    dtype: str
    attack_dtype: str
    model: str
    threat: str
    threat_meaning: str
    scoring: str
    draws: int
    attack_seed: int
    defense_seeds: tuple[int, ...]
    recipe: dict[str, Any]
    recipe_hash: str
    self_check: SelfCheck
    sets: tuple[SetInfo, ...]
    attacks: tuple[AttackRow, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    """Sanity checks of attacks that know the defence; empty where there were none."""

    def select(self, *, eps: float | None = None, **labels: str) -> list[Row]:
        """The rows with this budget and with these labels: ``dataset``, ``attack``, ``defense``."""
        rows = list(self.rows)
        for name, label in labels.items():
            rows = [row for row in rows if getattr(row, name) == label]
        return rows if eps is None else [row for row in rows if math.isclose(row.eps, eps, rel_tol=1e-6)]

    def __str__(self) -> str:
        lines = [f"{self.title} (threat: {self.threat}, scoring: {self.scoring})"]
        for row in self.select(dataset=MEAN):
            budget = f" {row.eps * 255:.4g}/255" if row.eps else ""
            interval = f"[{100 * row.low:.1f}, {100 * row.high:.1f}]"
            leaked = f", {row.leakage:g} leaked" if self.scoring == "attack_all" else ""
            lines.append(f"  {row.attack}{budget}, {row.defense}: {100 * row.accuracy:.1f} % {interval}{leaked}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Strict JSON; NaN becomes null."""
        return _schema().dump_json(self, indent=2).decode() + "\n"

    def save(self, path: str | Path) -> None:
        """Write the result, whole or not at all."""
        storage.write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Read a ``result.json`` of this schema."""
        data = storage.read_json(Path(path), "give the result.json of a run, or run the evaluation again")
        try:
            return _schema().validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else first["msg"]
            raise ReactClipError(
                f"{path} is no complete result of this version ({problem}); run the evaluation again, or use the "
                "version of react-clip that wrote it"
            ) from None


@cache
def _schema() -> TypeAdapter[EvaluationResult]:
    return TypeAdapter(EvaluationResult)


R = TypeVar("R", Row, AttackRow)


def grouped(rows: Iterable[R], *names: str) -> dict[tuple[Any, ...], list[R]]:
    """Rows by the values of some of their fields, in the order of their appearance."""
    groups: dict[tuple[Any, ...], list[R]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return groups


def merge(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """One result with every row of the given ones.

    Their photos and their protocol (sets, attacks, scoring, threat model, seeds) must be the same, and different
    defences must have different labels, also where their models differ. A defence that several results of one model
    have, such as undefended CLIP, is taken from the first.
    """
    if not results:
        raise ReactClipError("there is nothing to join; give at least one result")
    first = results[0]
    for other in results[1:]:
        for what in ("scoring", "threat", "draws", "attack_seed", "defense_seeds"):
            if getattr(other, what) != getattr(first, what):
                raise ReactClipError(
                    f"{first.title!r} and {other.title!r} cannot be joined: {what} is {getattr(first, what)!r} in one "
                    f"and {getattr(other, what)!r} in the other; report them apart"
                )
        if _photos(other) != _photos(first):
            raise ReactClipError(
                f"{first.title!r} and {other.title!r} cannot be joined: they were run on other photos or other "
                "attacks; report them apart"
            )
    results = list(_without_repeated(results))
    labels = [label for result in results for label in dict.fromkeys(row.defense for row in result.rows)]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ReactClipError(f"defence {twice[0]!r} is in several of the results; give one of them another label")
    defenses = [item for result in results for item in result.recipe.get("defenses", [])]
    models = list(dict.fromkeys(result.model for result in results))
    return dataclasses.replace(
        first,
        command="; ".join(result.command for result in results if result.command),
        model=", ".join(models),
        recipe={**first.recipe, "defenses": defenses},
        rows=tuple(row for result in results for row in result.rows),
        # Attacks that know the defence are different for each; the others are the same in all results.
        attacks=first.attacks
        if not any(row.defense for row in first.attacks)
        else tuple(row for result in results for row in result.attacks),
        checks=tuple(check for result in results for check in result.checks),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def _without_repeated(results: Sequence[EvaluationResult]) -> Iterator[EvaluationResult]:
    """The results without defences that an earlier result of the same model has, with the same label and constants."""
    earlier: dict[str, object] = {}
    for result in results:
        configs = {item["label"]: (result.model, item) for item in result.recipe.get("defenses", [])}
        repeated = {label for label, config in configs.items() if earlier.get(label) == config}
        earlier |= configs
        kept = [item for item in result.recipe.get("defenses", []) if item["label"] not in repeated]
        yield dataclasses.replace(
            result,
            recipe={**result.recipe, "defenses": kept},
            rows=tuple(row for row in result.rows if row.defense not in repeated),
            attacks=tuple(row for row in result.attacks if row.defense not in repeated),
            checks=tuple(check for check in result.checks if check.defense not in repeated),
        )


def _photos(result: EvaluationResult) -> tuple[object, ...]:
    """The sets with their photos, and the attacks with their budgets."""
    sets = tuple((info.name, info.images, info.fingerprint) for info in result.sets)
    return sets, tuple(dict.fromkeys((row.attack, round(row.eps, 9)) for row in result.rows))
