"""The report of a run: one self-contained HTML page, and its figures as files beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from react_clip.calibration import Calibration
from react_clip.errors import ReactClipError
from react_clip.report import page_text as text
from react_clip.report.page_data import OUTCOMES, Rows
from react_clip.report.page_photos import embedded_photos
from react_clip.report.page_svg import inline_svg
from react_clip.report.run import Run, read_runs
from react_clip.storage import write_text

PAGE, FIGURES = "index.html", "figures"

Progress = Callable[[str, int, int], None]
"""Called with a figure's title, the figures done and the figures in all."""


@dataclass(frozen=True)
class Report:
    """What was written, and one line for each thing that could not be shown."""

    page: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]
    not_drawn: tuple[str, ...]
    """Figures that the run has no data for, and why."""


@dataclass(frozen=True)
class Drawing:
    """A figure that is on disk as PNG and SVG."""

    name: str
    title: str
    caption: str
    paper: str
    """Where the paper has it, or ``beyond the paper``."""


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
        folders: of ``react-clip evaluate``; unfinished or damaged ones give a page that says what is missing.
        out: the only folder that is written to.
        rows: per-image rows in the page, at most; whole images are kept, at least one. 0 leaves the browser out.
        photos: images whose pictures are in the page, at most.
        calibration: a file of ``react-clip calibrate``; by default one that lies in the folders.
        progress: called after every figure.
    """
    for name, value in (("rows", rows), ("photos", photos)):
        if value < 0:
            raise ReactClipError(f"{name} is {value}; it must be 0 or more")
    run = read_runs(folders)
    missing = list(run.missing)
    fitted = _calibration(run, calibration, missing)
    drawings, not_drawn = _draw(run, fitted, out / FIGURES, progress)
    browser = _browser(run, rows, photos, missing)
    absent = text.missing_lists(missing, not_drawn)
    write_text(out / PAGE, _page(run, drawings, fitted, browser, out / FIGURES, absent))
    written = (out / FIGURES / f"{drawing.name}.{kind}" for drawing in drawings for kind in ("svg", "png"))
    return Report(out / PAGE, tuple(written), tuple(missing), tuple(not_drawn))


def _page(
    run: Run,
    drawings: Sequence[Drawing],
    calibration: Calibration | None,
    browser: str,
    figures: Path,
    missing: str,
) -> str:
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    result = run.result
    return Template(_asset("page.html")).substitute(
        title=text.escaped(run.title),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        summary=text.summary(run),
        about=text.about(run),
        self_check=text.self_check(result) if result is not None else "<p>The run has not got to it.</p>",
        missing=missing,
        tables=text.tables(result) if result is not None else "<p>There is no result to tabulate.</p>",
        calibration=f'<section id="calibration"><h2>Calibration</h2>{text.calibration_table(calibration)}</section>'
        if calibration is not None
        else "",
        figures="\n".join(_figure(drawing, figures) for drawing in drawings) or "<p>No figure could be drawn.</p>",
        browser=browser,
    )


def _asset(name: str) -> str:
    return files("react_clip.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """What the page's policy calls a piece of script or style: nothing else may run or be fetched."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


# ---------------------------------------------------------------------- figures


def _draw(
    run: Run, calibration: Calibration | None, folder: Path, progress: Progress
) -> tuple[list[Drawing], list[str]]:
    """Draw what can be drawn, and say why the rest cannot."""
    try:
        from react_clip.report.figures import all_figures, why_not
        from react_clip.report.style import save_figure

        wanted = all_figures(run, calibration=calibration)
        reasons = list(why_not(run, calibration=calibration).values())
        drawn = []
        for done, item in enumerate(wanted, start=1):
            try:
                figure = item.make()
            except (ArithmeticError, LookupError, ReactClipError, ValueError) as error:
                # Half-written numbers fail in many ways; one figure less is better than no page.
                reasons.append(f"{item.title}: it cannot be drawn ({error})")
            else:
                save_figure(figure, folder / item.name)
                drawn.append(Drawing(item.name, item.title, item.caption, item.paper))
            progress(item.title, done, len(wanted))
        return drawn, reasons
    except ImportError as error:
        package = (error.name or "matplotlib").partition(".")[0]
        return [], [f"all of them: they need {package}, which is not installed; pip install 'react-clip[eval]'"]


