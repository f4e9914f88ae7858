"""Write the report of a run: one self-contained HTML page, and its figures as files beside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.calibration import Calibration
from react_clip.errors import ReactClipError
from react_clip.report import page_data
from react_clip.report.run import SCORINGS, Run, check_is_run, conditions, read_runs
from react_clip.report.tables import all_tables, calibration_table, over
from react_clip.storage import write_text

if TYPE_CHECKING:
    from react_clip.report.figures import FigureOf

PAGE, FIGURES = "index.html", "figures"

Progress = Callable[[str, int, int], None]
"""Called with a figure's title, the number of figures done and the number of all figures."""


@dataclass(frozen=True)
class Report:
    """The files written, and one line for each thing that could not be shown."""

    page: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]
    not_drawn: tuple[str, ...]
    """Figures that the run has no data for, and why."""


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    *,
    rows: int = 20_000,
    photos: int = 40,
    calibration: Path | None = None,
    progress: Progress = lambda title, done, total: None,
) -> Report:
    """Write the page and the figures of a run, or of several over the same photos.

    Args:
        folders: folders of ``react-clip evaluate``; for unfinished or damaged ones the page says what is missing.
        out: the only folder that is written to.
        rows: most per-image rows in the page; whole images are kept, at least one. 0 leaves the table of images out.
        photos: most images whose pictures are in the page.
        calibration: a file of ``react-clip calibrate``; by default one that lies in the folders.
        progress: called after every figure.
    """
    for name, value in (("rows", rows), ("photos", photos)):
        if value < 0:
            raise ReactClipError(f"{name} is {value}; it must be 0 or more")
    run = read_runs(folders)
    missing = list(run.missing)
    fitted = _calibration(run, calibration, missing)
    if fitted is None:
        check_is_run(run.folders[0])
    drawn, not_drawn = _draw(run, fitted, out / FIGURES, progress)
    result = run.result
    page = render(
        "page.html",
        run=run,
        result=result,
        summary=page_data.summary(run),
        conditions=conditions(result) if result is not None else "",
        over=over(result) if result is not None else "",
        scorings=SCORINGS,
        versions=", ".join(f"{name} {version}" for name, version in result.versions.items()) if result else "",
        calibration=calibration_table(fitted) if fitted is not None else None,
        figures=[_inlined(figure, out / FIGURES) for figure in drawn],
        tables=all_tables(result) if result is not None else [],
        rows=page_data.browser(run, rows, photos, missing),
        outcomes=page_data.OUTCOMES,
        recipe=json.dumps(run.recipe, indent=2, ensure_ascii=False, default=str),
        missing=missing,
        not_drawn=not_drawn,
    )
    write_text(out / PAGE, page)
    written = (out / FIGURES / f"{figure.name}.{kind}" for figure in drawn for kind in ("svg", "png"))
    return Report(out / PAGE, tuple(written), tuple(missing), tuple(not_drawn))


def render(template: str, **values: Any) -> str:
    """A page of this package with its style and script inlined."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("react_clip.report", ""), autoescape=True)
    environment.filters |= {"hash": _hash, "number": lambda value: "" if math.isnan(value) else f"{value:.6g}"}
    style, script = (files("react_clip.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    page = environment.get_template(template).render(style=style, script=script, **values)
    # A path may hold bytes that are no text.
    return page.encode("utf-8", "replace").decode()


def _hash(content: str) -> str:
    """The hash by which the page's Content-Security-Policy allows one script or style, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _calibration(run: Run, given: Path | None, missing: list[str]) -> Calibration | None:
    """The calibration asked for, or one that lies in a folder of the run."""
    if given is not None:
        try:
            return Calibration.load(given)
        except ReactClipError as error:
            raise ReactClipError(f"{given} is no complete calibration ({error}); run `react-clip calibrate`") from None
    for path in (path for folder in run.folders for path in sorted(folder.glob("*.json"))):
        try:
            return Calibration.load(path)
        except ReactClipError as error:
            if path.name == "calibration.json":
                missing.append(f"{path.name} cannot be read ({error}); run `react-clip calibrate` again")
    return None


# ---------------------------------------------------------------------- figures


def _draw(
    run: Run, calibration: Calibration | None, folder: Path, progress: Progress
) -> tuple[list[FigureOf], list[str]]:
    """Draw the figures into a folder; returns those drawn, and why the others were not."""
    try:
        from react_clip.report import figures
        from react_clip.report.style import save_figure

        wanted, reasons = figures.figures_of(run, calibration=calibration)
        not_drawn, drawn = list(reasons.values()), []
        for done, item in enumerate(wanted, start=1):
            try:
                figure = item.make()
            except (ArithmeticError, LookupError, ReactClipError, ValueError) as error:
                # Damaged numbers fail in many ways; the page is written without this figure.
                not_drawn.append(f"{item.title}: it cannot be drawn ({error})")
            else:
                save_figure(figure, folder / item.name)
                drawn.append(item)
            progress(item.title, done, len(wanted))
        return drawn, not_drawn
    except ImportError as error:
        package = (error.name or "matplotlib").partition(".")[0]
        return [], [f"all of them: they need {package}, which is not installed; pip install 'react-clip[eval]'"]


def _inlined(figure: FigureOf, folder: Path) -> dict[str, Any]:
    """A figure for the template: its texts and its SVG element."""
    from react_clip.report.style import INK, PAPER

    svg = inline_svg(
        (folder / f"{figure.name}.svg").read_text(encoding="utf-8"),
        prefix=f"{figure.name}-",
        label=f"{figure.title}. {figure.caption}",
        colours={INK: "currentColor", PAPER: "var(--card)"},
    )
    return {**vars(figure), "svg": svg}


def inline_svg(text: str, *, prefix: str, label: str, colours: Mapping[str, str]) -> str:
    """The ``<svg>`` element of a matplotlib file for a page: colours of the theme, and no style, which the CSP forbids.

    Text is drawn as paths (see :func:`react_clip.report.style.save_figure`).

    Args:
        text: the file's content.
        prefix: put before every id; matplotlib uses the same ids in every figure.
        label: text for screen readers.
        colours: replacements such as ``currentColor``, by colour of the file.
    """
    svg = text[text.index("<svg") :].replace("xlink:href", "href")
    svg = re.sub(r"<(metadata|style|title)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'style="([^"]*)"', lambda style: re.sub(r"([\w-]+): ([^;]+);?", r'\1="\2"', style[1]), svg)
    svg = re.sub(r'\b(id="|href="#|url\(#)', lambda start: start[1] + prefix, svg)
    # Hundredths of a point are finer than any screen.
    svg = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", " ".join(path[0].split())), svg)
    for colour, replacement in colours.items():
        svg = re.sub(f'"{colour}"', f'"{replacement}"', svg, flags=re.IGNORECASE)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    # Fill and stroke are defaults that matplotlib sets in the file's style sheet.
    opening = f'<svg {box[0]} fill="currentColor" stroke-linejoin="round" stroke-linecap="butt" role="img"'
    opening += f' aria-label="{html.escape(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, re.sub(r">\s+<", "><", svg), count=1)
