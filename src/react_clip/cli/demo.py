"""``react-clip demo``: attack some photos and see plain and defended CLIP side by side."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip import Defended, ReACT, ReactClipError, Undefended, ZeroShotClassifier
from react_clip.attacks import PGD
from react_clip.cli.common import (
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    expand_inputs,
    load_encoder,
)
from react_clip.defenses import Defense
from react_clip.preprocess import to_pixels
from react_clip.report.demo_page import PhotoStory, Scene, write_page

BUDGETS = (1, 4, 8, 16)
"""Attack strengths, in 255ths."""

_BUNDLED = {
    "skimage.data": ("chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"),
    "sklearn.datasets.images": ("china.jpg", "flower.jpg"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (bundled ones by default)")
    parser.add_argument("--out", type=Path, default=Path("react-clip-demo"), help="folder for the page (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """The whole story of every photo; ends by naming the page it wrote."""
    files = expand_inputs(args.photos_in) if args.photos_in else bundled_photos()
    encoder = load_encoder(args, pull_missing=True)
    pixels = torch.stack([to_pixels(path, encoder.image_size) for path in files]).to(encoder.device)
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    with tqdm(total=len(BUDGETS) * args.steps, desc="attacking", unit="step", disable=args.quiet or None) as bar:
        scenes = tell(clf, guard, pixels, steps=args.steps, seed=args.seed, bar=bar)
    stories = [
        PhotoStory(path.name, pixels[i].cpu(), [scene.of(i) for scene in scenes]) for i, path in enumerate(files)
    ]
    page = args.out / "index.html"
    write_page(page, stories, model=encoder.name, guard=_summary(guard), steps=args.steps, classes=len(clf.names))
    if args.json:
        print(json.dumps({"page": str(page), "photos": [as_json(story) for story in stories]}, indent=2))
    else:
        for story in stories:
            print_story(story)
        print("\nThese attacks do not know the defence; an attacker who does can defeat it.")
        print(f"Page with the photos and perturbations: {page.resolve()}")
    return 0


def _summary(guard: ReACT) -> str:
    """The constants that matter to a reader, in one line."""
    return f"ReACT with tau = {guard.tau:g}, sigma = {guard.mapping}, alpha = {guard.alpha:g}, M = {guard.views}"


def bundled_photos() -> list[Path]:
    """The photos that scikit-image and scikit-learn carry in their packages."""
    from importlib.resources import files

    try:
        found = [Path(str(files(package) / name)) for package, names in _BUNDLED.items() for name in names]
    except ModuleNotFoundError as error:
        raise ReactClipError(
            f"the demo's own photos come with {error.name}; run `pip install 'react-clip[demo]'` or give "
            "your own photos"
        ) from None
    return [path for path in found if path.is_file()]


@dataclass(frozen=True)
class _Batch:
    """All photos at one attack strength."""

    eps: int
    images: Tensor
    plain: Defended
    defended: Defended

    def of(self, i: int) -> Scene:
        plain, out = self.plain, self.defended
        return Scene(
            eps=self.eps,
            pixels=self.images[i].cpu(),
            plain=plain.names[i],
            plain_probability=float(plain.probs[i].max()),
            defended=out.names[i],
            defended_probability=float(out.probs[i].max()),
            drift=float(out.drift[i]),
            instability=float(out.instability[i]),
            score=float(out.score[i]),
            sigma=float(out.sigma[i]),
            gated=bool(out.gated[i]),
            passes=int(out.passes[i]),
        )


def tell(
    clf: ZeroShotClassifier, guard: Defense, pixels: Tensor, *, steps: int, seed: int, bar: tqdm[Any]
) -> list[_Batch]:
    """Clean and attacked photos through plain and defended CLIP; the attack aims away from CLIP's clean answer."""
    answers = Undefended()(clf, pixels).labels
    scenes = []

    def advance(done: int, total: int) -> None:
        bar.update(1)

    for eps in (0, *BUDGETS):
        images = pixels
        if eps:
            attack = PGD(eps=eps / 255, steps=steps)
            images = attack(clf, pixels, answers, seed=seed, progress=advance).images
        scenes.append(_Batch(eps, images, Undefended()(clf, images), guard(clf, images, seed=seed)))
    return scenes


def print_story(story: PhotoStory) -> None:
    """One photo as a small table; the mark says whether the answer is the clean one."""
    print(f"\n{story.name}")
    heads = f"{'r':>6}{'J':>6}{'score':>7}{'sigma':>7}{'passes':>7}"
    print(f"  {'attack':<8}{'CLIP says':<30}{'defended CLIP says':<30}{heads}")
    for scene in story.scenes:
        plain = f"{story.mark(scene.plain)} {scene.plain[:20]} {scene.plain_probability:.0%}"
        defended = f"{story.mark(scene.defended)} {scene.defended[:20]} {scene.defended_probability:.0%}"
        numbers = (
            f"{scene.drift:6.2f}{_or_dash(scene.instability):>6}{scene.score:7.2f}{scene.sigma:7.3f}{scene.passes:7d}"
        )
        print(f"  {scene.title:<8}{plain:<30}{defended:<30}{numbers}")


def _or_dash(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


_FIELDS = (
    *("eps", "plain", "plain_probability", "defended", "defended_probability"),
    *("drift", "instability", "score", "sigma", "gated", "passes"),
)


def as_json(story: PhotoStory) -> dict[str, Any]:
    """A photo's story for machines; null where a value was not needed."""
    return {
        "photo": story.name,
        "scenes": [
            {name: None if isinstance(v := getattr(s, name), float) and math.isnan(v) else v for name in _FIELDS}
            for s in story.scenes
        ],
    }
