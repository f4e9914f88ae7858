"""``react-clip demo``: attack some photos and see plain and defended CLIP side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.cli import common
from react_clip.cli.progress import Progress
from react_clip.environment import has_fast_bf16

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip import ReACT, ZeroShotClassifier
    from react_clip.report.demo_page import Outcome, PhotoResult

EXAMPLE = "react-clip demo my.jpg --labels 'cat, dog, teapot'"
BUDGETS, ALL_BUDGETS = (4, 8), (1, 4, 8, 16)
"""Attack strengths in 255ths: by default and with --full."""
_PHOTOS = 2
"""Bundled photos by default; --full takes all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    common.add_photo_argument(parser, nargs="*", note=f" ({_PHOTOS} bundled ones by default)")
    parser.add_argument("--full", action="store_true", help="all bundled photos, and four attack strengths, not two")
    parser.add_argument("--out", type=Path, default=Path("react-clip-demo"), help="folder for the page (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    common.add_model_options(parser)
    parser.set_defaults(dtype=None)  # bf16 where the CPU is fast at it, else fp32
    common.add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Attack the photos one by one, print each outcome when it is known, and write the page."""
    files = common.expand_inputs(args.photos_in or common.bundled_photos())
    if not args.photos_in and not args.full:
        files = files[:_PHOTOS]
    budgets = ALL_BUDGETS if args.full else BUDGETS
    results: list[PhotoResult] = []
    with Progress(quiet=args.quiet, unit="attack step", total=len(files) * len(budgets) * args.steps) as progress:
        # The first line comes before the imports, which take seconds.
        progress.show("loading the model")
        from react_clip import encoders
        from react_clip.encoders.base import resolve_device
        from react_clip.report.demo_page import PhotoResult, write_page

        if args.dtype is None:
            on_cpu = resolve_device(args.device).type == "cpu"
            args.dtype = "bf16" if on_cpu and has_fast_bf16() else "fp32"
        if args.model == common.DEFAULT_MODEL:
            encoders.pull(args.model, say=progress.show)
        encoder = common.load_encoder(args)
        clf, guard = common.build_classifier(args, encoder), common.build_guard(args, encoder)
        demo = _Demo(clf, guard, args, progress)
        write = (lambda text: None) if args.json else progress.write
        for number, path in enumerate(files):
            # The first photo's budgets are attacked one by one, so that the first outcome comes soon; one batch of all
            # budgets takes less time in total.
            groups = [budgets] if number else [[budget] for budget in budgets]
            result = PhotoResult(path.name, [])
            write(_heading(result))
            for outcome in demo.outcomes(path, groups):
                result.outcomes.append(outcome)
                write(_row(result, outcome))
            results.append(result)
    page = args.out / "index.html"
    write_page(
        page,
        results,
        model=f"{encoder.name} in {args.dtype}",
        guard=f"ReACT with tau = {guard.tau:g}, sigma = {guard.mapping}, alpha = {guard.alpha:g}, M = {guard.views}",
        steps=args.steps,
        classes=len(clf.names),
    )
    closing = [
        "\nThese attacks do not know the defence; an attacker who does can defeat it.",
        f"Page with the photos and perturbations: {page.resolve()}",
    ]
    common.print_result(args, {"page": str(page), "photos": [result.to_dict() for result in results]}, closing)
    return 0


@dataclass(frozen=True)
class _Demo:
    """Attacks photos and asks plain and defended CLIP."""

    clf: ZeroShotClassifier
    guard: ReACT
    args: argparse.Namespace
    progress: Progress

    def outcomes(self, path: Path, groups: Sequence[Sequence[int]]) -> Iterator[Outcome]:
        """Outcomes of the clean photo and of each budget in turn; the budgets of a group are attacked in one batch."""
        from react_clip.preprocess import to_pixels

        self.progress.show(f"defending {path.name}")
        clean = to_pixels(path, self.clf.encoder.image_size).to(self.clf.device)[None]
        [outcome] = self._answers(clean, clean, [0])
        yield outcome
        for budgets in groups:
            self.progress.show(f"attacking {path.name}")
            attacked = self._attack(clean, outcome.plain, budgets)
            self.progress.show(f"defending {path.name}")
            yield from self._answers(clean, attacked, budgets)

    def _attack(self, clean: Tensor, answer: str, budgets: Sequence[int]) -> Tensor:
        """Images ``[len(budgets), 3, S, S]`` that PGD moved away from CLIP's answer for the clean photo."""
        import torch

        from react_clip.attacks import PGD

        count, device = len(budgets), self.clf.device
        result = PGD(steps=self.args.steps)(
            self.clf,
            clean.expand(count, -1, -1, -1),
            torch.full((count,), self.clf.names.index(answer), device=device),
            seed=self.args.seed,
            eps=torch.tensor(budgets, device=device) / 255,
            progress=lambda done, total: self.progress.advance(count),
        )
        return result.images

    def _answers(self, clean: Tensor, images: Tensor, budgets: Sequence[int]) -> list[Outcome]:
        """Plain and defended answers for versions ``[B, 3, S, S]`` of the photo ``clean`` ``[1, 3, S, S]``."""
        from react_clip.defenses import Undefended
        from react_clip.report.demo_page import Outcome

        plain, defended = Undefended()(self.clf, images), self.guard(self.clf, images, seed=self.args.seed)
        pixels, perturbations = images.cpu(), (images - clean).cpu()
        return [
            Outcome(
                eps=eps,
                pixels=pixels[row],
                perturbation=perturbations[row],
                plain=plain.names[row],
                plain_probability=float(plain.probs[row].max()),
                defended=defended.names[row],
                defended_probability=float(defended.probs[row].max()),
                diagnostics=common.diagnostics(defended, row),
            )
            for row, eps in enumerate(budgets)
        ]


def _heading(result: PhotoResult) -> str:
    numbers = f"{'r':>6}{'J':>6}{'score':>7}{'sigma':>7}{'passes':>7}"
    return f"\n{result.name}\n  {'attack':<8}{'CLIP says':<30}{'defended CLIP says':<30}{numbers}"


def _row(result: PhotoResult, outcome: Outcome) -> str:
    """A line of the terminal's table; a tick marks answers that equal CLIP's answer for the clean photo."""
    plain = f"{result.mark(outcome.plain)} {outcome.plain[:20]} {outcome.plain_probability:.0%}"
    defended = f"{result.mark(outcome.defended)} {outcome.defended[:20]} {outcome.defended_probability:.0%}"
    values = outcome.diagnostics
    numbers = f"{_number(values['drift'], 2):>6}{_number(values['instability'], 2):>6}"
    numbers += f"{_number(values['score'], 2):>7}{_number(values['sigma'], 3):>7}{values['passes']:>7}"
    return f"  {outcome.title:<8}{plain:<30}{defended:<30}{numbers}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
