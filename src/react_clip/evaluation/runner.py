"""The work on one set, cut into shards: clean answers, adversarial images, defended answers.

Each shard covers ``batch`` images and depends only on them, so that a run may stop anywhere and go on later. A result
names the digest of what it was computed from; when that is computed again and comes out differently, so is the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from react_clip.defenses import Defended
from react_clip.errors import ReactClipError
from react_clip.evaluation.cost import Passes, attack_cost
from react_clip.evaluation.images import ROUNDING_NOTES, rounded, to_float
from react_clip.evaluation.progress import Progress
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, LabelledDefense, Recipe
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import Shard, ShardStore, Tensors

ANSWERS = ("prediction", "r", "J", "score", "gated", "sigma", "passes", "backward_passes")
"""What is kept of a defended image."""


@dataclass(frozen=True)
class Block:
    """Per-image outcomes of one set under one attack, one defence and one draw of its noise."""

    dataset: str
    attack: LabelledAttack
    defense: str
    draw: int
    seed: int
    columns: Tensors
    """``index, label, attacked, attack_success, found, queries, clean_prediction, plain_prediction`` and the answers."""


@dataclass(frozen=True, eq=False)
class Attacked:
    """One shard's images as the defences see them."""

    images: Tensor
    rows: Tensor
    """Which of the shard's images were attacked."""
    plain: Tensor
    """Undefended answers on ``images``."""
    found: Tensor
    """Whether the attack had succeeded before its image was rounded for the store."""
    queries: Tensor
    digest: str


