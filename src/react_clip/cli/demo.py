"""``react-clip demo``: attack some photos and see plain CLIP, ReACT and SecondLook side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.cli import common
from react_clip.cli.photos import add_photo_argument, bundled_photos, expand_inputs
from react_clip.cli.progress import Progress
from react_clip.environment import has_fast_bf16
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip import Defended, Encoder, ReACT, SecondLook, ZeroShotClassifier
    from react_clip.report.demo_page import Answer, Outcome, PhotoResult

EXAMPLE = "react-clip demo my.jpg --labels 'cat, dog, teapot'"
BUDGETS, ALL_BUDGETS = (4, 8), (1, 4, 8, 16)
"""Attack strengths in 255ths: by default and with --full."""
_NOISY, _NOISE, _NOISE_SEED = "rocket.jpg", 0.02, 1
"""The bundled photo shown with camera noise, the noise's standard deviation, and the seed of the noise. It was chosen
among the bundled photos because the noise costs ReACT the right answer there; most of them keep it. Of a user's photos
the first one is shown with noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (three bundled ones by default)")
    parser.add_argument("--full", action="store_true", help="all bundled photos, with four attack strengths")
    parser.add_argument("--out", type=Path, default=Path("react-clip-demo"), help="folder for the page (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    common.add_model_options(
        parser, dtype=None, dtypes="fp32, bf16, fp16 or auto (bf16 on a CPU that has instructions for it, else fp32)"
    )
    common.add_label_options(parser)
    common.add_defense_options(parser, choose=False)
    parser.set_defaults(defense=None)  # both defences


def run(args: argparse.Namespace) -> int:
    """Attack the photos one by one, print each outcome when it is known, and write the page."""
    common.check_counts(args, "steps")
    common.check_label_options(args)
    files = expand_inputs(args.photos_in or bundled_photos())
    if args.photos_in:
        from react_clip.preprocess import check_file

        for path in files:
            check_file(path)  # before the model is loaded
    noisy = files[0] if args.photos_in else next(path for path in files if path.name == _NOISY)
    budgets: tuple[int, ...] = ALL_BUDGETS if args.full else BUDGETS
    attacked = dict.fromkeys(files, budgets)
    if not (args.photos_in or args.full):
        # The second bundled photo is attacked with the larger budget only, which keeps the demo under a minute.
        attacked = {files[0]: budgets, files[1]: budgets[-1:]}
    results: list[PhotoResult] = []
    steps = args.steps * sum(map(len, attacked.values()))
    with Progress(quiet=args.quiet, unit="attack step", total=steps) as progress:
        # The first line comes before the imports, which take seconds.
        progress.show("loading the model")
        from react_clip import encoders
        from react_clip.encoders.loading import resolve_device
        from react_clip.report.demo_page import PhotoResult, write_page

        if args.dtype is None:
            on_cpu = resolve_device(args.device).type == "cpu"
            args.dtype = "bf16" if on_cpu and has_fast_bf16() else "fp32"
        if args.model == common.DEFAULT_MODEL:
            encoders.pull(args.model, say=progress.show)
        encoder = encoders.load(args.model, device=args.device, dtype=args.dtype)
        clf, guards = common.build_classifier(args, encoder), _guards(args, encoder)
        if not args.quiet:
            names = " and ".join(f"{guard.label} ({_SOURCES[guard.kind]})" for guard in guards)
            progress.write(f"the defences are {names}; --config FILE replaces the one of its kind", error=True)
        demo = _Demo(clf, guards, args, progress)
        write = (lambda text: None) if args.json else progress.write
        page = args.out / "index.html"
        try:
            for number, path in enumerate(dict.fromkeys([*attacked, noisy])):
                # The first photo's budgets are attacked one by one, so that the first outcome comes soon; one batch of
                # all budgets takes less time in total.
                chosen = attacked.get(path, ())
                groups = [chosen] if number and chosen else [[budget] for budget in chosen]
                result = PhotoResult(path.name, [])
                write(_heading(result, guards))
                for outcome in demo.outcomes(path, groups, _NOISE if path == noisy else 0.0):
                    if not result.outcomes:
                        results.append(result)
                    result.outcomes.append(outcome)
                    write(_row(result, outcome))
        finally:
            # Also when stopped: the page shows what is finished.
            if results:
                write_page(
                    page,
                    results,
                    model=f"{encoder.name} in {args.dtype}",
                    defenses=[_description(guard) for guard in guards],
                    steps=args.steps,
                    classes=len(clf.names),
                )
    names = " / ".join(("CLIP", *(guard.label for guard in guards)))
    closing = [
        f"\n✓ is the answer that CLIP gives for the clean photo; passes are encoder passes of {names}.",
        "These attacks do not know the defences; an attacker who does can defeat them.",
        f"Page with the photos and perturbations: {page.resolve()}",
    ]
    common.print_result(args, {"page": str(page), "photos": [result.to_dict() for result in results]}, closing)
    return 0


_SOURCES = {"react": "the paper's", "second_look": "ours"}


