"""The work on one set, cut into shards: clean predictions, adversarial images, defended answers.

Each shard covers ``batch`` images and depends only on them, so that a run can stop anywhere and continue later. A shard
names what it was computed from: weights, photos, settings, code, and the digest of the shard before it. If one of these
has changed, it is computed again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip.attacks import Attack, Suite
from react_clip.defenses import Defended, Defense
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, Recipe
from react_clip.evaluation.results import PART
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import PIXELS, Shard, ShardStore, Tensors
from react_clip.optional import require
from react_clip.preprocess import to_float

if TYPE_CHECKING:
    import pandas as pd

Span = tuple[int, int]
"""First image of a shard, and the one after its last."""

_REPEATED = 5
"""Images of which a defence is asked again, to see whether it repeats its answers."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest change of a unit feature that counts as rounding; 0.05 in half precision."""


@dataclass(frozen=True, eq=False)
class ShardImages:
    """Images of one shard that a defence answers."""

    rows: Tensor
    """Their positions in the shard."""
    pixels: Callable[[], Tensor]
    """Reads or crafts the pixels ``[len(rows), 3, S, S]``."""
    shard: Shard
    """Clean predictions, or the outcome of the attack that made the images."""


class SetRunner:
    """Computes the answers of a recipe on one set, or reads them back from shards."""

    def __init__(self, recipe: Recipe, subject: EvaluationSet, store: ShardStore) -> None:
        self.recipe = recipe
        self.subject = subject
        self.store = store
        self.bar: tqdm[Any] = tqdm(disable=True)
        self._identity = subject.identity()

    def run(self, *, progress: bool = False) -> pd.DataFrame:
        """The answers of the whole set, see :mod:`react_clip.evaluation.results`."""
        pd = require("pandas", "evaluating", extra="eval")
        crafted = sum(len(self.recipe.defenses) if item.adaptive else 1 for item in self.recipe.attacks)
        answers = len(self.recipe.defenses) * self.recipe.draws * (1 + len(self.recipe.attacks))
        pieces = len(self.spans()) * (1 + crafted + answers)
        # In a log file a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30.0
        options: dict[str, Any] = {"desc": self.subject.name, "unit": "piece", "mininterval": interval}
        with tqdm(total=pieces, disable=not progress, **options) as self.bar:
            images = pd.concat([self.outcomes(span) for span in self.spans()], ignore_index=True)
        texts = {"dataset": self.subject.name, "scoring": self.recipe.scoring, "threat": self.recipe.threat}
        images = images.assign(attack_seed=self.recipe.seed, **texts)
        return images.astype(dict.fromkeys([*texts, "attack", "defense"], "category"))

    def spans(self) -> list[Span]:
        """The ranges of images that shards cover."""
        starts = range(0, len(self.subject), self.recipe.batch)
        return [(start, min(start + self.recipe.batch, len(self.subject))) for start in starts]

    def outcomes(self, span: Span) -> pd.DataFrame:
        """The answers about the images of one span; they depend on no other image."""
        import pandas as pd

        clean = self._clean_images(span)
        choices = list(itertools.product(enumerate(self.recipe.defenses), enumerate(self.recipe.seeds)))
        before: dict[tuple[int, int], pd.DataFrame] = {}
        for (number, chosen), (draw, seed) in choices:
            columns = {**self._clean_columns(span, clean), **self._answers(CLEAN, span, number, draw, clean)}
            frame = pd.DataFrame({name: tensor.numpy() for name, tensor in columns.items()})
            frame = frame.assign(attack=CLEAN, eps=0.0, defense=chosen.label, draw=draw, seed=seed)
            frame["correct"] = frame["clean_correct"] = frame["robust"] = frame["prediction"] == frame["label"]
            before[number, draw] = frame
        frames = list(before.values())
        for item in self.recipe.attacks:
            images: ShardImages | None = None
            for (number, _), (draw, _) in choices:
                if draw == 0 and (number == 0 or item.adaptive):
                    # Only an attack that knows the defence crafts images for each one.
                    images = self._attacked_images(item, span, clean, number)
                frame = before[number, draw]
                if images is not None:
                    answers = self._answers(item.title, span, number, draw, images)
                    new = {**images.shard.tensors, **answers, "attacked": torch.ones_like(images.rows).bool()}
                    changed = {name: tensor.numpy() for name, tensor in new.items() if name != PIXELS}
                    rows = images.rows.numpy()
                    # Images that were not attacked keep the answers that they got as clean images.
                    attacked = frame.loc[rows].assign(**changed)
                    frame = pd.concat([frame.drop(index=rows), attacked]).sort_index()
                else:
                    self.bar.update()
                correct = frame["prediction"] == frame["label"]
                robust = correct & (frame["clean_correct"] | (item.eps == 0))
                frames.append(frame.assign(attack=item.label, eps=item.eps, correct=correct, robust=robust))
        return pd.concat(frames, ignore_index=True)

    def _clean_columns(self, span: Span, clean: ShardImages) -> Tensors:
        """Columns of images before any attack and any defence."""
        labels, prediction = self.subject.labels[slice(*span)], clean.shard.tensors["prediction"]
        no = torch.zeros_like(labels, dtype=torch.bool)
        return {
            "index": torch.arange(*span, dtype=torch.int32),
            "label": labels.int(),
            "clean_prediction": prediction,
            "plain_prediction": prediction,
            "attacked": no,
            "attack_success": no,
            "crafted_success": no,
            "queries": torch.zeros_like(labels, dtype=torch.float64),
        }

    # ------------------------------------------------------------------ the three kinds of shards

    def _clean_images(self, span: Span) -> ShardImages:
        """The clean images of a span with their undefended predictions, which decide what is attacked."""
        path, about = (
            self._path(CLEAN, "plain", span=span),
            self._about(span, work="clean predictions", code=self.subject.code()),
        )
        shard = self.store.read(path, about)
        if shard is None:
            self._stage("clean")
            stored = self._path(CLEAN, PIXELS, span=span)
            if self.recipe.images.store != "none" and self.store.read(stored, about) is None:
                photos = self.subject.pixels[slice(*span)]
                self.store.write(stored, about, {PIXELS: photos, "index": torch.arange(*span)})
            shard = self.store.write(path, about, {"prediction": self._plain(self.subject.batch(*span))})
        self.bar.update()
        return ShardImages(torch.arange(span[1] - span[0]), lambda: self.subject.batch(*span), shard)

    def _attacked_images(self, item: LabelledAttack, span: Span, clean: ShardImages, number: int) -> ShardImages | None:
        """Adversarial images of those that the scoring attacks, crafted or read back; ``None`` if there are none."""
        chosen, labels = self.recipe.defenses[number], self.subject.labels[slice(*span)]
        right = clean.shard.tensors["prediction"] == labels
        rows = (right | (self.recipe.scoring == "attack_all") | item.attack.natural).nonzero().flatten()
        if not len(rows):
            self.bar.update()
            return None

        def craft() -> Tensors:
            self._stage(f"{item.title}, against {chosen.label}" if item.adaptive else item.title)
            photos = self.subject.batch(*span)[rows.to(self.subject.clf.device)]
            return self._craft(item.attack, chosen.defense, photos, labels[rows]) | {"index": (rows + span[0]).int()}

        about = self._about(span, work="attack", attack=repr(item.attack), clean=clean.shard.digest)
        parts: list[object] = [item.attack, *(item.attack.members if isinstance(item.attack, Suite) else ())]
        if item.adaptive:
            parts.append(chosen.defense)
            about |= {"defense": chosen.defense.to_dict()}
        about |= {"code": self.subject.code(*parts), "store": self.recipe.images.store}
        path = self._path(item.title, *([chosen.label] if item.adaptive else []), PIXELS, span=span)
        shard, crafted = self.store.read(path, about), None
        if shard is None:
            crafted = craft()
            keep = self.recipe.images.store != "none"
            shard = self.store.write(path, about, {k: v for k, v in crafted.items() if keep or k != PIXELS})
        self.bar.update()
        tensors = shard.tensors

        @cache
        def pixels() -> Tensor:
            # Images that are not stored are crafted again if a defence still needs them: same seed, same images.
            source = tensors if PIXELS in tensors else crafted or craft()
            return to_float(source[PIXELS].to(self.subject.clf.device))

        return ShardImages(rows, pixels, shard)

    def _craft(self, attack: Attack, defense: Defense, clean: Tensor, labels: Tensor) -> Tensors:
        """Adversarial images in 8 bits, and the outcome of the attack."""

        def show(done: int) -> None:
            self.bar.set_postfix_str(f"step {done}", refresh=False)
            self.bar.update(0)

        with _explained_memory_error(self.recipe.batch):
            target = attack.target(self.subject.attack_clf, defense)
            result = attack(target, clean, labels.to(clean.device), seed=self.recipe.seed, progress=show)
        images = result.images.mul(255.0).round().byte()
        prediction = self._plain(to_float(images))
        return {
            PIXELS: images.cpu(),
            "plain_prediction": prediction,
            "attack_success": prediction != labels,
            "crafted_success": result.crafted.cpu(),
            "queries": result.queries.double().cpu(),
            **{PART + name: fraction.cpu() for name, fraction in result.parts.items()},
        }

    def _answers(self, title: str, span: Span, number: int, draw: int, images: ShardImages) -> Tensors:
        """Answers of one defence with one draw of its noise."""
        chosen, seed = self.recipe.defenses[number], self.recipe.seeds[draw]
        path = self._path(title, chosen.label, f"draw-{draw}", span=span)
        about = self._about(span, work="defence", defense=chosen.defense.to_dict(), defense_seed=seed)
        about |= {"code": self.subject.code(chosen.defense), "source": images.shard.digest}
        shard = self.store.read(path, about)
        if shard is None:
            self._stage(f"{title}, {chosen.label}" + (f", draw {draw + 1}" if self.recipe.draws > 1 else ""))
            with _explained_memory_error(self.recipe.batch):
                answers = _answer_columns(chosen.defense(self.subject.clf, images.pixels(), seed=seed))
            shard = self.store.write(path, about, answers)
        self.bar.update()
        return shard.tensors

    # ------------------------------------------------------------------ do the defences repeat their answers?

    def unrepeatable(self) -> list[str]:
        """One line for each defence that answers a few images differently when it is asked again."""
        lines = []
        for chosen in self.recipe.defenses:
            path = (self.subject.name, "checks", chosen.label, "repeats")
            about = {"defense": chosen.defense.to_dict(), "code": self.subject.code(chosen.defense), **self._identity}
            shard = self.store.read(path, about) or self.store.write(path, about, self._asked_again(chosen.defense))
            again, apart = (float(shard.tensors[name]) for name in ("again", "apart"))
            tolerance = _TOLERANCE.get(self.subject.clf.encoder.dtype, 0.05)
            if again > tolerance:
                why = "when it is asked again with the same seed: it draws from a global generator"
            elif apart > tolerance:
                why = "in another batch: they depend on the other images, or on a global generator"
            else:
                continue
            lines.append(f"{chosen.label} gives other answers {why}; its numbers cannot be repeated")
        return lines

    def _asked_again(self, defense: Defense) -> Tensors:
        """Changes of the features of a few images: asked for the same batch again, and for the images in two parts.

        The seed is the same. Of the parts it is the median: a gate may open or shut by rounding for an image or two.
        """
        clf, images = self.subject.clf, self.subject.batch(0, min(_REPEATED, len(self.subject)))
        half = (len(images) + 1) // 2

        def features(batch: Tensor) -> Tensor:
            return defense(clf, batch, seed=self.recipe.seed).features.detach().float()

        first, again = features(images), features(images)
        apart = torch.cat([features(part) for part in (images[half:], images[:half]) if len(part)]).roll(half, 0)
        return {"again": (first - again).norm(dim=1).max(), "apart": (first - apart).norm(dim=1).median()}

    # ------------------------------------------------------------------ helpers

    @torch.no_grad()
    def _plain(self, images: Tensor) -> Tensor:
        """Undefended predictions ``[B]`` on pixels ``[B, 3, S, S]``."""
        with _explained_memory_error(self.recipe.batch):
            logits: Tensor = self.subject.clf(images)
        return logits.argmax(-1).int().cpu()

    def _stage(self, text: str) -> None:
        self.bar.set_description(f"{self.subject.name}: {text}", refresh=False)

    def _path(self, *labels: str, span: Span) -> tuple[str, ...]:
        return (self.subject.name, *labels, f"{span[0]:06d}")

    def _about(self, span: Span, **details: Any) -> dict[str, Any]:
        """Description of everything that a shard depends on."""
        protocol = {"set": self.subject.name, "span": span, "seed": self.recipe.seed, "scoring": self.recipe.scoring}
        return {**protocol, **self._identity, **details}


@contextmanager
def _explained_memory_error(batch: int) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ReactClipError(
            f"the device has too little memory for a batch of {batch}; use a smaller --batch with another --out"
        ) from error


def _answer_columns(defended: Defended) -> Tensors:
    """The columns of an answer: prediction, gate, passes, and the defence's diagnostics under their names."""
    columns = {
        "prediction": defended.labels.int(),
        "gated": defended.gated,
        "passes": defended.passes,
        "backward_passes": defended.backward_passes,
        **{name: value.float() for name, value in defended.diagnostics.items()},
    }
    return {name: (v.float() if v.is_floating_point() else v).detach().cpu() for name, v in columns.items()}
