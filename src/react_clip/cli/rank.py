"""``react-clip rank``: one table over all kinds of photos and attackers, from runs, or for a defence of your own."""

from __future__ import annotations

import argparse
import math
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.cli import common
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

if TYPE_CHECKING:
    from react_clip import ZeroShotClassifier
    from react_clip.defenses import Defense
    from react_clip.evaluation import Recipe

EXAMPLE = (
    "react-clip rank runs/standard runs/adaptive --out ranking.html (or: react-clip rank my_defense.py:MyDefense "
    "--data photos/ --heads heads/ --quick)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "what",
        nargs="+",
        metavar="RUN_DIR or FILE.py:CLASS",
        help="folders of `react-clip evaluate` to rank, or one defence of your own to measure and rank",
    )
    parser.add_argument("--out", type=Path, default=Path("ranking.html"), help="the page (%(default)s)")
    parser.add_argument(
        "--timings", type=Path, nargs="+", default=[], help="files of `react-clip bench --defenses ...`"
    )
    group = parser.add_argument_group("for a defence of your own")
    group.add_argument("--quick", action="store_true", help="few photos and cheap attacks, for a first impression")
    group.add_argument("--recipe", type=Path, help="what to measure (the package's standard evaluation)")
    group.add_argument("--run-dir", type=Path, help="folder of the run (runs/<name of the class>)")
    group.add_argument("--model", help="hub id, open_clip:MODEL/PRETRAINED, folder, or clip-vit-b-16 (the recipe's)")
    group.add_argument("--datasets", type=common.comma_separated, help="comma-separated names, or all (the recipe's)")
    group.add_argument("--limit", type=int, help="images per set (the recipe's)")
    group.add_argument("--data", type=Path, help="root of the photos ($REACT_CLIP_DATA, else the cache)")
    group.add_argument("--heads", type=Path, help="folder with ready class features, <set>.npz")
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (CUDA if there is one)")


def run(args: argparse.Namespace) -> int:
    """Measure the defence if one is given, then write the page and print the table."""
    own = [text for text in args.what if ":" in text and not Path(text).is_dir()]
    if own and len(args.what) > 1:
        raise ReactClipError(f"{own[0]} is a defence to measure; give it alone, and rank its run with others later")
    _check(args, own)
    require("pandas", "the ranking", extra="eval")
    from react_clip.report.ranking import rank

    ranking = rank([_measure(own[0], args)] if own else args.what, args.timings)
    ranking.write_page(args.out)
    document = {
        "page": str(args.out),
        "columns": ranking.table.header[1:],
        "defenses": {
            entry.label: [None if math.isnan(cell.value) else cell.value for cell in entry.cells]
            for entry in ranking.entries
        },
    }
    common.print_result(args, document, [ranking.table.markdown()], [f"the page is {args.out}"])
    return 0


def _check(args: argparse.Namespace, own: list[str]) -> None:
    """Refuse wrong numbers and missing files, before slow imports."""
    common.check_counts(args, "limit")
    common.check_paths(args, "recipe", "data", "heads")
    for path in args.timings:
        common.check_exists(path, "check --timings")
    for text in args.what:
        if text in own:
            _file_of(text)
        else:
            common.check_exists(Path(text), "give a folder of `react-clip evaluate`, or FILE.py:CLASS")


def _file_of(reference: str) -> Path | None:
    """The file of ``FILE.py:CLASS``, which must exist; None for ``module:CLASS``."""
    file = Path(reference.rpartition(":")[0])
    if file.suffix != ".py":
        return None
    common.check_exists(file, "give the file that defines the defence, then :CLASS")
    return file


def _measure(reference: str, args: argparse.Namespace) -> Path:
    """Run the standard evaluation with a defence of the user's beside ours; returns the folder of the run."""
    from react_clip.evaluation import Recipe, run_recipe, validate
    from react_clip.evaluation.recipe import LabelledDefense

    defense = load_defense(reference)
    shipped = f"{'standard-quick' if args.quick else 'standard'}.yaml"
    path = args.recipe or Path(str(files("react_clip") / "assets" / "recipes" / shipped))
    recipe = Recipe.load(path, model=args.model)
    given = {name: getattr(args, name) for name in ("limit", "datasets") if getattr(args, name) is not None}
    mine = LabelledDefense(label=type(defense).label, defense=defense)
    recipe = recipe.replace(**given, defenses=(*recipe.defenses, mine))
    folder: Path = args.run_dir or Path("runs") / type(defense).__name__
    location = {"root": args.data, "heads": args.heads, "device": args.device}
    validation = validate(recipe, folder, **location)
    if not validation.ok:
        raise ReactClipError(validation.problems[0])
    for line in validation.lines():
        common.notice(args, line)
    check_defense(defense, _tiny_classifier(recipe, args))
    run_recipe(recipe, folder, progress=not args.quiet, **location)
    return folder


def load_defense(reference: str) -> Defense:
    """A defence with its default values from ``FILE.py:CLASS`` or ``module:CLASS``."""
    from react_clip import defenses

    place, _, name = reference.rpartition(":")
    if (file := _file_of(reference)) is not None:
        sys.path.insert(0, str(file.resolve().parent))
        place = file.stem
    try:
        return defenses.from_dict(f"{place}:{name}")
    except ReactClipError:
        raise
    except Exception as error:  # the file is the user's: it may raise anything
        raise ReactClipError(f"{reference} cannot be loaded ({type(error).__name__}: {first_line(error)})") from error


def check_defense(defense: Defense, clf: ZeroShotClassifier) -> None:
    """Raise unless a defence answers two images with finite logits over all classes."""
    import torch

    size, classes = clf.encoder.image_size, len(clf.names)
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(clf.device)
    label = type(defense).label
    try:
        out = defense(clf, images, seed=0)
        logits = out.logits
    except ReactClipError:
        raise
    except Exception as error:  # the code is the user's: it may raise anything
        raise ReactClipError(f"{label} fails on two images ({type(error).__name__}: {first_line(error)})") from error
    if tuple(logits.shape) != (2, classes):
        raise ReactClipError(
            f"{label} answers 2 images of {classes} classes with logits of shape {tuple(logits.shape)}; they must be "
            f"(2, {classes})"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ReactClipError(f"{label} answers with logits that are NaN or infinite; they must be finite")


def _tiny_classifier(recipe: Recipe, args: argparse.Namespace) -> ZeroShotClassifier:
    """The recipe's model with three classes that stand for any."""
    import torch

    from react_clip import ZeroShotClassifier, load

    encoder = load(recipe.model, device=args.device)
    features = torch.eye(3, encoder.dim, device=encoder.device)
    return ZeroShotClassifier.from_features(encoder, ["one", "two", "three"], features)
