"""Running an evaluation: one data set from Python, or a whole recipe."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from react_clip import data as data_room
from react_clip import encoders
from react_clip.attacks import Attack
from react_clip.defenses import Defense
from react_clip.encoders.base import DTYPES, Encoder
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.evaluation import sanity, selfcheck, sets, summary
from react_clip.evaluation.cost import Passes, defense_cost, set_cost
from react_clip.evaluation.progress import Progress
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, LabelledDefense, Recipe
from react_clip.evaluation.result import SCHEMA, AttackRow, Check, EvaluationResult, Row, SelfCheck, SetInfo
from react_clip.evaluation.runner import Block, SetRunner
from react_clip.evaluation.sets import Data, EvaluationSet
from react_clip.evaluation.store import PER_IMAGE, RESULT, ROUNDING_NOTES, ShardStore, log, open_run
from react_clip.evaluation.threats import ADAPTIVE, THREATS, TRANSFER
from react_clip.zeroshot import ZeroShotClassifier


def evaluate(
    clf: ZeroShotClassifier,
    defenses: Sequence[Defense | LabelledDefense] | Mapping[str, Defense],
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
    self_check: bool = True,
    progress: bool = True,
) -> EvaluationResult:
    """Clean and robust accuracy of defences.

    All meet the same adversarial images, unless the attacker knows the defence and makes images for each.

    Args:
        clf: CLIP with its classes.
        defenses: several share the images; a mapping gives them labels of their own.
        data: a set from :func:`react_clip.data.load`, or ``(pixels [N, 3, S, S], labels [N])``.
        run_dir: where the run lives. The same call on the same folder continues a run that was interrupted.
        attacks: crafted against undefended CLIP or, those that know the defence, against each defence. Clean
            images are always evaluated and need no mention.
        attack_clf: what to craft attacks against, if not ``clf`` (the same classes in another precision, or on another
            encoder where the threat is ``transfer``).
        draws: how often each defence answers with fresh noise, with seeds ``seed, seed + 1, ...``.
        scoring: ``leakage_free`` attacks only what undefended CLIP gets right; ``attack_all`` attacks everything and
            counts the leakage.
        threat: what the attacker knows: ``oblivious``, ``transfer`` or ``adaptive``.
        store: adversarial images are kept as ``float16`` or ``uint8``, or not at all (``none``).
        self_check: refuse to report if PGD-10 at 1/255 does not break undefended CLIP.
    """
    subject = sets.from_data(clf, attack_clf or clf, data, progress)
    recipe = Recipe(
        model=clf.encoder.name,
        datasets=(subject.name,),
        attacks=_labelled_attacks(attacks),
        defenses=_labelled_defenses(defenses),
        title=title,
        dtype=_dtype_name(clf),
        attack_dtype=_dtype_name(attack_clf or clf),
        draws=draws,
        seed=seed,
        scoring=scoring,
        threat=threat,
        transfer_model=attack_clf.encoder.name if attack_clf is not None and threat == TRANSFER else None,
        store=store,
        batch=batch,
        self_check=self_check,
    )
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
    subjects = sets.from_recipe(recipe, *load_encoders(recipe, device), root, heads, progress)
    return _run(recipe, subjects, Path(folder), progress=progress, command=typed_command())


def load_encoders(recipe: Recipe, device: str | None) -> tuple[Encoder, Encoder]:
    """The defended encoder and the one that attacks are crafted on; the same unless the recipe says otherwise."""
    encoder = encoders.load(recipe.model, device=device, dtype=recipe.dtype)
    if recipe.transfer_model is None and recipe.attack_dtype in (None, recipe.dtype):
        return encoder, encoder
    attacked, dtype = recipe.transfer_model or recipe.model, recipe.attack_dtype or recipe.dtype
    return encoder, encoders.load(attacked, device=device, dtype=dtype)


def typed_command() -> str:
    """The command line of this process."""
    return shlex.join(["react-clip", *sys.argv[1:]])


@dataclass(frozen=True, eq=False)
class SetOutcome:
    """All results of one set."""

    info: SetInfo
    device: str
    blocks: list[Block]
    check: SelfCheck
    """PGD-10 at 1/255 on a few images, where this is the first set and the recipe has no such attack itself."""
    probes: list[Check]
    """Sanity checks that take attacks of their own, on the first set where the attacker knows the defence."""


def set_outcome(
    recipe: Recipe, subject: EvaluationSet, store: ShardStore, check: SelfCheck, progress: bool
) -> SetOutcome:
    """Compute or read back the results of one set."""
    device = device_name(subject.clf.device)
    log.info("%s: %d images, %d classes, on %s", subject.name, len(subject), len(subject.clf.names), device)
    costs = set_costs(recipe, subject)
    with Progress(subject.name, planned_work(recipe, subject, costs, len(subject)), enabled=progress) as bar:
        blocks = SetRunner(recipe, subject, store, costs, bar).run()
    probing = sanity.wanted(recipe) and subject.name == recipe.datasets[0]
    probes = sanity.probes(recipe, subject, blocks, store) if probing else []
    return SetOutcome(_info(subject), device, blocks, check, probes)


def set_costs(recipe: Recipe, subject: EvaluationSet) -> list[Passes]:
    """Passes per image of the recipe's defences."""
    return [defense_cost(item.defense, subject.clf, subject.batch(0, 1)) for item in recipe.defenses]


def planned_work(recipe: Recipe, subject: EvaluationSet, costs: list[Passes], images: int) -> int:
    """Most passes that so many images of a set can take."""
    return set_cost(recipe, images, subject.clf.encoder.image_size, costs).passes.work


