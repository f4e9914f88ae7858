"""The work on one set, cut into shards: clean predictions, adversarial images, defended answers.

Each shard covers ``batch`` images and depends only on them, so that a run can stop anywhere and continue later. A shard
names what it was computed from: weights, photos, settings, code, and the digest of the shard before it. If one of these
has changed, it is computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip.attacks import Attack
from react_clip.attacks.base import ADAPTIVE
from react_clip.defenses import Defense
from react_clip.evaluation.numbers import PART
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, LabelledDefense, Recipe
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import CLASSES, PIXELS, PLAIN, Shard, ShardStore, Tensors
from react_clip.optional import require
from react_clip.preprocess import to_float
from react_clip.storage import tensor_digest

if TYPE_CHECKING:
    import pandas as pd

Span = tuple[int, int]
"""First image of a shard, and the one after its last."""


@dataclass(frozen=True, eq=False)
class ShardImages:
    """Images of one shard that a defence answers."""

    rows: Tensor
    """Their positions in the shard."""
    pixels: Callable[[], Tensor]
    """Reads or crafts the pixels ``[len(rows), 3, S, S]``."""
    shard: Shard
    """Clean predictions, or the outcome of the attack that made the images."""


@dataclass(eq=False)
class SetRunner:
    """Computes the answers of a recipe on one set, or reads them back from shards."""

    recipe: Recipe
    subject: EvaluationSet
    store: ShardStore
    bar: tqdm[Any] = field(default_factory=lambda: tqdm(disable=True))

    def run(self, *, progress: bool = False) -> pd.DataFrame:
        """The answers of the whole set, see :mod:`react_clip.evaluation.results`."""
        pd = require("pandas", "evaluating", extra="eval")
        recipe = self.recipe
        batches = len(self.spans()) * len(recipe.defenses) * len(recipe.seeds) * (1 + len(recipe.attacks))
        with tqdm(desc=self.subject.name, total=batches, disable=not progress, unit="batch") as self.bar:
            if self.recipe.images.store != "none":
                about, features = {"work": "class features"}, {"features": self.subject.clf.class_features}
                self._shard("classes", (CLEAN, CLASSES), (0, len(self.subject)), about, lambda: features)
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
        labels, prediction = self.subject.labels[slice(*span)].int().numpy(), clean.shard.tensors["prediction"].numpy()
        digests = [tensor_digest(photo)[:16] for photo in self.subject.pixels[slice(*span)]]
        columns = {"index": range(*span), "photo": digests, "label": labels, "clean_prediction": prediction}
        photos = pd.DataFrame(columns)
        photos = photos.assign(attack=CLEAN, eps=0.0, plain_prediction=prediction, queries=0.0)
        photos = photos.assign(attacked=False, attack_success=False, crafted_success=False)
        asked = list(itertools.product(self.recipe.defenses, range(len(self.recipe.seeds))))
        frames = []
        for chosen, draw in asked:
            answers = self._answers(CLEAN, span, chosen, draw, clean)
            frame = photos.assign(**answers, defense=chosen.label, draw=draw, seed=self.recipe.seeds[draw])
            right = frame["prediction"] == frame["label"]
            frames.append(frame.assign(correct=right, clean_correct=right, robust=right))
        before = list(frames)
        for item in self.recipe.attacks:
            images: ShardImages | None = None
            for (chosen, draw), frame in zip(asked, before, strict=True):
                if draw == 0 and (self.recipe.threat == ADAPTIVE or chosen is self.recipe.defenses[0]):
                    # Only an attack that knows the defence crafts images for each one.
                    images = self._attacked_images(item, span, clean, chosen)
                if images is not None:
                    outcome = {name: tensor.numpy() for name, tensor in images.shard.tensors.items() if name != PIXELS}
                    answers = self._answers(item.title, span, chosen, draw, images)
                    rows = images.rows.numpy()
                    # Images that were not attacked keep the answers that they got as clean images.
                    attacked = frame.loc[rows].assign(**outcome, **answers, attacked=True)
                    frame = pd.concat([frame.drop(index=rows), attacked]).sort_index()
                else:
                    self.bar.update()
                right = frame["prediction"] == frame["label"]
                robust = right & (frame["clean_correct"] | (item.eps == 0))
                frames.append(frame.assign(attack=item.label, eps=item.eps, correct=right, robust=robust))
        return pd.concat(frames, ignore_index=True)

    # ------------------------------------------------------------------ the three kinds of shards

    def _clean_images(self, span: Span) -> ShardImages:
        """The clean images of a span with their undefended predictions, which decide what is attacked."""
        stored = {PIXELS: self.subject.pixels[slice(*span)], "index": torch.arange(*span)}
        about = {"work": "clean predictions", "code": self.subject.code()}
        if self.recipe.images.store != "none":
            self._shard("clean", (CLEAN, PIXELS), span, about, lambda: stored)
        pixels = partial(self.subject.batch, slice(*span))
        shard = self._shard("clean", (CLEAN, PLAIN), span, about, lambda: {"prediction": self.plain(pixels())})
        return ShardImages(torch.arange(span[1] - span[0]), pixels, shard)

    def _attacked_images(
        self, item: LabelledAttack, span: Span, clean: ShardImages, chosen: LabelledDefense
    ) -> ShardImages | None:
        """Adversarial images of those that the scoring attacks, crafted or read back; ``None`` if there are none."""
        labels, keep = self.subject.labels[slice(*span)], self.recipe.images.store != "none"
        right = clean.shard.tensors["prediction"] == labels
        rows = (right | (self.recipe.scoring == "attack_all") | item.attack.natural).nonzero().flatten()
        if not len(rows):
            return None

        @cache
        def craft() -> Tensors:
            photos = self.subject.batch(rows + span[0])
            return self._craft(item.attack, chosen.defense, photos, labels[rows]) | {"index": (rows + span[0]).int()}

        known = [chosen] if self.recipe.threat == ADAPTIVE else []
        about = {
            **{"work": "attack", "attack": repr(item.attack), "clean": clean.shard.digest},
            "code": self.subject.code(item.attack, *(one.defense for one in known)),
            "defense": [one.defense.to_dict() for one in known],
            "store": self.recipe.images.store,
        }
        labels_of = [one.label for one in known]
        shard = self._shard(
            ", against ".join([item.title, *labels_of]),
            (item.title, *labels_of, PIXELS),
            span,
            about,
            lambda: {name: tensor for name, tensor in craft().items() if keep or name != PIXELS},
        )

        @cache
        def pixels() -> Tensor:
            # Images that are not stored are crafted again if a defence still needs them: same seed, same images.
            source = shard.tensors if PIXELS in shard.tensors else craft()
            return to_float(source[PIXELS].to(self.subject.clf.device))

        return ShardImages(rows, pixels, shard)

    def _craft(self, attack: Attack, defense: Defense, clean: Tensor, labels: Tensor) -> Tensors:
        """Adversarial images in 8 bits, and the outcome of the attack."""
        target = attack.target(self.subject.attack_clf, defense)
        result = attack(target, clean, labels.to(clean.device), seed=self.recipe.seed)
        images = result.images.mul(255.0).round().byte()
        prediction = self.plain(to_float(images))
        return {
            PIXELS: images.cpu(),
            "plain_prediction": prediction,
            "attack_success": prediction != labels,
            "crafted_success": result.crafted.cpu(),
            "queries": result.queries.double().cpu(),
            "flat": result.flat.cpu(),
            **{PART + name: fraction.cpu() for name, fraction in result.parts.items()},
        }

    def _answers(
        self, title: str, span: Span, chosen: LabelledDefense, draw: int, images: ShardImages
    ) -> dict[str, Any]:
        """Columns of the answers of one defence with one draw of its noise."""
        defense, seed = chosen.defense, self.recipe.seeds[draw]
        about = {"work": "defence", "defense": defense.to_dict(), "defense_seed": seed}
        about |= {"code": self.subject.code(defense), "source": images.shard.digest}
        stage = f"{title}, {chosen.label}" + (f", seed {seed}" if len(self.recipe.seeds) > 1 else "")

        def ask() -> Tensors:
            answer = defense(self.subject.clf, images.pixels(), seed=seed)
            measured = {"passes": answer.passes, "backward_passes": answer.backward_passes, **answer.diagnostics}
            numbers = {name: values.float() for name, values in measured.items()}
            softmax = answer.logits.detach().amin(1).ge(0.0) & answer.logits.sum(1).sub(1.0).abs().lt(1e-4)
            return {"prediction": answer.labels.int(), "gated": answer.gated, "softmax": softmax, **numbers}

        shard = self._shard(stage, (title, chosen.label, f"seed-{seed}"), span, about, ask)
        self.bar.update()
        return {name: tensor.numpy() for name, tensor in shard.tensors.items()}

    def _shard(
        self, stage: str, labels: Sequence[str], span: Span, about: dict[str, Any], compute: Callable[[], Tensors]
    ) -> Shard:
        """A shard, read back or computed; ``about`` is what it depends on beside the set and the protocol."""

        def work() -> Tensors:
            self.bar.set_description(f"{self.subject.name}: {stage}", refresh=False)
            return compute()

        protocol = {"set": self.subject.name, "span": span, "seed": self.recipe.seed, "scoring": self.recipe.scoring}
        path = (self.subject.name, *labels, f"{span[0]:06d}")
        return self.store.get(path, {**protocol, **self.subject.identity, **about}, work)

    @torch.no_grad()
    def plain(self, images: Tensor) -> Tensor:
        """Undefended predictions ``[B]`` on pixels ``[B, 3, S, S]``."""
        logits: Tensor = self.subject.clf(images)
        return logits.argmax(-1).int().cpu()
