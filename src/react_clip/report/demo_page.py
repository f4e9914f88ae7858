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


@dataclass(frozen=True)
class Answer:
    """The answer of plain CLIP or of one defence for one image."""

    who: str
    """CLIP, ReACT or SecondLook."""
    key: str
    """The same for JSON: plain, react or second_look."""
    name: str
    probability: float
    diagnostics: dict[str, Any]
    """drift, instability, score, sigma, gated and passes (None where a value was not measured), for SecondLook also
    branch; empty for plain CLIP."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """All answers for one version of a photo: clean, with noise, or attacked."""

    eps: int
    """Attack strength in 255ths; 0 where nobody attacked."""
    noise: float
    """Standard deviation of the camera noise, for pixels in [0, 1]; 0 without."""
    pixels: Tensor
    """``[3, S, S]`` in [0, 1]."""
    change: Tensor
    """``[3, S, S]``: these pixels minus the clean ones."""
    answers: list[Answer]
    """Plain CLIP's first, then one of each defence."""

    @property
    def title(self) -> str:
        """``clean``, ``noise 0.05``, or the attack strength such as ``4/255``."""
        if self.eps:
            return f"{self.eps}/255"
        return f"noise {self.noise:g}" if self.noise else "clean"

    @property
    def picture(self) -> str:
        """The image as ``data:`` address."""
        return data_uri(to_image(self.pixels))

    @property
    def magnified(self) -> str:
        """The change as ``data:`` address: black to white spans +-eps, or +-3 deviations of the noise."""
        return data_uri(to_image((self.change * self.factor + 0.5).clamp(0, 1)))

    @property
    def factor(self) -> float:
        """Magnification of the change."""
        return 0.5 / (self.eps / 255 or 3 * self.noise)


@dataclass(frozen=True, eq=False)
class PhotoResult:
    """One photo in all its versions, the clean one first."""

    name: str
    outcomes: list[Outcome]

    def unchanged(self, answer: Answer) -> bool:
        """True if an answer is plain CLIP's answer for the clean photo."""
        return answer.name == self.outcomes[0].answers[0].name

    def mark(self, answer: Answer) -> str:
        """A tick for an unchanged answer, a cross for any other."""
        return "\u2713" if self.unchanged(answer) else "\u2717"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the pixels."""
        rows = []
        for row in self.outcomes:
            answers = {
                answer.key: {"name": answer.name, "probability": answer.probability, **answer.diagnostics}
                for answer in row.answers
            }
            rows.append({"eps": row.eps, "noise": row.noise, **answers})
        return {"photo": self.name, "outcomes": rows}


def write_page(
    path: Path, photos: Sequence[PhotoResult], *, model: str, defenses: Sequence[str], steps: int, classes: int
) -> None:
    """Write the page; an old one stays until the new one is complete. ``defenses`` describes each in one line."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("react_clip.report").joinpath("demo_page.html").read_text("utf-8"))
    attacked = [(photo, row) for photo in photos for row in photo.outcomes if row.eps]
    kept: dict[str, int] = {}
    for photo, row in attacked:
        for answer in row.answers:
            kept[answer.who] = kept.get(answer.who, 0) + photo.unchanged(answer)
    html = template.render(
        photos=photos,
        model=model,
        defenses=defenses,
        steps=steps,
        classes=classes,
        attacked=len(attacked),
        strengths=len({row.eps for _, row in attacked}),
        kept=kept,
        noisy=[(photo, row) for photo in photos for row in photo.outcomes if row.noise],
    )
    write_text(path, html)
