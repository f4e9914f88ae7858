"""The demo's page: one self-contained HTML file with photos, magnified perturbations and CLIP's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from torch import Tensor

from react_clip.preprocess import data_uri, to_image
from react_clip.storage import write_text


@dataclass(frozen=True, eq=False)
class Outcome:
    """Answers of plain and defended CLIP for one photo at one attack strength."""

    eps: int
    """Attack strength in 255ths; 0 for the clean photo."""
    pixels: Tensor
    """``[3, S, S]`` in [0, 1]."""
    perturbation: Tensor
    """``[3, S, S]``: attacked minus clean pixels."""
    plain: str
    plain_probability: float
    defended: str
    defended_probability: float
    diagnostics: dict[str, Any]
    """drift, instability, score, sigma, gated and passes; None where a value was not measured."""

    @property
    def title(self) -> str:
        """``clean``, or the strength such as ``4/255``."""
        return f"{self.eps}/255" if self.eps else "clean"

    @property
    def picture(self) -> str:
        """The image as ``data:`` address."""
        return data_uri(to_image(self.pixels))

    @property
    def magnified(self) -> str:
        """The perturbation as ``data:`` address, scaled so that +-eps spans black to white."""
        return data_uri(to_image((self.perturbation * self.factor + 0.5).clamp(0, 1)))

    @property
    def factor(self) -> float:
        """Magnification of the perturbation."""
        return 255 / self.eps / 2


@dataclass(frozen=True, eq=False)
class PhotoResult:
    """One photo at all attack strengths, the clean one first."""

    name: str
    outcomes: list[Outcome]

    def unchanged(self, answer: str) -> bool:
        """True if an answer is plain CLIP's answer for the clean photo."""
        return answer == self.outcomes[0].plain

    def mark(self, answer: str) -> str:
        """A tick for an unchanged answer, a cross for any other."""
        return "\u2713" if self.unchanged(answer) else "\u2717"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the pixels."""
        names = ("eps", "plain", "plain_probability", "defended", "defended_probability")
        rows = [{name: getattr(row, name) for name in names} | row.diagnostics for row in self.outcomes]
        return {"photo": self.name, "outcomes": rows}


def write_page(path: Path, photos: Sequence[PhotoResult], *, model: str, guard: str, steps: int, classes: int) -> None:
    """Write the page; an old one stays until the new one is complete."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("react_clip.report").joinpath("demo_page.html").read_text("utf-8"))
    attacked = [(photo, row) for photo in photos for row in photo.outcomes if row.eps]
    html = template.render(
        photos=photos,
        model=model,
        guard=guard,
        steps=steps,
        classes=classes,
        attacked=len(attacked),
        strengths=len({row.eps for _, row in attacked}),
        kept_plain=sum(photo.unchanged(row.plain) for photo, row in attacked),
        kept_defended=sum(photo.unchanged(row.defended) for photo, row in attacked),
    )
    write_text(path, html)
