"""``react-clip demo``: attack some photos and see plain CLIP, ReACT and SecondLook side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import react_clip as rc
from react_clip.cli import common, options
from react_clip.cli.photos import add_photo_argument, bundled_photos, expand_inputs

if TYPE_CHECKING:
    from tqdm import tqdm

    from react_clip.report.demo_page import Answer, Outcome, PhotoResult

EXAMPLE = "react-clip demo my.jpg --labels 'cat, dog, teapot'"
_BUDGETS = (4, 8)
"""Attack strengths in 255ths."""
_NOISE = 0.02
"""Standard deviation of the camera noise that each photo is also shown with, for pixels in [0, 1]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (two bundled ones by default)")
    parser.add_argument("--out", type=Path, default=Path("react-clip-demo"), help="folder for the page (%(default)s)")
    parser.add_argument("--steps", type=options.count, default=10, help="PGD iterations (%(default)s)")
    options.add_model_options(parser)
    options.add_label_options(parser)
    options.add_defense_options(parser, choose=False)


def run(args: argparse.Namespace) -> int:
    """Attack the photos one by one, print the outcomes of each when they are known, and write the page."""
    files = expand_inputs(args.photos_in or bundled_photos()[:3:2])
    results: list[PhotoResult] = []
    with common.progress(args, "attack step", args.steps * len(files), "loading the model") as bar:
        from react_clip.report.demo_page import PhotoResult, write_demo

        if args.model == options.DEFAULT_MODEL:
            rc.pull(args.model, say=bar.set_description)
        encoder = rc.load(args.model, device=args.device, dtype=args.dtype)
        clf, guards = common.build_classifier(args, encoder), common.both_guards(args, encoder)
        try:
            for path in files:
                bar.set_description(path.name)
                result = PhotoResult(path.name, _outcomes(args, bar, clf, guards, path))
                results.append(result)
                if not args.json:
                    common.say(_table(result))
        finally:
            # Also when stopped: the page shows what is finished.
            page = args.out / "index.html"
            if results:
                model, defenses = f"{encoder.name} in {args.dtype}", [repr(guard) for guard in guards]
                write_demo(page, results, model=model, defenses=defenses, steps=args.steps, classes=len(clf.names))
    closing = [
        "\n✓ is the answer that CLIP gives for the clean photo; passes are encoder passes in that order.",
        "These attacks do not know the defences; an attacker who does can defeat them.",
        f"Page with the photos and perturbations: {page.resolve()}",
    ]
    common.print_result(args, {"page": str(page), "photos": [result.to_dict() for result in results]}, closing)
    return 0


def _outcomes(
    args: argparse.Namespace,
    bar: tqdm[object],
    clf: rc.ZeroShotClassifier,
    guards: list[rc.defenses.Defense],
    path: Path,
) -> list[Outcome]:
    """Plain and defended answers for the photo as it is, with camera noise, and attacked with each budget."""
    import torch

    from react_clip.report.demo_page import Outcome

    clean = clf.encoder.prepare([path])
    label = clf(clean).argmax(-1)
    before = bar.n
    noisy = rc.attacks.Corruption(type="noise", severity=_NOISE)(clf, clean, label, seed=args.seed).images
    attacked = rc.attacks.PGD(steps=args.steps)(
        clf,
        clean.expand(len(_BUDGETS), -1, -1, -1),
        label.expand(len(_BUDGETS)),
        seed=args.seed,
        eps=torch.tensor(_BUDGETS, device=clf.device) / 255,
        progress=lambda done: common.show(bar, before + done),
    ).images
    images = torch.cat([clean, noisy, attacked])
    plain = rc.Undefended()(clf, images)
    pixels, changes = images.cpu(), (images - clean).cpu()
    answers = [_answers("CLIP", "plain", plain)]
    answers += [_answers(type(guard).label, guard.kind, guard(clf, images, seed=args.seed)) for guard in guards]
    return [
        Outcome(eps=eps, noise=noise, pixels=pixels[row], change=changes[row], answers=[each[row] for each in answers])
        for row, (eps, noise) in enumerate([(0, 0.0), (0, _NOISE), *((eps, 0.0) for eps in _BUDGETS)])
    ]


def _answers(who: str, key: str, out: rc.Defended) -> list[Answer]:
    """The answers of plain CLIP or of a defence, with what decided them."""
    from react_clip.report.demo_page import Answer

    probabilities = out.probs.amax(-1).tolist()
    diagnostics = [{} for _ in out.names] if key == "plain" else common.diagnostics(out)
    return [Answer(who, key, *row) for row in zip(out.names, probabilities, diagnostics, strict=True)]


def _table(result: PhotoResult) -> str:
    """The photo's lines in the terminal; a tick marks answers that equal CLIP's answer for the clean photo."""
    whos = [answer.who for answer in result.outcomes[0].answers]
    lines = [f"\n{result.name}", f"  {'version':<12}{''.join(f'{who} says'.ljust(28) for who in whos)}passes"]
    for outcome in result.outcomes:
        cells = [f"{result.mark(answer)} {answer.name[:20]} {answer.probability:.0%}" for answer in outcome.answers]
        passes = " / ".join(f"{answer.diagnostics['passes']:.3g}" for answer in outcome.answers[1:])
        lines.append(f"  {outcome.title:<12}{''.join(f'{cell:<28}' for cell in cells)}1 / {passes}")
    return "\n".join(lines)