def _run(
    recipe: Recipe, subjects: Iterable[EvaluationSet], folder: Path, *, progress: bool, command: str
) -> EvaluationResult:
    def in_turn(store: ShardStore) -> Iterator[SetOutcome]:
        for subject in subjects:
            check = selfcheck.skipped()
            if recipe.self_check and recipe.own_self_check is None and subject.name == recipe.datasets[0]:
                check = selfcheck.on_few_images(recipe, subject)
                selfcheck.insist(check)
            yield set_outcome(recipe, subject, store, check, progress)

    return conclude(recipe, folder, in_turn, command)


def conclude(
    recipe: Recipe, folder: Path, outcomes: Callable[[ShardStore], Iterable[SetOutcome]], command: str
) -> EvaluationResult:
    """Lock a run's folder, collect the outcomes of its sets in the recipe's order, and write the result."""
    with open_run(folder, recipe) as store:
        infos: list[SetInfo] = []
        rows: list[Row] = []
        attacks: list[AttackRow] = []
        tables: list[Any] = []
        witnesses: list[Block] = []
        check = selfcheck.skipped()
        checks: list[Check] = []
        device = ""
        for outcome in outcomes(store):
            device, blocks = outcome.device, outcome.blocks
            check = outcome.check if not infos else check
            checks += outcome.probes
            witnesses += [block for block in blocks if block.attack == recipe.own_self_check][:1]
            tables.append(summary.per_image_table(recipe, blocks))
            rows += summary.set_rows(recipe, blocks)
            attacks += summary.attack_rows(blocks)
            infos.append(outcome.info)
        summary.write_per_image(folder / PER_IMAGE, tables)
        if recipe.self_check and recipe.own_self_check is not None:
            check = selfcheck.from_blocks(recipe, witnesses)
            selfcheck.insist(check)
        if sanity.wanted(recipe):
            checks += sanity.from_rows(rows, attacks)
            sanity.insist(checks)
        result = _result(recipe, command, device, check, checks, infos, attacks, rows)
        result.save(folder / RESULT)
        log.info("finished: %s", folder / RESULT)
        return result


def _info(subject: EvaluationSet) -> SetInfo:
    return SetInfo(
        name=subject.name,
        images=len(subject),
        classes=len(subject.clf.names),
        fingerprint=subject.fingerprint,
        class_source=subject.class_source,
        model_fingerprint=sets.model_fingerprint(subject.clf),
        notes=subject.notes,
        class_names=tuple(subject.clf.names),
    )


def _result(
    recipe: Recipe,
    command: str,
    device: str,
    check: SelfCheck,
    checks: list[Check],
    infos: list[SetInfo],
    attacks: list[AttackRow],
    rows: list[Row],
) -> EvaluationResult:
    notes = [ROUNDING_NOTES[recipe.store]] if recipe.attacks else []
    if not check.enabled:
        notes.append("the self-check (PGD-10 at 1/255 must break undefended CLIP) was switched off")
        if recipe.threat == ADAPTIVE:
            notes.append("the sanity checks of attacks that know the defence were switched off")
    whole = [row for row in attacks if not row.part]
    if lost := sum(row.lost_to_rounding for row in whole):
        total = sum(row.attacked for row in whole)
        why = ", or not under the noise that judges it" if recipe.threat == ADAPTIVE else ""
        notes.append(f"{lost} of {total} attacks had succeeded and no longer do on the image as stored{why}")
    return EvaluationResult(
        schema=SCHEMA,
        title=recipe.title,
        paper=recipe.paper,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        # On a CPU the last bits of a number may depend on how many threads computed it.
        versions={**versions(), "threads": str(torch.get_num_threads())},
        device=device,
        dtype=recipe.dtype,
        attack_dtype=recipe.attack_dtype or recipe.dtype,
        model=recipe.model,
        threat=recipe.threat,
        threat_meaning=THREATS[recipe.threat],
        scoring=recipe.scoring,
        draws=recipe.draws,
        attack_seed=recipe.seed,
        defense_seeds=recipe.seeds,
        recipe=recipe.to_dict(),
        recipe_hash=recipe.fingerprint(),
        self_check=check,
        sets=tuple(infos),
        attacks=tuple(attacks),
        rows=(*rows, *summary.mean_rows(rows)),
        notes=tuple(notes),
        checks=tuple(checks),
    )


def _dtype_name(clf: ZeroShotClassifier) -> str:
    for name, dtype in DTYPES.items():
        if dtype == clf.encoder.dtype:
            return name
    raise ReactClipError(f"the encoder computes in {clf.encoder.dtype}; an evaluation runs in {', '.join(DTYPES)}")


def _labelled_attacks(attacks: Sequence[Attack | str] | Mapping[str, Attack]) -> tuple[LabelledAttack, ...]:
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(None, attack) for attack in attacks]
    found = []
    for label, attack in pairs:
        if attack == CLEAN.label:
            continue
        if not isinstance(attack, Attack):
            raise ReactClipError(f"an attack is {attack!r}; give 'clean' or an object such as attacks.PGD(eps=4/255)")
        found.append(LabelledAttack(label or attack.name, attack))
    return tuple(found)


def _labelled_defenses(
    defenses: Sequence[Defense | LabelledDefense] | Mapping[str, Defense],
) -> tuple[LabelledDefense, ...]:
    pairs = defenses.items() if isinstance(defenses, Mapping) else [(None, defense) for defense in defenses]
    found = []
    for label, defense in pairs:
        if isinstance(defense, LabelledDefense):
            found.append(defense)
            continue
        if not isinstance(defense, Defense):
            raise ReactClipError(f"a defence is {defense!r}; give an object such as ReACT() or Undefended()")
        found.append(LabelledDefense(label or defense.name, defense))
    return tuple(found)