@dataclass(frozen=True, eq=False)
class SetRunner:
    """Computes, or reads back, everything a recipe asks about one set."""

    recipe: Recipe
    subject: EvaluationSet
    store: ShardStore
    costs: list[Passes]
    """Planned passes per image of the recipe's defences."""
    progress: Progress

    def run(self) -> list[Block]:
        """All outcomes; finished shards are not computed again."""
        collected: dict[tuple[str, str, int], list[Tensors]] = {}
        for item in self.recipe.all_attacks:
            for span in self._spans():
                for defense, draw, columns in self._shard(item, span):
                    collected.setdefault((item.title, defense.label, draw), []).append(columns)
        return [
            Block(
                dataset=self.subject.name,
                attack=item,
                defense=defense.label,
                draw=draw,
                seed=seed,
                columns=_concatenated(collected[item.title, defense.label, draw]),
            )
            for item in self.recipe.all_attacks
            for defense in self.recipe.defenses
            for draw, seed in enumerate(self.recipe.seeds)
        ]

    def _spans(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.subject), self.recipe.batch):
            yield start, min(start + self.recipe.batch, len(self.subject))

    def _shard(self, item: LabelledAttack, span: tuple[int, int]) -> Iterator[tuple[LabelledDefense, int, Tensors]]:
        """One shard of images under one attack, through every defence and draw."""
        clean = self._clean(span)
        attacked = self._attacked(item, span, clean)
        hit = torch.zeros(span[1] - span[0], dtype=torch.bool).index_fill_(0, attacked.rows, True)
        labels = self.subject.labels[slice(*span)]
        common = {
            "index": torch.arange(*span),
            "label": labels,
            "attacked": hit,
            "attack_success": hit & (attacked.plain != labels),
            "found": attacked.found,
            "queries": attacked.queries,
            "clean_prediction": clean.tensors["prediction"],
            "plain_prediction": attacked.plain,
        }
        for number, defense in enumerate(self.recipe.defenses):
            for draw in range(self.recipe.draws):
                yield defense, draw, {**common, **self._defended(item, span, attacked, number, draw)}

    # ------------------------------------------------------------------ the three kinds of work

    def _clean(self, span: tuple[int, int]) -> Shard:
        """Undefended answers on clean images: they decide what is attacked."""
        path, about = self._address(CLEAN.label, "plain", span), self._about(span, work="clean answers")
        if (shard := self.store.read(path, about)) is None:
            self.progress.stage("clean, plain answers")
            shard = self.store.write(path, about, {"prediction": self._plain(self.subject.batch(*span))})
        return shard

    def _attacked(self, item: LabelledAttack, span: tuple[int, int], clean: Shard) -> Attacked:
        """The shard's images with those replaced that the protocol attacks."""
        pixels = self.subject.batch(*span)
        labels, prediction = self.subject.labels[slice(*span)], clean.tensors["prediction"]
        everything = self.recipe.scoring == "attack_all"
        rows = (torch.ones_like(labels, dtype=torch.bool) if everything else prediction == labels).nonzero().flatten()
        nothing = torch.zeros(len(labels), dtype=torch.bool)
        if item.attack is None:
            return Attacked(pixels, rows[:0], prediction, nothing, nothing.long(), clean.digest)

        planned = (attack_cost(item.attack) + Passes(1)).work * len(rows)
        self.progress.skip((attack_cost(item.attack) + Passes(1)).work * (len(labels) - len(rows)))
        path = self._address(item.title, "images", span)
        about = self._about(span, work="attack", attack=repr(item.attack), clean=clean.digest, store=self.recipe.store)
        shard = self.store.read(path, about)
        if shard is None or "images" not in shard.tensors:
            # Without stored images the attack runs again where a defence still needs them: same seed, same images.
            self.progress.stage(item.title)
            crafted = self._craft(item, pixels[rows.to(pixels.device)], labels[rows])
            images = to_float(crafted["images"].to(pixels.device))
            crafted["plain"] = self._plain(images)
            kept = crafted if self.recipe.store != "none" else {k: v for k, v in crafted.items() if k != "images"}
            identity = {"index": rows + span[0], "label": labels[rows]}
            shard = self.store.write(path, about, {**kept, **identity}, note=ROUNDING_NOTES[self.recipe.store])
        else:
            images = to_float(shard.tensors["images"].to(pixels.device))
            self.progress.skip(planned)
        return Attacked(
            images=pixels.index_copy(0, rows.to(pixels.device), images),
            rows=rows,
            plain=prediction.index_copy(0, rows, shard.tensors["plain"]),
            found=nothing.index_copy(0, rows, shard.tensors["found"]),
            queries=nothing.long().index_copy(0, rows, shard.tensors["queries"]),
            digest=shard.digest,
        )

    def _craft(self, item: LabelledAttack, clean: Tensor, labels: Tensor) -> Tensors:
        """Adversarial images as they are stored; the attack does not know the defence."""
        assert item.attack is not None
        if not len(clean):
            empty = torch.zeros(0, dtype=torch.long)
            return {"images": rounded(clean, clean, item.eps, self.recipe.store), "found": empty.bool(), "queries": empty}
        work = attack_cost(item.attack).work * len(clean)
        reported = 0

        def tick(done: int, total: int) -> None:
            nonlocal reported
            reached = work * done // max(total, 1)
            self.progress.done(reached - reported)
            reported = reached

        with _memory_advice(self.recipe.batch):
            result = item.attack(
                self.subject.attack_clf, clean, labels.to(clean.device), seed=self.recipe.seed, progress=tick
            )
        self.progress.done(work - reported)
        images = rounded(result.images, clean, item.eps, self.recipe.store)
        return {"images": images, "found": result.success.cpu(), "queries": result.queries.cpu()}

    def _defended(
        self, item: LabelledAttack, span: tuple[int, int], attacked: Attacked, number: int, draw: int
    ) -> Tensors:
        """Defended answers of all images of the shard.

        What was not attacked passes through unperturbed: its answer is the one it got among the clean images.
        """
        if item.attack is None:
            return self._defended_rows(item, span, attacked.images, attacked.digest, number, draw)
        rows = attacked.rows
        self.progress.skip(self.costs[number].work * (len(attacked.images) - len(rows)))
        part = attacked.images[rows.to(attacked.images.device)]
        answers = self._defended_rows(item, span, part, attacked.digest, number, draw)
        if len(rows) == len(attacked.images):
            return answers
        clean = self._attacked(CLEAN, span, self._clean(span))
        rest = self._defended_rows(CLEAN, span, clean.images, clean.digest, number, draw)
        return {name: rest[name].index_copy(0, rows, answers[name]) for name in ANSWERS}

    def _defended_rows(
        self, item: LabelledAttack, span: tuple[int, int], images: Tensor, source: str, number: int, draw: int
    ) -> Tensors:
        chosen, seed = self.recipe.defenses[number], self.recipe.seeds[draw]
        path = self._address(item.title, chosen.label, span, f"draw-{draw}")
        about = self._about(span, work="defence", defense=chosen.defense.to_dict(), seed=seed, source=source)
        planned = self.costs[number].work * len(images)
        if (shard := self.store.read(path, about)) is not None:
            self.progress.skip(planned)
            return shard.tensors
        self.progress.stage(f"{item.title}, {chosen.label}" + (f", draw {draw + 1}" if self.recipe.draws > 1 else ""))
        if len(images):
            with _memory_advice(self.recipe.batch):
                answers = _answers(chosen.defense(self.subject.clf, images, seed=seed))
        else:
            answers = _no_answers()
        spent = Passes(int(answers["passes"].sum()), int(answers["backward_passes"].sum())).work
        self.progress.skip(planned - spent)
        self.progress.done(spent)
        return self.store.write(path, about, answers).tensors

    # ------------------------------------------------------------------ helpers

    @torch.no_grad()
    def _plain(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.zeros(0, dtype=torch.long)
        with _memory_advice(self.recipe.batch):
            answers = self.subject.clf(images).argmax(-1).cpu()
        self.progress.done(len(images))
        return answers

    def _address(self, attack: str, kind: str, span: tuple[int, int], *more: str) -> tuple[str, ...]:
        return (self.subject.name, attack, kind, *more, f"{span[0]:06d}")

    def _about(self, span: tuple[int, int], **details: Any) -> dict[str, Any]:
        shared = {"set": self.subject.name, "images": list(span), "seed": self.recipe.seed, "scoring": self.recipe.scoring}
        return {**shared, **self._identity, **details}

    @property
    def _identity(self) -> dict[str, str]:
        # Hashing the weights takes a moment; the cache lives as long as the set does.
        cached = self.__dict__.get("_identity_cache")
        if cached is None:
            cached = self.subject.identity()
            object.__setattr__(self, "_identity_cache", cached)
        return dict(cached)


class _memory_advice:  # noqa: N801 (used like a function)
    """Turns CUDA's out-of-memory error into one line."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise ReactClipError(
                f"the device has too little memory for a batch of {self.batch}; use a smaller --batch with another --out"
            ) from error


def _answers(defended: Defended) -> Tensors:
    floats = {"r": defended.drift, "J": defended.instability, "score": defended.score, "sigma": defended.sigma}
    counts = {"passes": defended.passes, "backward_passes": defended.backward_passes}
    return {
        "prediction": defended.labels.detach().cpu(),
        "gated": defended.gated.detach().cpu(),
        **{name: value.detach().float().cpu() for name, value in floats.items()},
        **{name: value.detach().int().cpu() for name, value in counts.items()},
    }


def _no_answers() -> Tensors:
    kinds = {"prediction": torch.long, "gated": torch.bool, "passes": torch.int, "backward_passes": torch.int}
    return {name: torch.zeros(0, dtype=kinds.get(name, torch.float)) for name in ANSWERS}


def _concatenated(parts: list[Tensors]) -> Tensors:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
