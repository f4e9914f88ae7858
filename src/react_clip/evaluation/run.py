"""Running an evaluation: one data set from Python, or a whole recipe."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from react_clip import data as data_room
from react_clip.attacks import Attack
from react_clip.attacks.base import ADAPTIVE, TRANSFER
from react_clip.defenses import Defense
from react_clip.encoders.loading import DTYPES
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.evaluation import checks, sets, summary
from react_clip.evaluation.recipe import THREATS, LabelledAttack, LabelledDefense, Recipe
from react_clip.evaluation.result import AttackRow, Check, EvaluationResult, SelfCheck, SetInfo
from react_clip.evaluation.runner import SetRunner
from react_clip.evaluation.sets import Data, EvaluationSet
from react_clip.evaluation.store import PER_IMAGE, RESULT, ROUNDING_NOTES, log, open_run
from react_clip.storage import read_json, write_text
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    import pandas as pd

_SELF_CHECK = "self_check.json"
"""Among the shards of a run: the self-check that it has passed."""


def evaluate(
    clf: ZeroShotClassifier,
    defenses: Sequence[Defense | LabelledDefense | str] | Mapping[str, Defense],
    data: Data,
    *,
    run_dir: str | Path,
    attacks: Sequence[Attack | str] | Mapping[str, Attack] = (),
    attack_clf: ZeroShotClassifier | None = None,
    title: str = "Evaluation",
    draws: int = 1,
    seed: int = 0,
    scoring: str = "leakage_free",
    threat: str = "oblivious",
    store: str = "float16",
    batch: int = 64,
    worst_of: Sequence[str] = (),
    self_check: bool = True,
    progress: bool = True,
) -> EvaluationResult:
    """Measure the clean and robust accuracy of defences on one data set.

    All defences answer the same adversarial images, except under attacks that know the defence: these craft images for
    each.

    Args:
        clf: CLIP with its classes.
        defenses: the defences, or their kinds; a mapping gives them labels.
        data: a set from :func:`react_clip.data.load`, or ``(pixels [N, 3, S, S], labels [N])``.
        run_dir: folder of the run. The same call on the same folder continues a run that was interrupted.
        attacks: attacks, or their kinds; crafted against undefended CLIP or, those that know the defence, against
            each defence. Clean images are always evaluated.
        attack_clf: what to craft attacks against, if not ``clf`` (the same classes in another precision, or on another
            encoder if the threat is ``transfer``).
        title: title of the result.
        draws: how often each defence answers with fresh noise, with seeds ``seed, seed + 1, ...``.
        seed: seed of the attacks and of the first draw.
        scoring: ``leakage_free`` attacks only what undefended CLIP gets right; ``attack_all`` attacks everything and
            counts the leakage.
        threat: what the attacker knows: ``oblivious``, ``transfer`` or ``adaptive``.
        store: adversarial images are stored as ``float16`` or ``uint8``, or not at all (``none``).
        batch: images per shard and per encoder call.
        worst_of: titles of attacks, such as ``pgd-10 4/255``, or ``all``; their worst case per image is a row too.
        self_check: refuse to report if PGD-10 at 1/255 does not break undefended CLIP.
        progress: show a progress bar.
    """
    subject = sets.from_data(clf, attack_clf or clf, data, progress)
    values = {
        "model": clf.encoder.name,
        "datasets": subject.name,
        "attacks": _labelled(attacks, LabelledAttack),
        "defenses": _labelled(defenses, LabelledDefense),
        "title": title,
        "dtype": _dtype_name(clf),
        "attack_dtype": _dtype_name(attack_clf or clf),
        "draws": draws,
        "seed": seed,
        "scoring": scoring,
        "threat": threat,
        "transfer_model": attack_clf.encoder.name if attack_clf is not None and threat == TRANSFER else None,
        "images": {"store": store},
        "batch": batch,
        "worst_of": worst_of,
        "preprocessing": "model",
        "self_check": self_check,
    }
    recipe = Recipe.from_dict(values)
    return _run(recipe, [subject], Path(run_dir), progress=progress, command="")


def run_recipe(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: Path | None = None,
    heads: Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """Run every set of a recipe; ``root`` holds the photos, ``heads`` ready class features ``<set>.npz``."""
    root = data_room.default_root() if root is None else root
    recipe = recipe.with_sets_under(root)
    subjects = sets.from_recipe(recipe, *sets.load_encoders(recipe, device), root, heads, progress)
    return _run(recipe, subjects, Path(folder), progress=progress, command=typed_command())


def typed_command() -> str:
    """The command line of this process."""
    return shlex.join(["react-clip", *sys.argv[1:]])


@dataclass(frozen=True, eq=False)
class SetOutcome:
    """All results of one set."""

    info: SetInfo
    device: str
    images: pd.DataFrame
    """Per-image results, see :meth:`SetRunner.run`."""
    checks: list[Check]
    """Sanity checks that took attacks of their own."""


def set_outcome(runner: SetRunner, *, progress: bool) -> SetOutcome:
    """Compute or read back the results of one set."""
    subject, device = runner.subject, device_name(runner.subject.clf.device)
    log.info("%s: %d images, %d classes, on %s", subject.name, len(subject), len(subject.clf.names), device)
    images = runner.run(progress=progress)
    extra = checks.sanity_by_attacks(runner.recipe, subject, images, runner.store)
    return SetOutcome(subject.info(), device, images, extra)


def _run(
    recipe: Recipe, subjects: Iterable[EvaluationSet], folder: Path, *, progress: bool, command: str
) -> EvaluationResult:
    with open_run(folder, recipe) as store:
        check, outcomes = checks.NO_SELF_CHECK, list[SetOutcome]()
        for subject in subjects:
            if not outcomes:
                check = _self_check(recipe, subject, store.folder / _SELF_CHECK, progress)
            outcomes.append(set_outcome(SetRunner(recipe, subject, store), progress=progress))
        return write_result(recipe, folder, check, outcomes, command)


def _self_check(recipe: Recipe, subject: EvaluationSet, path: Path, progress: bool) -> SelfCheck:
    """The self-check; one that an earlier start of this run has passed on the same photos and model is read back."""
    with suppress(ReactClipError, KeyError, TypeError):
        stored = read_json(path, "it is made again")
        if recipe.self_check and stored["identity"] == subject.identity():
            return SelfCheck(**stored["check"])
    check = checks.self_check(recipe, subject, progress=progress)
    if check.enabled:
        write_text(path, json.dumps({"identity": subject.identity(), "check": dataclasses.asdict(check)}))
    return check


def write_result(
    recipe: Recipe, folder: Path, check: SelfCheck, outcomes: Sequence[SetOutcome], command: str
) -> EvaluationResult:
    """Write the result of a run and its rows per image, from the outcomes of its sets in the recipe's order."""
    # One table per set: all sets together would be copied several times, and runs may have millions of rows.
    tables = [outcome.images for outcome in outcomes]
    summary.write_per_image(folder / PER_IMAGE, tables)
    rows, attacks = summary.summarise(recipe, tables)
    sanity = [check for outcome in outcomes for check in outcome.checks]
    sanity += checks.sanity_by_numbers(recipe, rows, attacks)
    checks.raise_if_failed(sanity)
    result = EvaluationResult(
        schema=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        # On a CPU the last bits of a number may depend on how many threads computed it.
        versions={**versions(), "threads": str(torch.get_num_threads())},
        device=outcomes[-1].device,
        self_check=check,
        sets=tuple(outcome.info for outcome in outcomes),
        attacks=tuple(attacks),
        rows=(*rows, *summary.mean_rows(rows)),
        notes=tuple(_notes(recipe, check, attacks)),
        checks=tuple(sanity),
        **_recipe_fields(recipe),
    )
    result.save(folder / RESULT)
    log.info("finished: %s", folder / RESULT)
    return result


