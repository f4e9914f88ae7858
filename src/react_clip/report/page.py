"""Pages of one self-contained HTML file: a run's report, the ranking and the demo share one template."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from PIL.Image import Resampling
from torch import Tensor

from react_clip.evaluation.results import EvaluationResult, join
from react_clip.optional import require
from react_clip.preprocess import data_uri, to_image
from react_clip.report.tables import SCORINGS, Table, all_tables, conditions, over
from react_clip.storage import write_text

PAGE, FIGURES = "index.html", "figures"
SIDE = 160
"""Longest side of a small picture in a page, in pixels."""
MOST_IMAGES = 200
"""Most photos in the table of a page."""


@dataclass(frozen=True)
class Picture:
    """An image of a page."""

    address: str
    """``data:`` address."""
    words: str
    """What it shows, for people who cannot see it."""


def picture(pixels: Tensor, words: str, resampling: Resampling = Resampling.LANCZOS) -> Picture:
    """A small picture of pixels ``[3, S, S]`` in [0, 1]."""
    image = to_image(pixels)
    image.thumbnail((SIDE, SIDE), resampling)  # averaging would show a perturbation weaker than it is
    return Picture(data_uri(image, "webp"), words)


@dataclass(frozen=True)
class Shown:
    """An answer as a page shows it."""

    name: str
    right: bool | None
    """``None`` where nobody knows."""
    note: str = ""


@dataclass(frozen=True)
class Photo:
    """A row of a table of photos: its pictures and the answers for it."""

    title: str
    pictures: tuple[Picture, ...]
    answers: tuple[Shown, ...]


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption."""

    picture: Picture
    title: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    columns: Sequence[str] = ()
    """Titles of the answers of ``photos``."""
    photos: Sequence[Photo] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    folded: bool = False
    """Show the title alone until it is opened."""


def read_figure(svg: Path, title: str, caption: str) -> Figure:
    """A figure from the file of its drawing."""
    content = base64.b64encode(svg.read_bytes()).decode()
    return Figure(Picture(f"data:image/svg+xml;base64,{content}", f"{title}. {caption}"), title, caption)


def write_page(path: Path, title: str, lead: Sequence[str], sections: Sequence[Section]) -> None:
    """Write a page that loads nothing and sends nothing; an old one stays until the new one is complete."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("react_clip.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style, script = (files("react_clip.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    # The page's Content-Security-Policy allows this style and this script, and no other.
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    page = environment.get_template("page.html").render(
        title=title, lead=lead, sections=sections, style=style, script=script, allowed=allowed
    )
    write_text(path, page.encode("utf-8", "replace").decode())  # a path may hold bytes that are no text


# ---------------------------------------------------------------------- the report of a run


@dataclass(frozen=True)
class Report:
    """The files written, and one line for each thing that could not be shown."""

    page: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]


def write_report(folders: Sequence[str | Path], out: Path, *, progress: bool = False) -> Report:
    """Write the page and the figures of a finished run, or of several over the same photos.

    Args:
        folders: folders of ``react-clip evaluate``.
        out: the only folder that is written to.
        progress: show a progress bar.
    """
    require("matplotlib", "the report", extra="eval")
    from react_clip.report.figures import draw_all
    from react_clip.report.images import table_of_images

    result = join([EvaluationResult.load(Path(folder)) for folder in folders])
    drawn, missing = draw_all(result, out / FIGURES, progress)
    figures = [read_figure(out / FIGURES / f"{item.name}.svg", item.title, item.caption) for item in drawn]
    columns, rows = table_of_images(result, [Path(folder) for folder in folders])
    if not any(row.pictures for row in rows):
        missing.append("photos were not kept in this folder; run the evaluation with `images: {store: uint8}`")
    sections = [
        Section("Figures", figures=figures),
        Section("Tables", tables=all_tables(result)),
        Section(
            "Image by image",
            text=[f"{len(rows)} of {sum(info.images for info in result.sets):,} images, under the strongest attack."],
            columns=columns,
            photos=rows,
        ),
        Section("What the run was", facts=_facts(result, folders), text=result.notes),
        Section("The recipe in full", code=json.dumps(result.recipe, indent=2, default=str), folded=True),
        Section("What is missing", text=missing or ["Nothing: every figure could be drawn."]),
    ]
    lead = [f"{result.model}, {over(result)}.", conditions(result), *_warnings(result)]
    write_page(out / PAGE, result.title, lead, sections)
    written = (out / FIGURES / f"{item.name}.{kind}" for item in drawn for kind in ("svg", "png"))
    return Report(out / PAGE, tuple(written), tuple(missing))


def _warnings(result: EvaluationResult) -> list[str]:
    """What a reader must know before the numbers."""
    return [] if result.self_check.enabled else ["The self-check (a weak attack must break plain CLIP) was off."]


def _facts(result: EvaluationResult, folders: Sequence[str | Path]) -> dict[str, str]:
    facts = {
        "model": result.model,
        "precision": f"{result.dtype} (attacks crafted in {result.attack_dtype})",
        "device": result.device,
        "threat model": f"{result.threat}: {result.threat_meaning}",
        "scoring": f"{result.scoring}: {SCORINGS.get(result.scoring, 'not known to this version')}",
        "draws of the noise": str(result.draws),
        "seeds": ", ".join(map(str, result.seeds)),
        "paper": result.paper,
        "created": result.created,
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "git commit": result.commit,
        "command": result.command or "called from Python",
        "recipe's SHA-256": result.recipe_hash,
        "folders": ", ".join(map(str, folders)),
    }
    for info in result.sets:
        about = f"{info.images:,} images, {info.classes:,} classes ({info.class_source}), SHA-256 {info.fingerprint}"
        facts[info.name] = "; ".join([about, *info.notes])
    return {name: text for name, text in facts.items() if text}
