"""``react-clip demo``: attack some photos and see plain and defended CLIP side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.cli.common import (
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    bundled_photos,
    diagnostics,
    expand_inputs,
    load_encoder,
)
from react_clip.cli.progress import Progress
from react_clip.environment import has_fast_bf16

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip import ReACT, ZeroShotClassifier
    from react_clip.report.demo_page import Outcome, PhotoResult

BUDGETS, ALL_BUDGETS = (4, 8), (1, 4, 8, 16)
"""Attack strengths in 255ths: by default and with --full."""
_PHOTOS = 2
"""Bundled photos by default; --full takes all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=f" ({_PHOTOS} bundled ones by default)")
    parser.add_argument("--full", action="store_true", help="all bundled photos, and four attack strengths, not two")
    parser.add_argument("--out", type=Path, default=Path("react-clip-demo"), help="folder for the page (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    add_model_options(parser)
    parser.set_defaults(dtype=None)  # bf16 where the CPU is fast at it, else fp32
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Attack the photos one by one, print each outcome when it is known, and write the page."""
    files = expand_inputs(args.photos_in) if args.photos_in else bundled_photos()[: None if args.full else _PHOTOS]
    budgets = ALL_BUDGETS if args.full else BUDGETS
    results: list[PhotoResult] = []
    with Progress(quiet=args.quiet, unit="attack step", total=len(files) * len(budgets) * args.steps) as progress:
        # The first line comes before the imports, which take seconds.
        progress.show("loading the model")
        from react_clip.encoders.base import resolve_device
        from react_clip.report.demo_page import PhotoResult, write_page

        if args.dtype is None:
            on_cpu = resolve_device(args.device).type == "cpu"
            args.dtype = "bf16" if on_cpu and has_fast_bf16() else "fp32"
        encoder = load_encoder(args, pull=progress.show)
        clf, guard = build_classifier(args, encoder), build_guard(args, encoder)
        write = (lambda text: None) if args.json else progress.write
        for number, path in enumerate(files):
            # The first photo's budgets are attacked one by one, so that the first outcome comes soon; one batch of all
            # budgets takes less time in total.
            groups = [budgets] if number else [[budget] for budget in budgets]
            result = PhotoResult(path.name, [])
            write(_heading(result))
            for outcome in attack_photo(clf, guard, path, groups, args, progress):
                result.outcomes.append(outcome)
                write(_row(result, outcome))
            results.append(result)
    page = args.out / "index.html"
    write_page(
        page,
        results,
        model=f"{encoder.name} in {args.dtype}",
        guard=_summary(guard),
        steps=args.steps,
        classes=len(clf.names),
    )
    if args.json:
        print(json.dumps({"page": str(page), "photos": [result.to_dict() for result in results]}, indent=2))
    else:
        print("\nThese attacks do not know the defence; an attacker who does can defeat it.")
        print(f"Page with the photos and perturbations: {page.resolve()}")
    return 0


def attack_photo(
    clf: ZeroShotClassifier,
    guard: ReACT,
    path: Path,
    groups: Sequence[Sequence[int]],
    args: argparse.Namespace,
    progress: Progress,
) -> Iterator[Outcome]:
    """Outcomes of the clean photo and of each budget in turn; the budgets of a group are attacked in one batch."""
    from react_clip.preprocess import to_pixels

    progress.show(f"defending {path.name}")
    clean = to_pixels(path, clf.encoder.image_size).to(clf.device)
    [outcome] = _outcomes(clf, guard, clean, clean[None], [0], args.seed)
    yield outcome
    for budgets in groups:
        progress.show(f"attacking {path.name}")
        attacked = _attack(clf, clean, outcome.plain, budgets, args, progress)
        progress.show(f"defending {path.name}")
        yield from _outcomes(clf, guard, clean, attacked, budgets, args.seed)


def _attack(
    clf: ZeroShotClassifier,
    clean: Tensor,
    answer: str,
    budgets: Sequence[int],
    args: argparse.Namespace,
    progress: Progress,
) -> Tensor:
    """Images ``[len(budgets), 3, S, S]`` that PGD moved away from CLIP's answer for the clean photo."""
    import torch

    from react_clip.attacks import PGD

    count = len(budgets)
    images = clean.expand(count, -1, -1, -1)
    labels = torch.full((count,), clf.names.index(answer), device=clf.device)
    eps = torch.tensor(budgets, device=clf.device) / 255
    attack = PGD(steps=args.steps)
    return attack(
        clf, images, labels, seed=args.seed, eps=eps, progress=lambda done, total: progress.advance(count)
    ).images


def _outcomes(
    clf: ZeroShotClassifier, guard: ReACT, clean: Tensor, images: Tensor, budgets: Sequence[int], seed: int
) -> list[Outcome]:
    """What plain and defended CLIP say about versions ``[B, 3, S, S]`` of the photo ``clean`` ``[3, S, S]``."""
    from react_clip.defenses import Undefended
    from react_clip.report.demo_page import Outcome

    plain, defended = Undefended()(clf, images), guard(clf, images, seed=seed)
    return [
        Outcome(
            eps=eps,
            pixels=images[row].cpu(),
            perturbation=(images[row] - clean).cpu(),
            plain=plain.names[row],
            plain_probability=float(plain.probs[row].max()),
            defended=defended.names[row],
            defended_probability=float(defended.probs[row].max()),
            diagnostics=diagnostics(defended, row),
        )
        for row, eps in enumerate(budgets)
    ]


def _summary(guard: ReACT) -> str:
    """The constants of the defence in one line."""
    return f"ReACT with tau = {guard.tau:g}, sigma = {guard.mapping}, alpha = {guard.alpha:g}, M = {guard.views}"


def _heading(result: PhotoResult) -> str:
    numbers = f"{'r':>6}{'J':>6}{'score':>7}{'sigma':>7}{'passes':>7}"
    return f"\n{result.name}\n  {'attack':<8}{'CLIP says':<30}{'defended CLIP says':<30}{numbers}"


def _row(result: PhotoResult, outcome: Outcome) -> str:
    """A line of the terminal's table; the mark says whether the answer is CLIP's for the clean photo."""
    plain = f"{result.mark(outcome.plain)} {outcome.plain[:20]} {outcome.plain_probability:.0%}"
    defended = f"{result.mark(outcome.defended)} {outcome.defended[:20]} {outcome.defended_probability:.0%}"
    values = outcome.diagnostics
    numbers = f"{_number(values['drift'], 2):>6}{_number(values['instability'], 2):>6}"
    numbers += f"{_number(values['score'], 2):>7}{_number(values['sigma'], 3):>7}{values['passes']:>7}"
    return f"  {outcome.title:<8}{plain:<30}{defended:<30}{numbers}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