def _recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """Fields of a result that repeat the recipe."""
    same = ("title", "paper", "dtype", "model", "threat", "scoring", "draws")
    return {
        **{name: getattr(recipe, name) for name in same},
        "attack_dtype": recipe.crafting_dtype,
        "threat_meaning": THREATS[recipe.threat],
        "attack_seed": recipe.seed,
        "defense_seeds": recipe.seeds,
        "recipe": recipe.to_dict(),
        "recipe_hash": recipe.fingerprint(),
    }


def _notes(recipe: Recipe, check: SelfCheck, attacks: Sequence[AttackRow]) -> list[str]:
    """Sentences that a reader of the numbers must know."""
    notes = [ROUNDING_NOTES[recipe.images.store]] if recipe.attacks else []
    if not check.enabled:
        notes.append("the self-check (PGD-10 at 1/255 must break undefended CLIP) was switched off")
        if recipe.threat == ADAPTIVE:
            notes.append("the sanity checks of attacks that know the defence were switched off")
    whole = [row for row in attacks if not row.part]
    if lost := sum(row.lost_to_rounding for row in whole):
        total = sum(row.attacked for row in whole)
        why = ", or not under the noise that judges it" if recipe.threat == ADAPTIVE else ""
        notes.append(f"{lost} of {total} attacks had succeeded and no longer do on the image as stored{why}")
    return notes


def _dtype_name(clf: ZeroShotClassifier) -> str:
    for name, dtype in DTYPES.items():
        if dtype == clf.encoder.dtype:
            return name
    raise ReactClipError(f"the encoder computes in {clf.encoder.dtype}; an evaluation runs in {', '.join(DTYPES)}")


def _labelled(
    items: Sequence[Any] | Mapping[str, Any], kind: type[LabelledAttack] | type[LabelledDefense]
) -> list[Any]:
    return [kind(label, item) for label, item in items.items()] if isinstance(items, Mapping) else list(items)
