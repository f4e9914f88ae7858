"""The work on one set, cut into shards: clean answers, adversarial images, defended answers.

Each shard covers ``batch`` images and depends only on them, so that a run can stop anywhere and continue later. A shard
names the digest of the shard it was computed from; if that one is recomputed with another content, so is this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from react_clip.attacks import Attack
from react_clip.defenses import Defended
from react_clip.encoders.cache import ViewCache, cached_views
from react_clip.errors import ReactClipError
from react_clip.evaluation.cost import Passes, crafting_cost
from react_clip.evaluation.progress import Tally
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, Recipe
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import IMAGES, ROUNDING_NOTES, Shard, ShardStore, Tensors, rounded
from react_clip.preprocess import to_float

Span = tuple[int, int]
"""First image of a shard, and the one after its last."""

_INTEGERS = {"prediction": torch.int64, "gated": torch.bool, "backward_passes": torch.int32}
_FLOATS = ("d_low", "d_high", "r", "J", "score", "sigma", "passes")
PART = "part "
"""Prefix of columns about one member of a suite: the share of draws in which its images were wrong."""


@dataclass(frozen=True, eq=False)
class Block:
    """Per-image outcomes of one set under one attack, one defence and one draw of its noise."""

    dataset: str
    attack: LabelledAttack
    defense: str
    draw: int
    seed: int
    columns: Tensors


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Input images of a defence, read or crafted only when ``pixels`` is called."""

    pixels: Callable[[], Tensor]
    count: int
    digest: str
    """Digest of the shard that the pixels come from."""


@dataclass(frozen=True, eq=False)
class AttackedImages:
    """The attacked images of a shard and the outcome of the attack; one entry per attacked image."""

    rows: Tensor
    """Their positions in the shard."""
    source: ImageSource
    """Their adversarial pixels, as stored."""
    plain: Tensor
    """Undefended predictions on these pixels."""
    found: Tensor
    """Mask: the attack had succeeded before its image was rounded for storage."""
    queries: Tensor
    parts: Tensors
    """For a suite: the columns of its members."""


