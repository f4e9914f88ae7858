"""The check of a calibrated SecondLook on its user's own image tower and photos: what it changes, and what it saves.

The attacks know CLIP but not the defence. What counts as right is the label of a photo, without labels plain CLIP's
answer for the clean photo; without classes, that the photo itself is the nearest of all. Under attack a photo must be
right clean and attacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip import bench
from react_clip.attacks import DIFGSM, PGD
from react_clip.calibration import Calibration
from react_clip.defenses import Defense, SecondLook, Undefended
from react_clip.defenses.view import View
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.evaluation import EvaluationResult, evaluate
from react_clip.evaluation.recipe import CLEAN
from react_clip.intervals import share_in_words, wilson
from react_clip.report.changed import changed_photo, changed_section
from react_clip.report.page import PAGE, Photo, Section, write_page
from react_clip.report.tables import Cell, Table
from react_clip.zeroshot import ZeroShotClassifier

ATTACKS = {
    "pgd": PGD(eps=4 / 255),
    "input-diverse": DIFGSM(eps=4 / 255),
    "pgd-stop": PGD(eps=4 / 255, stop="success"),
}
HARMLESS = 0.03
"""Largest share of honest answers that may change."""
HELPS = 0.1
"""Least share of the photos that must be right under an attack only with the defence, for it to help there."""
LEGEND = (
    "pgd is projected gradient descent in ten steps, input-diverse takes them at images resized at random, pgd-stop "
    "stops once the answer is wrong; pixels change by at most 4/255. An attacked photo must be right clean as well; "
    "attacks do not know SecondLook, and an attacker who does can defeat it."
)
PLAIN, DEFENDED = "plain", "defended"
"""Names of both kinds of answers, in tables and in JSON."""
_TIMED, _ROUNDS = 16, 3
"""Photos whose answers are timed, and how often."""


class LookAtFeatures(SecondLook):
    """SecondLook without classes, as where features are searched: the gallery must not decide what changes."""

    label = SecondLook.label

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The features of SecondLook for the encoder alone."""
        gallery, x.classes = x.classes, None
        answer = super().defend(x)
        x.classes = gallery
        return answer


def judge(changed: int, count: int, gains: Mapping[str, float]) -> tuple[str, str]:
    """``helps``, ``harmless``, ``does not help`` or ``refuse``, and a sentence with the numbers.

    Args:
        changed: honest answers that change.
        count: all honest answers.
        gains: under each attack, the share of the photos that are right only with the defence.

    >>> judge(3, 300, {"pgd": 0.6, "input-diverse": 0.02})[0]
    'harmless'
    >>> judge(18, 300, {"pgd": 0.6})[1].split("; ")[0]
    'Leave SecondLook off: 18 of 300 (6.0 %, 95 % interval 3.8 to 9.3 %) honest answers change (limit 3 %)'
    """
    helped = sum(gain >= HELPS for gain in gains.values())
    verdict, opening = "helps", "SecondLook helps"
    if changed > HARMLESS * count:
        verdict, opening = "refuse", "Leave SecondLook off"
    elif not helped:
        verdict, opening = "does not help", "SecondLook does not help"
    elif helped < len(gains):
        verdict, opening = "harmless", f"SecondLook is harmless, and helps against {helped} of {len(gains)} attacks"
    honest = f"{share_in_words(changed, count)} honest answers change (limit {100 * HARMLESS:g} %)"
    gained = ", ".join(f"{title} {100 * gain:+.0f}" for title, gain in gains.items())
    return verdict, f"{opening}: {honest}; points gained under attack ({100 * HELPS:g} help): {gained}."


