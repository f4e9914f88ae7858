"""The demo's page: photos, magnified perturbations, and the answers of CLIP and of the defences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from react_clip.preprocess import data_uri, to_image
from react_clip.report.page import Photo, Picture, Section, Shown, write_page

LIMITS = (
    "These attacks do not know the defences. An attacker who does can defeat them.",
    "Diagnostics stand under the names that each defence gives them; passes are encoder passes spent on the image.",
)


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
    """What the defence measured, ``None`` where it did not, with gated and passes; empty for plain CLIP."""

    @property
    def note(self) -> str:
        """Probability and diagnostics in words."""
        shown = {name: value for name, value in self.diagnostics.items() if value is not None}
        words = (f"{name} {value:{'.3g' if isinstance(value, float) else ''}}" for name, value in shown.items())
        return ", ".join([f"{self.probability:.0%}", *words])


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
    def pictures(self) -> tuple[Picture, ...]:
        """The image, and its change: black to white spans +-eps, or +-3 deviations of the noise."""
        image = Picture(data_uri(to_image(self.pixels)), self.title)
        if not (reach := self.eps / 255 or 3 * self.noise):
            return (image,)
        change = to_image((self.change * 0.5 / reach + 0.5).clamp(0, 1))
        return image, Picture(data_uri(change), f"the change, magnified {0.5 / reach:.0f} times")


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
            answers = {a.key: {"name": a.name, "probability": a.probability, **a.diagnostics} for a in row.answers}
            rows.append({"eps": row.eps, "noise": row.noise, **answers})
        return {"photo": self.name, "outcomes": rows}


def write_demo(
    path: Path, photos: Sequence[PhotoResult], *, model: str, defenses: Sequence[str], steps: int, classes: int
) -> None:
    """Write the page; ``defenses`` describes each in one line."""
    attacked = [(photo, row) for photo in photos for row in photo.outcomes if row.eps]
    kept = Counter(answer.who for photo, row in attacked for answer in row.answers if photo.unchanged(answer))
    counts = ", ".join(f"{answer.who} {kept[answer.who]}" for answer in photos[0].outcomes[0].answers)
    lead = [
        f"Answers that stay CLIP's for the clean photo, of {len(attacked)} attacked ones (PGD-{steps}): {counts}.",
        *LIMITS,
        f"Model {model}, {classes} classes.",
        *defenses,
    ]
    sections = []
    for photo in photos:
        rows = [
            Photo(row.title, row.pictures, tuple(Shown(a.name, photo.unchanged(a), a.note) for a in row.answers))
            for row in photo.outcomes
        ]
        columns = [answer.who for answer in photo.outcomes[0].answers]
        sections.append(Section(photo.name, columns=columns, photos=rows))
    write_page(path, "Plain and defended CLIP under attack", lead, sections)
