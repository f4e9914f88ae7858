"""The work on one set, cut into shards: clean predictions, adversarial images, defended answers.

Each shard covers ``batch`` images and depends only on them, so that a run can stop anywhere and continue later. A shard
names the digest of the shard it was computed from; if that one is recomputed with another content, so is this one.
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

from react_clip.attacks import Attack
from react_clip.defenses import Defended, Defense
from react_clip.encoders.cache import ViewCache, cached_views
from react_clip.errors import ReactClipError
from react_clip.evaluation.cost import PLAIN, image_cost, work
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, Recipe
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import IMAGES, ROUNDING_NOTES, Shard, ShardStore, Tensors, rounded
from react_clip.optional import require
from react_clip.preprocess import to_float

if TYPE_CHECKING:
    import pandas as pd

Span = tuple[int, int]
"""First image of a shard, and the one after its last."""

PART = "part "
"""Prefix of columns about one member of a suite: the share of draws in which its images were wrong."""
_ANSWERS = {
    "prediction": "labels",
    "d_low": "drift_low",
    "d_high": "drift_high",
    "r": "drift",
    "J": "instability",
    "score": "score",
    "gated": "gated",
    "sigma": "sigma",
    "passes": "passes",
    "backward_passes": "backward_passes",
}
"""Columns of the per-image results, and the fields of a defended answer that they hold."""


def pass_bar(name: str, total: int, *, enabled: bool) -> tqdm[Any]:
    """A progress bar in encoder passes, the unit in which attacks and defences take the same time."""
    # In a log file a line every half minute is enough.
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, desc=name, unit=" passes", unit_scale=True, disable=not enabled, mininterval=interval)


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
    """Computes the outcomes of a recipe on one set, or reads them back from shards."""

    def __init__(self, recipe: Recipe, subject: EvaluationSet, store: ShardStore) -> None:
        self.recipe = recipe
        self.subject = subject
        self.store = store
        # Passes that turn out not to be needed, or that were done before, count as done.
        self.bar = pass_bar(subject.name, 0, enabled=False)
        self._identity = subject.identity()
        # Defences of one recipe often differ in a constant only and need the same noisy views.
        self._cache = ViewCache()

    def run(self, *, progress: bool = False) -> pd.DataFrame:
        """The per-image results: one row per attack, defence, draw and image, in this order."""
        pd = require("pandas", "evaluating", extra="eval")
        with pass_bar(self.subject.name, self.planned_work(len(self.subject)), enabled=progress) as self.bar:
            shards = [self.outcomes(span) for span in self.spans()]
        titles = {CLEAN: (CLEAN, 0.0), **{item.title: (item.label, item.eps) for item in self.recipe.attacks}}
        frames = []
        for title, number, draw in shards[0]:
            parts = [shard[title, number, draw] for shard in shards]
            columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
            (attack, eps), defense = titles[title], self.recipe.defenses[number].label
            frame = pd.DataFrame(columns).assign(attack=attack, eps=eps, defense=defense, draw=draw)
            frames.append(frame.assign(seed=self.recipe.seeds[draw], attack_seed=self.recipe.seed))
        images = pd.concat(frames, ignore_index=True)
        images["correct"] = images["prediction"] == images["label"]
        texts = {"dataset": self.subject.name, "scoring": self.recipe.scoring, "threat": self.recipe.threat}
        return images.assign(**texts).astype(dict.fromkeys([*texts, "attack", "defense"], "category"))

    def planned_work(self, images: int) -> int:
        """Most passes that so many images of the set can take."""
        return work(image_cost(self.recipe)) * images

    def spans(self) -> list[Span]:
        """The ranges of images that shards cover."""
        starts = range(0, len(self.subject), self.recipe.batch)
        return [(start, min(start + self.recipe.batch, len(self.subject))) for start in starts]

    def outcomes(self, span: Span) -> dict[tuple[str, int, int], Tensors]:
        """Columns of the images of one span by attack, defence and draw; they depend on no other image."""
        self._cache.clear()
        clean = self._clean_images(span)
        defenses = list(itertools.product(range(len(self.recipe.defenses)), range(self.recipe.draws)))
        columns = self._clean_columns(span, clean)
        outcomes = {
            (CLEAN, number, draw): {**columns, **self._defended(CLEAN, span, number, draw, clean)}
            for number, draw in defenses
        }
        images: ShardImages | None = None
        for item in self.recipe.attacks:
            self._cache.clear()
            for number, draw in defenses:
                if draw == 0 and (number == 0 or item.adaptive):
                    # Only an attack that knows the defence crafts images for each one.
                    images = self._attacked_images(item, span, clean, number)
                # Images that were not attacked keep the answers that they got as clean images.
                columns = {**outcomes[CLEAN, number, draw], **self._member_columns(item, span, number)}
                if images is not None:
                    answers = self._defended(item.title, span, number, draw, images)
                    attacked = {**images.shard.tensors, **answers, "attacked": torch.ones_like(images.rows).bool()}
                    columns = {
                        name: old.index_copy(0, images.rows, attacked[name]) if name in attacked else old
                        for name, old in columns.items()
                    }
                else:
                    self.bar.update(self._answer_work(number, span))
                outcomes[item.title, number, draw] = columns
        return outcomes

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
            "queries": torch.zeros_like(labels),
        }

    def _member_columns(self, item: LabelledAttack, span: Span, number: int) -> Tensors:
        """For a suite: columns about its members, NaN where an image was not attacked."""
        members = item.attack.members_for(self.recipe.defenses[number].defense)
        return {PART + member.name: torch.full((span[1] - span[0],), torch.nan) for member in members}

    # ------------------------------------------------------------------ the three kinds of shards

    def _clean_images(self, span: Span) -> ShardImages:
        """The clean images of a span with their undefended predictions, which decide what is attacked."""
        path, about = self._path(CLEAN, "plain", span=span), self._about(span, work="clean predictions")
        shard = self.store.read(path, about)
        if shard is None:
            self._stage("clean")
            stored = self._path(CLEAN, IMAGES, span=span)
            if self.recipe.images.store != "none" and self.store.read(stored, about) is None:
                # Only shown in reports, never computed with, so bytes are exact enough.
                photos = self.subject.batch(*span).mul(255).round().byte()
                self.store.write(stored, about, {IMAGES: photos, "index": torch.arange(*span)})
            shard = self.store.write(path, about, {"prediction": self._plain(self.subject.batch(*span))})
        self.bar.update(span[1] - span[0])
        return ShardImages(torch.arange(span[1] - span[0]), lambda: self.subject.batch(*span), shard)

    def _attacked_images(self, item: LabelledAttack, span: Span, clean: ShardImages, number: int) -> ShardImages | None:
        """Adversarial images of those that the scoring attacks, crafted or read back; ``None`` if there are none."""
        chosen, labels = self.recipe.defenses[number], self.subject.labels[slice(*span)]
        right = clean.shard.tensors["prediction"] == labels
        rows = (right | (self.recipe.scoring == "attack_all") | item.attack.natural).nonzero().flatten()
        planned = (work(item.attack.cost(chosen.defense)) + work(PLAIN)) * len(labels)
        if not len(rows):
            self.bar.update(planned)
            return None

        def craft() -> Tensors:
            self._stage(f"{item.title}, against {chosen.label}" if item.adaptive else item.title)
            photos = self.subject.batch(*span)[rows.to(self.subject.clf.device)]
            return self._craft(item.attack, chosen.defense, photos, labels[rows], planned) | {
                "index": (rows + span[0]).int()
            }

        store = self.recipe.images.store
        path = self._path(item.title, *([chosen.label] if item.adaptive else []), IMAGES, span=span)
        about = self._about(span, work="attack", attack=repr(item.attack), clean=clean.shard.digest, store=store)
        if item.adaptive:
            about |= {"defense": chosen.defense.to_dict()}
        shard, crafted = self.store.read(path, about), None
        if shard is None:
            crafted = craft()
            stored = {name: tensor for name, tensor in crafted.items() if name != IMAGES or store != "none"}
            shard = self.store.write(path, about, stored, note=ROUNDING_NOTES[store])
        else:
            self.bar.update(planned)
        tensors = shard.tensors

        @cache
        def pixels() -> Tensor:
            # Images that are not stored are crafted again if a defence still needs them: same seed, same images.
            source = tensors if IMAGES in tensors else crafted or craft()
            return to_float(source[IMAGES].to(self.subject.clf.device))

        return ShardImages(rows, pixels, shard)

    def _craft(self, attack: Attack, defense: Defense, clean: Tensor, labels: Tensor, planned: int) -> Tensors:
        """Adversarial images in their stored type, and the outcome of the attack; the bar moves by ``planned``."""
        reached = 0

        def tick(done: int, total: int) -> None:
            nonlocal reached
            self.bar.update(planned * done // max(total, 1) - reached)
            reached = planned * done // max(total, 1)

        with _explained_memory_error(self.recipe.batch):
            target = attack.target(self.subject.attack_clf, defense)
            result = attack(target, clean, labels.to(clean.device), seed=self.recipe.seed, progress=tick)
        tick(1, 1)
        images = rounded(result.images, clean, 1.0 if attack.natural else attack.eps, self.recipe.images.store)
        prediction = self._plain(to_float(images))
        return {
            IMAGES: images,
            "label": labels.int(),
            "plain_prediction": prediction,
            "attack_success": prediction != labels,
            "crafted_success": result.success.cpu(),
            "queries": result.queries.cpu(),
            **{PART + name: share.cpu() for name, share in result.parts.items()},
        }

    def _defended(self, title: str, span: Span, number: int, draw: int, images: ShardImages) -> Tensors:
        """Answers of one defence with one draw of its noise."""
        chosen, seed = self.recipe.defenses[number], self.recipe.seeds[draw]
        path = self._path(title, chosen.label, f"draw-{draw}", span=span)
        about = self._about(
            span, work="defence", defense=chosen.defense.to_dict(), defense_seed=seed, source=images.shard.digest
        )
        shard = self.store.read(path, about)
        if shard is None:
            self._stage(f"{title}, {chosen.label}" + (f", draw {draw + 1}" if self.recipe.draws > 1 else ""))
            with _explained_memory_error(self.recipe.batch), cached_views(self.subject.clf.encoder, self._cache):
                answers = _answer_columns(chosen.defense(self.subject.clf, images.pixels(), seed=seed))
            shard = self.store.write(path, about, answers)
        self.bar.update(self._answer_work(number, span))
        return shard.tensors

    # ------------------------------------------------------------------ helpers

    @torch.no_grad()
    def _plain(self, images: Tensor) -> Tensor:
        """Undefended predictions ``[B]`` on pixels ``[B, 3, S, S]``."""
        with _explained_memory_error(self.recipe.batch):
            logits: Tensor = self.subject.clf(images)
        return logits.argmax(-1).int().cpu()

    def _answer_work(self, number: int, span: Span) -> int:
        return work(self.recipe.defenses[number].defense.cost()) * (span[1] - span[0])

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
    def plain(values: Tensor) -> Tensor:
        return values.float() if values.is_floating_point() else values if values.dtype == torch.bool else values.int()

    return {name: plain(getattr(defended, field).detach().cpu()) for name, field in _ANSWERS.items()}