def check_tower(
    clip: ZeroShotClassifier | Encoder,
    calibration: Calibration,
    files: Sequence[Path],
    pixels: Tensor,
    labels: Tensor | None,
    folder: Path,
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Attack photos that were not calibrated on, and write the page; returns the JSON document.

    Its keys are ``verdict``, ``sentence``, ``model``, ``right``, ``calibrated``, ``measured``, ``changed``, ``share``,
    ``attacks``, ``milliseconds`` and ``notes``; later versions may add some.

    Args:
        clip: the classifier, or an encoder without classes.
        calibration: of SecondLook for it.
        files: names of the photos.
        pixels: of the photos, ``[N, 3, S, S]`` in [0, 1].
        labels: ``[N]``, or ``None`` where nobody knows them.
        folder: of the page, and of the evaluation; the same call continues one that was interrupted.
        progress: show progress bars.
    """
    guard, batch = calibration.config, 16 if clip.device.type == "cpu" else 64
    parts, right = torch.split(pixels, batch), "label"
    if isinstance(clip, Encoder):
        right, labels, guard = "recall@1 of the photo itself", torch.arange(len(files)), LookAtFeatures(**vars(guard))
        gallery = torch.cat([Undefended().run(clip, clip.prepare(part), 0).features for part in parts])
        clip = ZeroShotClassifier.from_features(clip, [*map(str, files)], gallery)
    elif labels is None:
        right, labels = "plain clean answer", torch.cat([Undefended()(clip, part).labels.cpu() for part in parts])
    result = evaluate(
        clip,
        {PLAIN: Undefended(), DEFENDED: guard},
        (pixels, labels),
        run_dir=folder / "run",
        attacks=ATTACKS,
        title="Check",
        images={"store": "none"},
        batch=batch,
        self_check=False,  # finetuned towers resist it
        progress=progress,
    )
    attacks: dict[str, dict[str, Any]] = {}
    for row in result.rows:
        numbers = {"right": row.accuracy, "low": row.low, "high": row.high, "passes": row.passes}
        attacks.setdefault(row.attack, {})[row.defense] = numbers
    if not attacks[CLEAN][PLAIN]["right"]:
        raise ReactClipError("plain CLIP gets no photo right, so there is nothing to defend; check the labels")
    changed = _changed(result, labelled=right == "label")
    gains = {name: row[DEFENDED]["right"] - row[PLAIN]["right"] for name, row in attacks.items() if name != CLEAN}
    verdict, sentence = judge(len(changed), len(files), gains)
    document: dict[str, Any] = {
        "verdict": verdict,
        "sentence": sentence,
        "model": clip.encoder.name,
        "right": right,
        "calibrated": calibration.photos,
        "measured": len(files),
        "changed": [{"file": str(files[number]), **answers} for number, answers in changed.items()],
        "share": wilson(len(changed) / len(files), len(files))._asdict(),
        "attacks": attacks,
        "milliseconds": _milliseconds(clip, guard, pixels[:_TIMED], progress),
        "notes": list(calibration.notes),
    }
    pictures = [changed_photo(str(files[number]), pixels[number], **answers) for number, answers in changed.items()]
    _write_page(folder / PAGE, document, calibration, pictures)
    return document


def _changed(result: EvaluationResult, *, labelled: bool) -> dict[int, dict[str, str]]:
    """Both answers, and the label if it is known, of each clean photo whose answer changes."""
    images, names = result.images, result.sets[0].class_names
    clean = images[(images["defense"] == DEFENDED) & (images["attack"] == CLEAN)].set_index("index")
    clean = clean[clean["prediction"] != clean["clean_prediction"]]
    columns = {PLAIN: "clean_prediction", DEFENDED: "prediction", **({"label": "label"} if labelled else {})}
    return {row: {key: names[clean.at[row, column]] for key, column in columns.items()} for row in clean.index.tolist()}


def _write_page(path: Path, document: dict[str, Any], calibration: Calibration, changed: Sequence[Photo]) -> None:
    about = f"{document['calibrated']} photos calibrated SecondLook, {document['measured']} others were measured."
    time = "{plain:.1f} ms per clean image plain, {defended:.1f} ms defended".format(**document["milliseconds"])
    rows = []
    for title, sides in document["attacks"].items():
        cells = [Cell(100 * side["right"], 100 * side["low"], 100 * side["high"]) for side in sides.values()]
        rows.append(((title,), (*cells, *(Cell(side["passes"], digits=2) for side in sides.values()))))
    header = ("photos", *(f"{side}, {what}" for what in ("right", "passes") for side in (PLAIN, DEFENDED)))
    caption = f"photos that are right ({document['right']}) in %, with 95 % intervals; encoder passes per image"
    table = Table("check", caption, header, tuple(rows))
    sections = [
        Section("What is left, and what it costs", [time, LEGEND], tables=[table]),
        changed_section(changed, document["measured"]),
        Section("Calibration", facts={"SecondLook": repr(calibration.config)}, text=document["notes"]),
    ]
    write_page(path, f"SecondLook on {document['model']}", [document["sentence"], about], sections)


def _milliseconds(clf: ZeroShotClassifier, guard: Defense, pixels: Tensor, progress: bool) -> dict[str, float]:
    """Per image, both taking turns."""
    comparison = bench.Comparison(bench.contenders(clf, [Undefended(), guard]), pixels.to(clf.device), batch=_TIMED)
    *_, (_, plain, ours) = tqdm(comparison.measure(rounds=_ROUNDS), "timing", _ROUNDS, disable=not progress)
    return {PLAIN: plain.milliseconds, DEFENDED: ours.milliseconds}
