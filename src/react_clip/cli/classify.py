"""``react-clip classify``: defended answers for photos, or plain ones and what a defence would change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader, add_photo_argument
from react_clip.errors import ReactClipError
from react_clip.intervals import share_in_words, wilson

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip.report.page import Photo

EXAMPLE = "react-clip classify holiday/ --labels 'beach, mountain, city'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    lines = ', or - for JSON lines on standard input: {"file": PATH} or {"image": BASE64, "file": NAME}'
    add_photo_argument(parser, note=lines, stdin=True)
    parser.add_argument("--top", type=options.count, default=1, help="answers per photo (%(default)s)")
    shadow = "plain answers, and what a defence would change: second_look unless named, or that of --config"
    parser.add_argument("--shadow", nargs="?", const="second_look", choices=options.DEFENSES, help=shadow)
    parser.add_argument("--out", type=Path, help="folder for a page of the photos that --shadow would change")
    options.add_model_options(parser)
    options.add_label_options(parser)
    options.add_defense_options(parser)


def run(args: argparse.Namespace) -> int:
    """Classify in batches and print one line per photo as soon as it is known."""
    if args.shadow and args.defense:
        raise ReactClipError(f"--shadow {args.shadow} runs beside plain CLIP; leave out --defense {args.defense}")
    if args.out and not args.shadow:
        raise ReactClipError(f"--out is {args.out}, the folder for the page of --shadow; add --shadow too")
    args.defense = args.shadow or args.defense
    from react_clip.secret import described

    reader = PhotoReader(args.photos_in, args)
    seed = common.secret_seed(args)
    clf, guard = common.load_defended(args)
    rows: list[dict[str, Any]] = []
    pictures: list[Photo] = []
    try:
        for paths, pixels in reader.batches(clf.encoder, "defending"):
            out = guard(clf, pixels, seed=seed)
            batch = describe(paths, rc.Undefended()(clf, pixels) if args.shadow else out, clf.names, args.top)
            if args.shadow:
                pictures += _compare(batch, out, pixels)
            rows += batch
            for row in batch if not args.json else ():
                common.say(_line(row))
    finally:
        # Also when stopped: what is finished is printed.
        document = {"seed": described(seed), "results": rows, "errors": reader.failed}
        shadow, notices = _shadow(args, guard, rows, pictures) if args.shadow and rows else ({}, [])
        common.print_result(args, document | shadow, notices=notices)
    return reader.exit_code


def describe(paths: Sequence[Path], out: rc.Defended, names: Sequence[str], top: int) -> list[dict[str, Any]]:
    """One row of JSON values per photo: its best answers and the diagnostics."""
    best = out.probs.topk(min(top, len(names)))
    rows = zip(paths, best.values.tolist(), best.indices.tolist(), common.diagnostics(out), strict=True)
    return [
        {
            "file": str(path),
            "answers": [{"label": names[k], "probability": p} for p, k in zip(probs, classes, strict=True)],
            **diagnostics,
        }
        for path, probs, classes, diagnostics in rows
    ]


def _line(row: dict[str, Any]) -> str:
    answers = ", ".join(f"{answer['label']} {answer['probability']:.0%}" for answer in row["answers"])
    defended = row.get("shadow", row["answers"][0])["label"]
    note = f"  [defended: {defended}]" if defended != row["answers"][0]["label"] else ""
    return f"{row['file']}: {answers}{'  [corrected]' if row['gated'] else note}"


# ---------------------------------------------------------------------- --shadow


def _compare(rows: list[dict[str, Any]], out: rc.Defended, pixels: Tensor) -> list[Photo]:
    """Add the defended answers to the rows; returns those photos ``[N, 3, S, S]`` that they change, for the page."""
    from react_clip.report.changed import changed_photo

    photos = []
    for row, name, passes, image in zip(rows, out.names, out.passes.tolist(), pixels, strict=True):
        row["shadow"] = {"label": name, "passes": passes}
        if (plain := row["answers"][0]["label"]) != name:
            photos.append(changed_photo(row["file"], image, plain, name))
    return photos


def _shadow(
    args: argparse.Namespace, guard: rc.defenses.Defense, rows: list[dict[str, Any]], pictures: list[Photo]
) -> tuple[dict[str, Any], list[str]]:
    """Changed answers and passes of the defence, as a JSON document and as lines of text; writes the page."""
    from react_clip.report.changed import changed_section
    from react_clip.report.page import PAGE, Section, write_page

    changed, passes = len(pictures), sum(row["shadow"]["passes"] for row in rows) / len(rows)
    share = share_in_words(changed, len(rows))
    lines = [f"{guard.label} would change {share} answers, and take {passes:.2f} encoder passes per image, not 1"]
    if args.out:
        sections = [changed_section(pictures, len(rows)), Section("Defence", facts={guard.label: repr(guard)})]
        write_page(args.out / PAGE, f"{guard.label} beside plain CLIP", lines, sections)
        lines.append(f"the page with these photos is {args.out / PAGE}")
    summary = {"changed": changed, "share": wilson(changed / len(rows), len(rows))._asdict(), "passes": passes}
    return {"shadow": {"defense": guard.to_dict(), **summary}}, lines
