"""Draw the figures of the documents from the runs in ``benchmarks/results``.

python tools/draw_figures.py    # writes docs/figures/RUN/NAME.svg (or .png)
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from memory_docs import soak_figure
from performance_figures import look_figure, look_reports, performance_figures, read_reports

from react_clip.calibration import Calibration
from react_clip.report.figures import figures_of
from react_clip.report.run import read_runs
from react_clip.report.style import save_figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
WHITE = '<svg style="background: white" '
LARGEST_SVG = 300_000
"""Bytes; figures of many small panels are kept as PNG."""

WANTED: dict[str, tuple[list[str], list[str]]] = {
    "second-look": (["second-look"], ["accuracy-pgd-10"]),
    "rivals": (
        ["table1", "rivals", "finetuned-TeCoA", "finetuned-PMG-AFT", "finetuned-FARE", "finetuned-CLIP-FT"],
        ["accuracy", "accuracy-per-set", "cost"],
    ),
    "standard": (["standard"], ["cost-worst-of-17"]),
    "leakage": (
        ["leakage"],
        [
            *("leakage-counts-alpha", "leakage-counts-sigma", "leakage-reported-alpha", "leakage-reported-sigma"),
            *("leakage-corrected-alpha", "leakage-corrected-sigma", "leakage-published", "leakage-control"),
        ],
    ),
    "anchor-scale": (["anchor-scale"], ["anchor-scale"]),
    "table4": (["table4"], ["drift", "gate-scores", "gate-scores-per-set"]),
    "mappings": (["mappings"], ["mappings", "scales", "calibration"]),
    "mappings-pgd100": (["mappings-pgd100"], ["drift-per-set", "scales"]),
    "table1-extended": (
        ["table1-extended", "extended-TeCoA", "extended-PMG-AFT", "extended-FARE", "extended-CLIP-FT"],
        ["accuracy", "beyond"],
    ),
    "table3": (["table3"], ["sweep-tau"]),
    "sweep-views": (["sweep-views"], ["sweep-views"]),
    "sweep-alpha": (["sweep-alpha"], ["sweep-alpha"]),
}


def save(figure: Figure, place: Path) -> None:
    """Write a figure in one format: SVG, or PNG where the SVG would be large."""
    save_figure(figure, place)
    svg, png = place.with_suffix(".svg"), place.with_suffix(".png")
    # Documents are read on dark pages too, where black letters on nothing cannot be seen.
    svg.write_text(svg.read_text(encoding="utf-8").replace("<svg ", WHITE, 1), encoding="utf-8")
    (svg if svg.stat().st_size > LARGEST_SVG else png).unlink()
    print(place.relative_to(ROOT))


def main() -> int:
    """Draw everything; fails if a run has no data for a figure that a document shows."""
    calibration = Calibration.load(RESULTS / "calibration" / "clip-vit-b-16.json")
    for name, (runs, wanted) in WANTED.items():
        run = read_runs([RESULTS / part for part in runs])
        found = {figure.name: figure for figure in figures_of(run, calibration=calibration)[0]}
        if absent := [figure for figure in wanted if figure not in found]:
            print(f"{name} has no {absent[0]}; it has {', '.join(found)}", file=sys.stderr)
            return 1
        for figure in wanted:
            place = FIGURES / name / figure
            save(found[figure].make(), place)
    for figure_name, make in performance_figures(read_reports(RESULTS / "bench")).items():
        place = FIGURES / "performance" / figure_name
        save(make(), place)
    save(look_figure(look_reports(RESULTS / "bench")), FIGURES / "performance" / "second-look")
    save(soak_figure(RESULTS), FIGURES / "memory" / "soak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
