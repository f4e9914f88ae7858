"""Draw the figures of the documents from the runs in ``benchmarks/results``.

python tools/draw_figures.py    # writes docs/figures/RUN-NAME.svg
"""

from __future__ import annotations

from pathlib import Path

from react_clip.calibration import Calibration
from react_clip.evaluation.results import EvaluationResult, join
from react_clip.report.figures import KINDS, calibration_figure
from react_clip.report.style import save_figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
WANTED: dict[str, tuple[list[str], list[str]]] = {
    "table1": (["table1", "rivals", "finetuned"], ["accuracy", "sets"]),
    "extended": (["table1-extended", "extended"], ["accuracy"]),
    "table4": (["table4"], ["scores"]),
    "second-look": (["second-look"], ["accuracy"]),
    "standard": (["standard"], ["passes"]),
    "leakage": (["leakage"], ["leakage"]),
}
"""Name of the files: the runs, and the kinds of figure that documents show."""


def main() -> None:
    """Draw everything; a run without data for a figure is an error."""
    for name, (runs, kinds) in WANTED.items():
        result = join([EvaluationResult.load(RESULTS / run) for run in runs])
        for kind in kinds:
            save_figure(KINDS[kind][1](result), FIGURES / f"{name}-{kind}")
    calibration = Calibration.load(RESULTS / "calibration" / "clip-vit-b-16.json")
    save_figure(calibration_figure(calibration), FIGURES / "calibration")
    for path in FIGURES.glob("*.png"):
        path.unlink()  # documents show SVG


if __name__ == "__main__":
    main()