def _figure(drawing: Drawing, folder: Path) -> str:
    from react_clip.report.style import COLUMN_WIDTH, INK, PAPER

    title, name = text.escaped(drawing.title), text.escaped(drawing.name)
    svg = inline_svg(
        (folder / f"{drawing.name}.svg").read_text(encoding="utf-8"),
        prefix=f"{drawing.name}-",
        label=f"{drawing.title}. {drawing.caption}",
        colours={INK: "currentColor", PAPER: "var(--card)"},
    )
    # A figure of many panels needs the width of the page.
    wide = ' class="wide"' if float(svg.partition('viewBox="')[2].split()[2]) > 1.3 * 72 * COLUMN_WIDTH else ""
    paper = f" In the paper: {text.escaped(drawing.paper)}." if "paper" not in drawing.paper else ""
    links = " ".join(
        f'<a href="{FIGURES}/{name}.{kind}" aria-label="{title} as {kind.upper()}">{kind.upper()}</a>'
        for kind in ("png", "svg")
    )
    return (
        f'<figure id="figure-{name}"{wide}>'
        f'<button type="button" class="drawing" aria-label="Enlarge: {title}">{svg}</button>'
        f"<figcaption><b>{title}.</b> {text.escaped(drawing.caption)}{paper} "
        f'<span class="links">{links}</span></figcaption></figure>'
    )


def _calibration(run: Run, given: Path | None, missing: list[str]) -> Calibration | None:
    """The calibration asked for, or one that lies in a folder of the run."""
    if given is not None:
        try:
            return Calibration.load(given)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ReactClipError(f"{given} is no complete calibration ({error}); run `react-clip calibrate`") from None
    for place in (place for folder in run.folders for place in sorted(folder.glob("*.json"))):
        try:
            if "calibration_version" in json.loads(place.read_text(encoding="utf-8")):
                return Calibration.load(place)
        except (ReactClipError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            if place.name == "calibration.json":
                missing.append(f"{place.name} cannot be read ({error}); run `react-clip calibrate` again")
    return None


# ---------------------------------------------------------------------- rows


def _browser(run: Run, limit: int, photos: int, missing: list[str]) -> str:
    """The table of per-image rows with its filters, or a line that says why there is none."""
    if limit == 0:
        return "<p>The rows were left out (<code>--rows 0</code>).</p>"
    if run.images is None or not len(run.images):
        return "<p>The run has no rows per image yet.</p>"
    rows = Rows(run, run.images, limit)
    pictures = embedded_photos(run.folders, rows, photos)
    if photos and not pictures:
        missing.append("photos were not kept in this folder; run the evaluation with `images: {store: float16}`")
    shown = f"{len(rows):,} of {rows.total:,} rows ({len(rows.images):,} of {rows.images_total:,} images)"
    if len(rows) < rows.total:
        shown += "; whole images, spread evenly over the data sets (<code>--rows</code> sets how many)"
    kept = f"{len(pictures)} images with pictures, marked \u25a3" if pictures else "photos were not kept in this folder"
    if not photos:
        kept = "pictures were left out (<code>--photos 0</code>)"
    legend = "".join(
        f"<div><dt>{text.escaped(name)}</dt><dd>{text.escaped(meaning)}</dd></div>"
        for name, meaning in OUTCOMES.items()
    )
    return Template(_asset("page_rows.html")).substitute(
        shown=shown, photos=kept, legend=legend, caption=text.rows_caption(run), data=rows.to_json(pictures)
    )
