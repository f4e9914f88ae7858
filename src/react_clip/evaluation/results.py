"""The folder of a finished run: ``images.parquet`` with one row per answer, and ``result.json``, which describes it.

The Parquet file is the truth: every number of a table is a group of its rows. Its columns are

- ``dataset, scoring, threat, attack, eps, defense, draw, seed, attack_seed, index``: which answer it is; ``photo``, the
  digest of the photo's pixels, is the same in every run;
- ``label, clean_prediction, plain_prediction, prediction``: classes; those of undefended CLIP on the clean image and on
  this one, and that of the defence;
- ``attacked, attack_success, crafted_success, queries``: whether and how the image was attacked; ``crafted`` is
  before its pixels were rounded to 8 bits;
- ``correct``: the defence is right; ``clean_correct``: so it is, in the same draw, on the clean image; ``robust``:
  both, because an attacker may leave an image as it is (on clean images and natural damage it is ``correct``);
- ``gated, passes, backward_passes`` and the diagnostics of the defences under their own names; NaN where not measured;
- ``part NAME``: for a member of a suite, the fraction of draws in which its image was wrong; NaN where not tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from react_clip import storage
from react_clip.config import read_length
from react_clip.errors import MissingFileError, ReactClipError
from react_clip.evaluation.numbers import KEY, AttackRow, Row, attack_rows, attacks_of, means_of, rows_of
from react_clip.evaluation.recipe import MEAN, THREATS, title_of
from react_clip.optional import require

if TYPE_CHECKING:
    import pandas as pd

RESULT, IMAGES = "result.json", "images.parquet"

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that may be NaN, which JSON writes as null."""


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
    """Class name of each label."""


@dataclass(frozen=True)
class SelfCheck:
    """PGD-10 at 1/255 on undefended CLIP: if it does not hurt, the attack or the model is broken."""

    enabled: bool
    dataset: str
    images: int
    clean_accuracy: Number
    robust_accuracy: Number
    limit: Number
    """Largest fraction of the clean accuracy that may be left."""


