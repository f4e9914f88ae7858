"""The demo's page: one self-contained HTML file with photos, magnified perturbations and what CLIP made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from torch import Tensor

from react_clip.preprocess import data_uri, to_image
from react_clip.storage import write_text


@dataclass(frozen=True, eq=False)
class Scene:
    """One photo at one attack strength: what plain and defended CLIP say, and why."""

    eps: int
    """Attack strength in 255ths; 0 is the clean photo."""
    pixels: Tensor
    plain: str
    plain_probability: float
    defended: str
    defended_probability: float
    drift: float
    instability: float
    score: float
    sigma: float
    gated: bool
    passes: int

    @property
    def title(self) -> str:
        """``clean`` or the budget."""
        return f"{self.eps}/255" if self.eps else "clean"


@dataclass(frozen=True, eq=False)
class PhotoStory:
    """One photo through all strengths, the clean one first."""

    name: str
    pixels: Tensor
    scenes: Sequence[Scene]

    def same(self, answer: str) -> bool:
        """Whether an answer is CLIP's answer for the clean photo."""
        return answer == self.scenes[0].plain

    def mark(self, answer: str) -> str:
        """A tick for the clean answer, a cross for any other."""
        return "\u2713" if self.same(answer) else "\u2717"


def write_page(path: Path, stories: Sequence[PhotoStory], *, model: str, guard: str, steps: int, classes: int) -> None:
    """Write the page, whole or not at all."""
    template = Template(files("react_clip.report").joinpath("demo_page.html").read_text(encoding="utf-8"))
    kept_plain, kept_defended, attacked = _tally(stories)
    write_text(
        path,
        template.substitute(
            model=escape(model),
            guard=escape(guard),
            steps=steps,
            classes=classes,
            attacked=attacked,
            kept_plain=kept_plain,
            kept_defended=kept_defended,
            stories="\n".join(_story(story) for story in stories),
        ),
    )


def _tally(stories: Sequence[PhotoStory]) -> tuple[int, int, int]:
    """How many attacked photos keep the clean answer, without and with the defence, of how many."""
    pairs = [(story, scene) for story in stories for scene in story.scenes if scene.eps]
    plain = sum(story.same(scene.plain) for story, scene in pairs)
    return plain, sum(story.same(scene.defended) for story, scene in pairs), len(pairs)


def _story(story: PhotoStory) -> str:
    cards = "\n".join(_card(story, scene) for scene in story.scenes)
    return f'<section><h2>{escape(story.name)}</h2><div class="strip">{cards}</div></section>'


def _card(story: PhotoStory, scene: Scene) -> str:
    title = "clean photo" if not scene.eps else f"attacked, eps {scene.title}"
    pictures = _picture(scene.pixels, f"{story.name}, {title}")
    if scene.eps:
        magnified = ((scene.pixels - story.pixels) * 255 / scene.eps / 2 + 0.5).clamp(0, 1)
        pictures += _picture(magnified, f"the perturbation, magnified {255 / scene.eps / 2:.0f} times")
    instability = "\u2013" if math.isnan(scene.instability) else f"{scene.instability:.3f}"
    values = {
        "r": f"{scene.drift:.3f}",
        "J": instability,
        "score": f"{scene.score:.3f}",
        "\u03c3": f"{scene.sigma:.3f}",
        "gate": "open" if scene.gated else "closed",
        "passes": str(scene.passes),
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values.items())
    return (
        f'<article><h3>{title}</h3><div class="pictures">{pictures}</div>'
        f"{_answer('CLIP', story, scene.plain, scene.plain_probability)}"
        f"{_answer('defended', story, scene.defended, scene.defended_probability)}"
        f"<dl>{rows}</dl></article>"
    )


def _answer(who: str, story: PhotoStory, answer: str, probability: float) -> str:
    kind = "kept" if story.same(answer) else "changed"
    return (
        f'<p class="answer {kind}"><span class="who">{who}</span> <b>{story.mark(answer)} {escape(answer)}</b> '
        f"<span>{probability:.0%}</span></p>"
    )


def _picture(pixels: Tensor, description: str) -> str:
    return f'<img alt="{escape(description)}" width="224" height="224" src="{data_uri(to_image(pixels))}">'