class SetRunner:
    """Computes all outcomes of a recipe on one set, or reads them back."""

    def __init__(
        self, recipe: Recipe, subject: EvaluationSet, store: ShardStore, costs: list[Passes], progress: Tally
    ) -> None:
        self.recipe = recipe
        self.subject = subject
        self.store = store
        self.costs = costs  # planned passes per image of the recipe's defences
        self.progress = progress
        self._identity = subject.identity()
        # Defences of one recipe often differ in a constant only and ask for the same noisy views.
        self._cache = ViewCache()

    def run(self) -> list[Block]:
        """All outcomes, computed or read back from finished shards."""
        parts = [self.outcomes(span) for span in self.spans()]
        return [
            Block(
                dataset=self.subject.name,
                attack=item,
                defense=self.recipe.defenses[number].label,
                draw=draw,
                seed=self.recipe.seeds[draw],
                columns=_concatenated([part[item.title, number, draw] for part in parts]),
            )
            for item in self.recipe.all_attacks
            for number, draw in self._choices()
        ]

    def spans(self) -> list[Span]:
        """The ranges of images that shards cover."""
        starts = range(0, len(self.subject), self.recipe.batch)
        return [(start, min(start + self.recipe.batch, len(self.subject))) for start in starts]

    def outcomes(self, span: Span) -> dict[tuple[str, int, int], Tensors]:
        """The outcomes on the images of one span, by attack, defence and draw; they depend on no other image."""
        self._cache.clear()
        clean = self._clean_answers(span)
        source = self._clean_source(span, clean)
        unperturbed = {choice: self._defended(CLEAN, span, choice, source) for choice in self._choices()}
        found: dict[tuple[str, int, int], Tensors] = {}
        for item in self.recipe.all_attacks:
            self._cache.clear()
            outcome, attacked_images = self._outcome(item, span, clean, 0)
            for choice in self._choices():
                if item.adaptive and choice[0] and choice[1] == 0:
                    # An attack that knows the defence crafts images for each one.
                    outcome, attacked_images = self._outcome(item, span, clean, choice[0])
                answers = unperturbed[choice]
                if attacked_images is not None:
                    answers = self._through_defence(item, span, choice, attacked_images, answers)
                found[item.title, *choice] = {**outcome, **answers}
        return found

    def _choices(self) -> Iterator[tuple[int, int]]:
        """Every defence with every draw of its noise."""
        return ((number, draw) for number in range(len(self.recipe.defenses)) for draw in range(self.recipe.draws))

    def _outcome(
        self, item: LabelledAttack, span: Span, clean: Shard, number: int
    ) -> tuple[Tensors, AttackedImages | None]:
        """Outcome of an attack on a shard before any defence; ``number`` is the defence an adaptive attack knows."""
        labels, prediction = self.subject.labels[slice(*span)], clean.tensors["prediction"]
        attacked_images = self._attacked(item, item.attack, span, clean, number) if item.attack is not None else None
        attacked, found = torch.zeros(2, len(labels), dtype=torch.bool)
        queries, plain = torch.zeros_like(labels), prediction
        if attacked_images is not None:
            attacked = attacked.index_fill(0, attacked_images.rows, True)
            found = found.index_copy(0, attacked_images.rows, attacked_images.found)
            queries = queries.index_copy(0, attacked_images.rows, attacked_images.queries)
            plain = plain.index_copy(0, attacked_images.rows, attacked_images.plain)
        outcome = {
            "index": torch.arange(*span),
            "label": labels,
            "attacked": attacked,
            "attack_success": attacked & (plain != labels),
            "found": found,
            "queries": queries,
            "clean_prediction": prediction,
            "plain_prediction": plain,
        }
        if attacked_images is not None:
            for name, share in attacked_images.parts.items():
                outcome[name] = torch.full(labels.shape, torch.nan).index_copy(0, attacked_images.rows, share)
        return outcome, attacked_images

    def _through_defence(
        self,
        item: LabelledAttack,
        span: Span,
        choice: tuple[int, int],
        attacked_images: AttackedImages,
        unperturbed: Tensors,
    ) -> Tensors:
        """Defended answers of a shard under attack.

        Images that were not attacked keep the answers they got as clean images.
        """
        spared = span[1] - span[0] - len(attacked_images.rows)
        self.progress.skip(self.costs[choice[0]].work * spared)
        answers = self._defended(item, span, choice, attacked_images.source)
        return {name: rest.index_copy(0, attacked_images.rows, answers[name]) for name, rest in unperturbed.items()}

    # ------------------------------------------------------------------ the three kinds of work

    def _clean_answers(self, span: Span) -> Shard:
        """Undefended predictions on clean images, which decide what is attacked."""
        path, about = self._address(CLEAN, "plain", span), self._about(span, work="clean answers")
        if (shard := self.store.read(path, about)) is not None:
            self.progress.skip(span[1] - span[0])
            return shard
        self.progress.stage("clean")
        images = self._address(CLEAN, IMAGES, span)
        if self.recipe.store != "none" and self.store.read(images, about) is None:
            # Only shown in reports, never computed with, so bytes are exact enough.
            photos = self.subject.batch(*span).mul(255).round().byte()
            self.store.write(images, about, {IMAGES: photos, "index": torch.arange(*span)})
        return self.store.write(path, about, {"prediction": self._plain(self.subject.batch(*span))})

    def _attacked(self, item: LabelledAttack, attack: Attack, span: Span, clean: Shard, number: int) -> AttackedImages:
        """Choose the images that the protocol attacks, and craft or read their adversarial versions."""
        labels = self.subject.labels[slice(*span)]
        right = clean.tensors["prediction"] == labels
        rows = (torch.ones_like(right) if self.recipe.scoring == "attack_all" else right).nonzero().flatten()
        chosen = self.recipe.defenses[number]
        work = (crafting_cost(attack, chosen.defense, self.costs[number]) + Passes(1)).work
        self.progress.skip(work * (len(labels) - len(rows)))

        def craft() -> Tensors:
            self.progress.stage(f"{item.title}, against {chosen.label}" if item.adaptive else item.title)
            photos = self.subject.batch(*span)[rows.to(self.subject.clf.device)]
            return self._craft(attack, number, photos, labels[rows])

        path = self._address(item, IMAGES, span)
        about = self._about(span, work="attack", attack=repr(attack), clean=clean.digest, store=self.recipe.store)
        if item.adaptive:
            path = self._address(item, chosen.label, span, IMAGES)
            about |= {"defense": chosen.defense.to_dict()}
        shard = self.store.read(path, about)
        crafted: Tensors | None = None
        if shard is None:
            crafted = craft()
            kept = {name: tensor for name, tensor in crafted.items() if name != IMAGES or self.recipe.store != "none"}
            kept |= {"index": rows + span[0], "label": labels[rows]}
            shard = self.store.write(path, about, kept, note=ROUNDING_NOTES[self.recipe.store])
        else:
            self.progress.skip(work * len(rows))
        kept = shard.tensors

        @cache
        def images() -> Tensor:
            # Images that are not stored are crafted again if a defence still needs them: same seed, same images.
            source = kept if "images" in kept else crafted or craft()
            return to_float(source["images"].to(self.subject.clf.device))

        source = ImageSource(images, len(rows), shard.digest)
        parts = {name: share for name, share in kept.items() if name.startswith(PART)}
        return AttackedImages(rows, source, kept["plain"], kept["found"], kept["queries"], parts)

    def _craft(self, attack: Attack, number: int, clean: Tensor, labels: Tensor) -> Tensors:
        """Adversarial images in their stored type, and the undefended predictions on them."""
        defense = self.recipe.defenses[number].defense
        if not len(clean):
            none = torch.zeros(0, dtype=torch.int64)
            return {
                **{PART + member.name: none.float() for member in attack.members_for(defense)},
                "images": rounded(clean, clean, attack.eps, self.recipe.store),
                "plain": none,
                "found": none.bool(),
                "queries": none,
            }
        work = crafting_cost(attack, defense, self.costs[number]).work * len(clean)
        reported = 0

        def tick(done: int, total: int) -> None:
            nonlocal reported
            reached = work * done // max(total, 1)
            self.progress.done(reached - reported)
            reported = reached

        with _explained_memory_error(self.recipe.batch):
            clf, y, seed = self.subject.attack_clf, labels.to(clean.device), self.recipe.seed
            result = attack(attack.target(clf, defense), clean, y, seed=seed, progress=tick)
        self.progress.done(work - reported)
        images = rounded(result.images, clean, attack.eps, self.recipe.store)
        plain = self._plain(to_float(images))
        counts = {"queries": result.queries.cpu(), "backward": result.backward.cpu()}
        parts = {PART + name: share.cpu() for name, share in result.parts.items()}
        return {"images": images, "plain": plain, "found": result.success.cpu(), **counts, **parts}

    def _clean_source(self, span: Span, clean: Shard) -> ImageSource:
        return ImageSource(lambda: self.subject.batch(*span), span[1] - span[0], clean.digest)

    def _defended(self, item: LabelledAttack, span: Span, choice: tuple[int, int], source: ImageSource) -> Tensors:
        """Defended answers on the images of a source."""
        number, draw = choice
        chosen, seed = self.recipe.defenses[number], self.recipe.seeds[draw]
        path = self._address(item, chosen.label, span, f"draw-{draw}")
        about = self._about(
            span, work="defence", defense=chosen.defense.to_dict(), defense_seed=seed, source=source.digest
        )
        planned = self.costs[number].work * source.count
        if (shard := self.store.read(path, about)) is not None:
            self.progress.skip(planned)
            return shard.tensors
        self.progress.stage(f"{item.title}, {chosen.label}" + (f", draw {draw + 1}" if self.recipe.draws > 1 else ""))
        if source.count:
            with _explained_memory_error(self.recipe.batch), cached_views(self.subject.clf.encoder, self._cache):
                answers = _answers(chosen.defense(self.subject.clf, source.pixels(), seed=seed))
        else:
            answers = _no_answers()
        spent = Passes(int(answers["passes"].sum()), int(answers["backward_passes"].sum())).work
        self.progress.skip(planned - spent)
        self.progress.done(spent)
        return self.store.write(path, about, answers).tensors

    # ------------------------------------------------------------------ helpers

    @torch.no_grad()
    def _plain(self, images: Tensor) -> Tensor:
        with _explained_memory_error(self.recipe.batch):
            logits: Tensor = self.subject.clf(images)
        self.progress.done(len(images))
        return logits.argmax(-1).cpu()

    def _address(self, item: LabelledAttack, kind: str, span: Span, *more: str) -> tuple[str, ...]:
        return (self.subject.name, item.title, kind, *more, f"{span[0]:06d}")

    def _about(self, span: Span, **details: Any) -> dict[str, Any]:
        """Description of everything a shard depends on."""
        protocol = {
            "set": self.subject.name,
            "span": list(span),
            "seed": self.recipe.seed,
            "scoring": self.recipe.scoring,
        }
        return {**protocol, **self._identity, **details}


@contextmanager
def _explained_memory_error(batch: int) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ReactClipError(
            f"the device has too little memory for a batch of {batch}; use a smaller --batch with another --out"
        ) from error


def _answers(defended: Defended) -> Tensors:
    values = {
        "prediction": defended.labels,
        "d_low": defended.drift_low,
        "d_high": defended.drift_high,
        "r": defended.drift,
        "J": defended.instability,
        "score": defended.score,
        "gated": defended.gated,
        "sigma": defended.sigma,
        "passes": defended.passes,
        "backward_passes": defended.backward_passes,
    }
    return {name: value.detach().cpu().to(_INTEGERS.get(name, torch.float32)) for name, value in values.items()}


def _no_answers() -> Tensors:
    kinds = {**_INTEGERS, **dict.fromkeys(_FLOATS, torch.float32)}
    return {name: torch.zeros(0, dtype=kind) for name, kind in kinds.items()}


def _concatenated(parts: list[Tensors]) -> Tensors:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