@dataclass(frozen=True)
class Check:
    """A check of one attack on one defence."""

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


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """A finished run: its description as in ``result.json``, its answers, and the rows of its tables."""

    schema: Literal[2]
    title: str
    paper: str
    created: str
    command: str
    """The command line; empty if the run was started from Python."""
    commit: str
    """The git commit of the package's sources; empty if they are in no repository."""
    package: str
    """SHA-256 of the package's sources."""
    versions: dict[str, str]
    device: str
    recipe: dict[str, Any]
    recipe_hash: str
    self_check: SelfCheck
    sets: tuple[SetInfo, ...]
    checks: tuple[Check, ...]
    """Convergence of attacks that know the defence; empty where there were none."""
    notes: tuple[str, ...]
    """Sentences that a reader of the numbers must know."""
    images: Annotated[Any, Field(exclude=True)] = None
    """The answers, a DataFrame with the columns listed above."""

    model = property(lambda self: str(self.recipe["model"]))
    threat = property(lambda self: str(self.recipe["threat"]))
    threat_meaning = property(lambda self: THREATS.get(self.threat, ""))
    scoring = property(lambda self: str(self.recipe["scoring"]))
    dtype = property(lambda self: str(self.recipe["dtype"]))
    attack_dtype = property(lambda self: str(self.recipe.get("attack_dtype") or self.dtype))
    draws = property(lambda self: len(self.seeds))

    @cached_property
    def defenses(self) -> dict[str, dict[str, Any]]:
        """The recipe's entry of each defence, by label."""
        entries = [dict(entry) for entry in self.recipe["defenses"]]
        return {str(entry.get("label", entry["kind"])): entry for entry in entries}

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the defences' random draws."""
        first = int(self.recipe["seed"])  # runs of earlier versions have a number of draws
        return tuple(self.recipe.get("seeds") or range(first, first + self.recipe["draws"]))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per set, attack, budget and defence."""
        return tuple(rows_of(self.images, self.recipe))

    @cached_property
    def means(self) -> tuple[Row, ...]:
        """The unweighted mean over sets of every attack and defence; counts are summed."""
        return tuple(means_of(self.rows))

    @cached_property
    def attacks(self) -> tuple[AttackRow, ...]:
        """One row per set and attack, for attacks that know the defence also per defence and member of a suite."""
        return tuple(attack_rows(self.images))

    def select(self, *, eps: float | None = None, dataset: str | None = None, **labels: str) -> list[Row]:
        """The rows with this budget, data set, ``attack`` or ``defense``; those of ``means`` for ``dataset="mean"``."""
        rows = [row for row in (self.means if dataset == MEAN else self.rows) if dataset in (None, row.dataset)]
        for name, label in labels.items():
            rows = [row for row in rows if getattr(row, name) == label]
        return rows if eps is None else [row for row in rows if math.isclose(row.eps, eps, rel_tol=1e-6)]

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what ``result.json`` holds, and the numbers: ``rows``, ``means`` and ``attacks``."""
        tables = TypeAdapter(dict[str, tuple[Any, ...]])
        numbers = {"rows": self.rows, "means": self.means, "attacks": self.attacks}
        return {**_schema().dump_python(self, mode="json"), **tables.dump_python(numbers, mode="json")}

    def save(self, folder: str | Path) -> None:
        """Write ``result.json``, whole or not at all."""
        storage.write_text(Path(folder) / RESULT, _schema().dump_json(self, indent=2).decode() + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> EvaluationResult:
        """Read the folder of a finished run."""
        path = Path(folder) / RESULT
        data = storage.read_json(path, "give the folder of a finished run, or run the evaluation again")
        try:
            result = _schema().validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else first["msg"]
            raise ReactClipError(
                f"{path} is no complete result of this version ({problem}); run the evaluation again, or use the "
                "version of react-clip that wrote it"
            ) from None
        return dataclasses.replace(result, images=load(folder))


@cache
def _schema() -> TypeAdapter[EvaluationResult]:
    return TypeAdapter(EvaluationResult)


# ---------------------------------------------------------------------- answers


def load(path: str | Path) -> pd.DataFrame:
    """The answers of a run, from its folder or its ``images.parquet``."""
    path = Path(path) / IMAGES if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist; give the folder of `react-clip evaluate`")
    try:
        frame = require("pyarrow.parquet", "reading results", extra="eval").read_table(path).to_pandas()
    except (OSError, ValueError) as error:
        raise ReactClipError(f"{path} is damaged ({error}); run the evaluation again to write it") from None
    if absent := [name for name in (*KEY, "draw", "index", "correct", "robust") if name not in frame]:
        raise ReactClipError(f"{path} has no column {absent[0]!r}; it was written by another version of react-clip")
    return frame


def write_images(path: Path, tables: Sequence[pd.DataFrame]) -> None:
    """Write the answers of all sets as one compressed Parquet file, whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    # Not joined in pandas, which would copy them several times: runs may have millions of rows.
    parts = [pa.Table.from_pandas(table, preserve_index=False) for table in tables]
    with storage.atomic_path(path) as temporary:
        merged = pa.concat_tables(parts, promote_options="default").unify_dictionaries()
        parquet.write_table(merged, temporary, compression="zstd")


# ---------------------------------------------------------------------- several runs as one


def join(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """One result with the answers of several.

    Their photos and their protocol (sets, attacks, scoring, threat model, seeds) must be the same, and different
    defences must have different labels, also where their models differ. A defence that several results of one model
    have, such as undefended CLIP, is taken from the first.
    """
    import pandas as pd

    if not results:
        raise ReactClipError("there is nothing to join; give at least one result")
    first, *others = results
    for other in others:
        for what, line in differences(first, other):
            if what in _SHARED:
                raise ReactClipError(f"{first.title!r} and {other.title!r} cannot be joined: {line}; report them apart")
    known: dict[str, Any] = {}
    tables, checks = [], []
    for result in results:
        new = {item["label"]: (result.model, item) for item in result.recipe["defenses"]}
        if clash := [label for label in new if known.get(label, new[label]) != new[label]]:
            raise ReactClipError(f"defence {clash[0]!r} is in several of the results; give one of them another label")
        labels = new.keys() - known.keys()
        known |= new
        tables.append(result.images[result.images["defense"].isin(labels)].astype(dict.fromkeys(_TEXTS, object)))
        checks += [check for check in result.checks if check.defense in labels]
    models = ", ".join(dict.fromkeys(result.model for result in results))
    return dataclasses.replace(
        first,
        command="; ".join(result.command for result in results if result.command),
        recipe={**first.recipe, "model": models, "defenses": [item for _, item in known.values()]},
        images=pd.concat(tables, ignore_index=True),
        checks=tuple(checks),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


_TEXTS = ("dataset", "attack", "defense", "threat", "scoring")
_SHARED = ("scoring", "threat", "seeds", "data set", "attack")
"""Differences that keep the numbers of two results out of one table."""


def differences(first: EvaluationResult, second: EvaluationResult) -> Iterator[tuple[str, str]]:
    """Pairs of a topic and a line about one difference between two results, such as ``("seeds", "seeds is ...")``.

    The topic is ``attack`` or ``defence`` where only one result has it, ``settings`` where both have it with other
    settings.
    """
    for what in ("scoring", "threat", "seeds", "model", "dtype", "attack_dtype", "package"):
        if getattr(first, what) != getattr(second, what):
            yield what, f"{what} is {getattr(first, what)} in the first and {getattr(second, what)} in the second"
    for what, one, other in zip(("data set", "attack", "defence"), _parts(first), _parts(second), strict=True):
        for mine, others, place in ((one, other, "first"), (other, one, "second")):
            if lost := [name for name in mine if name not in others]:
                yield what, f"only the {place} has the {what}{'s' * (len(lost) > 1)} {', '.join(lost)}"
        for name in [name for name in one if name in other]:
            mine, theirs = one[name], other[name]
            changed = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            values = (f"{key} is {mine.get(key)} in the first, {theirs.get(key)} in the second" for key in changed)
            if changed:
                yield what if what == "data set" else "settings", f"{what} {name}: {'; '.join(values)}"


def _parts(run: EvaluationResult) -> tuple[dict[str, dict[str, Any]], ...]:
    """Data sets, attacks and defences of a run by name, each with what decides about its numbers."""
    sets = {info.name: {"number of photos": info.images, "digest": info.fingerprint[:16]} for info in run.sets}
    entries = {title_of(entry["label"], read_length(entry.get("eps", 0.0))): entry for entry in run.recipe["attacks"]}
    attacks = {title_of(*at): entries.get(title_of(*at), {}) for at in attacks_of(run.images)}
    return sets, attacks, run.defenses