def _guards(args: argparse.Namespace, encoder: Encoder) -> list[ReACT | SecondLook]:
    """ReACT and SecondLook, those with constants for the encoder; --config replaces the one of its kind."""
    from react_clip.defenses import ReACT, SecondLook, default_for

    given = None if args.config is None else common.build_guard(args, encoder)
    guards: list[ReACT | SecondLook] = []
    for kind in (ReACT, SecondLook):
        if isinstance(given, kind):
            guards.append(given)
            continue
        with suppress(ReactClipError):
            guards.append(kind.for_encoder(encoder))
    # With neither, this raises and says what to do.
    return guards or [default_for(encoder)]


def _description(guard: ReACT | SecondLook) -> str:
    from react_clip.defenses import SecondLook

    if isinstance(guard, SecondLook):
        return f"SecondLook with t = {guard.threshold:g}, alpha = {guard.alpha:g}"
    return f"ReACT with tau = {guard.tau:g}, sigma = {guard.mapping}, alpha = {guard.alpha:g}, M = {guard.views}"


@dataclass(frozen=True)
class _Demo:
    """Attacks photos and asks plain and defended CLIP."""

    clf: ZeroShotClassifier
    guards: Sequence[ReACT | SecondLook]
    args: argparse.Namespace
    progress: Progress

    def outcomes(self, path: Path, groups: Sequence[Sequence[int]], noise: float) -> Iterator[Outcome]:
        """Outcomes of the clean photo, of the photo with ``noise`` unless that is 0, and of each budget in turn.

        The budgets of a group are attacked in one batch.
        """
        from react_clip.preprocess import to_pixels

        self.progress.show(f"defending {path.name}")
        clean = to_pixels(path, self.clf.encoder.preprocessing).to(self.clf.device)[None]
        [outcome] = self._answers(clean, clean, [0])
        yield outcome
        answer = self.clf.names.index(outcome.answers[0].name)
        if noise:
            yield from self._answers(clean, self._with_noise(clean, answer, noise), [0], noise)
        for budgets in groups:
            self.progress.show(f"attacking {path.name}")
            attacked = self._attack(clean, answer, budgets)
            self.progress.show(f"defending {path.name}")
            yield from self._answers(clean, attacked, budgets)

    def _with_noise(self, clean: Tensor, answer: int, noise: float) -> Tensor:
        """The photo ``[1, 3, S, S]`` with camera noise."""
        import torch

        from react_clip.attacks import Corruption

        label = torch.full((1,), answer, device=self.clf.device)
        return Corruption(type="noise", severity=noise)(self.clf, clean, label, seed=_NOISE_SEED).images

    def _attack(self, clean: Tensor, answer: int, budgets: Sequence[int]) -> Tensor:
        """Images ``[len(budgets), 3, S, S]`` that PGD moved away from CLIP's answer for the clean photo."""
        import torch

        from react_clip.attacks import PGD

        count, device = len(budgets), self.clf.device
        result = PGD(steps=self.args.steps)(
            self.clf,
            clean.expand(count, -1, -1, -1),
            torch.full((count,), answer, device=device),
            seed=self.args.seed,
            eps=torch.tensor(budgets, device=device) / 255,
            progress=lambda done, total: self.progress.advance(count),
        )
        return result.images

    def _answers(self, clean: Tensor, images: Tensor, budgets: Sequence[int], noise: float = 0.0) -> list[Outcome]:
        """Plain and defended answers for versions ``[B, 3, S, S]`` of the photo ``clean`` ``[1, 3, S, S]``."""
        from react_clip.defenses import Undefended
        from react_clip.report.demo_page import Answer, Outcome

        plain = Undefended()(self.clf, images)
        answered = [(guard, guard(self.clf, images, seed=self.args.seed)) for guard in self.guards]
        pixels, changes = images.cpu(), (images - clean).cpu()
        return [
            Outcome(
                eps=eps,
                noise=noise,
                pixels=pixels[row],
                change=changes[row],
                answers=[
                    Answer("CLIP", "plain", plain.names[row], float(plain.probs[row].max()), {}),
                    *(_answer(guard, out, row) for guard, out in answered),
                ],
            )
            for row, eps in enumerate(budgets)
        ]


def _answer(guard: ReACT | SecondLook, out: Defended, row: int) -> Answer:
    """The answer of a defence for one image of a batch, with what decided it."""
    from react_clip.defenses.second_look import BRANCHES, SecondLooked
    from react_clip.report.demo_page import Answer

    values = common.diagnostics(out, row)
    if isinstance(out, SecondLooked):
        values["branch"] = BRANCHES[int(out.branch[row])]
    return Answer(guard.label, guard.kind, out.names[row], float(out.probs[row].max()), values)


def _heading(result: PhotoResult, guards: Sequence[ReACT | SecondLook]) -> str:
    answers = "".join(f"{name + ' says':<28}" for name in ("CLIP", *(guard.label for guard in guards)))
    return f"\n{result.name}\n  {'version':<12}{answers}passes"


def _row(result: PhotoResult, outcome: Outcome) -> str:
    """A line of the terminal's table; a tick marks answers that equal CLIP's answer for the clean photo."""
    cells = [f"{result.mark(answer)} {answer.name[:20]} {answer.probability:.0%}" for answer in outcome.answers]
    passes = " / ".join(f"{answer.diagnostics['passes']:.3g}" for answer in outcome.answers[1:])
    return f"  {outcome.title:<12}{''.join(f'{cell:<28}' for cell in cells)}1 / {passes}"
