"""Running an evaluation: one data set from Python, or a whole recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from react_clip import data as data_room
from react_clip.attacks import Attack
from react_clip.attacks.base import ADAPTIVE, TRANSFER
from react_clip.defenses import Defense
from react_clip.encoders.loading import DTYPES
from react_clip.environment import device_name, typed_command, versions
from react_clip.evaluation import checks, code, results, sets
from react_clip.evaluation.recipe import LabelledAttack, LabelledDefense, Recipe
from react_clip.evaluation.results import EvaluationResult, SetInfo
from react_clip.evaluation.runner import SetRunner
from react_clip.evaluation.sets import Data, EvaluationSet
from react_clip.evaluation.store import log, open_run
from react_clip.zeroshot import ZeroShotClassifier


def evaluate(
    clf: ZeroShotClassifier,
    defenses: Sequence[Defense | LabelledDefense | str] | Mapping[str, Defense],
    data: Data,
    *,
    run_dir: str | Path,
    attacks: Sequence[Attack | str] | Mapping[str, Attack] = (),
    attack_clf: ZeroShotClassifier | None = None,
    progress: bool = True,
    **settings: Any,
) -> EvaluationResult:
    """Measure the clean and robust accuracy of defences on one data set.

    All defences answer the same adversarial images, except under attacks that know the defence: these craft images for
    each. Photos and adversarial images have 8 bits a channel, as files hold them.

    Args:
        clf: CLIP with its classes.
        defenses: the defences, or their kinds; a mapping gives them labels.
        data: a set from :func:`react_clip.data.load`, or ``(pixels [N, 3, S, S], labels [N])``.
        run_dir: folder of the run. The same call on the same folder continues a run that was interrupted.
        attacks: attacks, or their kinds; crafted against undefended CLIP or, those that know the defence, against
            each defence. Clean images are always evaluated.
        attack_clf: what to craft attacks against, if not ``clf`` (the same classes in another precision, or on another
            encoder if the threat is ``transfer``).
        progress: show a progress bar.
        settings: further fields of :class:`Recipe`, such as ``seed``, ``seeds``, ``scoring``, ``threat``, ``images``,
            ``batch``, ``worst_of`` and ``self_check``.
    """
    subject = sets.from_data(clf, attack_clf or clf, data, progress)
    values = {
        "model": clf.encoder.name,
        "datasets": subject.name,
        "attacks": _labelled(attacks, LabelledAttack),
        "defenses": _labelled(defenses, LabelledDefense),
        "dtype": _dtype_name(clf),
        "attack_dtype": _dtype_name(attack_clf or clf),
        "preprocessing": "model",
    }
    if attack_clf is not None and settings.get("threat") == TRANSFER:
        values["transfer_model"] = attack_clf.encoder.name
    return _run(Recipe.from_dict({**values, **settings}), [subject], Path(run_dir), progress=progress)


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
    return _run(recipe, subjects, Path(folder), progress=progress)


def _run(recipe: Recipe, subjects: Iterable[EvaluationSet], folder: Path, *, progress: bool) -> EvaluationResult:
    infos, tables = list[SetInfo](), list[Any]()
    with open_run(folder, recipe) as store:
        for subject in subjects:
            device = device_name(subject.clf.device)
            log.info("%s: %d images, %d classes, on %s", subject.name, len(subject), len(subject.clf.names), device)
            if not infos:
                check = checks.self_check(recipe, subject, store)
            infos.append(subject.info)
            tables.append(SetRunner(recipe, subject, store).run(progress=progress))
            if len(infos) == 1:
                converged = checks.convergence(recipe, subject, tables[0], store)
                unrepeatable = checks.unrepeatable(recipe, subject)
        results.write_images(folder / results.IMAGES, tables)
        result = EvaluationResult(
            schema=2,
            title=recipe.title,
            paper=recipe.paper,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=typed_command(),
            commit=code.git_commit(),
            package=code.package_digest(),
            # On a CPU the last bits of a number may depend on how many threads computed it.
            versions={**versions(), "threads": str(torch.get_num_threads())},
            device=device,
            recipe=recipe.to_dict(),
            recipe_hash=recipe.fingerprint(),
            self_check=check,
            sets=tuple(infos),
            checks=tuple(converged),
            notes=(),
            images=results.load(folder),
        )
        checks.raise_if_failed(converged)
        result = dataclasses.replace(result, notes=(*_notes(recipe, result), *unrepeatable))
        result.save(folder)
        log.info("finished: %s", folder / results.RESULT)
        return result


def _notes(recipe: Recipe, result: EvaluationResult) -> list[str]:
    """Sentences that a reader of the numbers must know."""
    notes: list[str] = []
    if not recipe.self_check:
        notes.append("the self-check (PGD-10 at 1/255 must break undefended CLIP) was switched off")
        if recipe.threat == ADAPTIVE:
            notes.append("the convergence of attacks that know the defence was not checked")
    whole = [row for row in result.attacks if not row.part]
    if lost := sum(row.lost for row in whole):
        why = "under the noise that judges it" if recipe.threat == ADAPTIVE else "rounded to 8 bits, as files hold it"
        notes.append(f"{lost} of {sum(row.attacked for row in whole)} attacks had succeeded and fail {why}")
    return notes


def _dtype_name(clf: ZeroShotClassifier) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(clf.encoder.dtype, str(clf.encoder.dtype))


def _labelled(
    items: Sequence[Any] | Mapping[str, Any], kind: type[LabelledAttack] | type[LabelledDefense]
) -> list[Any]:
    return [kind(label, item) for label, item in items.items()] if isinstance(items, Mapping) else list(items)
