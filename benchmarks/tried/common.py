"""What the scripts share: options, contenders that take turns, photos, and one shape of result."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import react_clip as rc
from react_clip import attacks, storage
from react_clip.bank import LabelBank
from react_clip.cli.common import expand_inputs
from react_clip.cli.demo import bundled_photos
from react_clip.encoders.base import resolve_device, resolve_dtype
from react_clip.evaluation.sets import device_name
from react_clip.preprocess import as_pixels

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench"
MODEL = "clip-vit-b-16"


def read_options(name: str, **defaults: Any) -> argparse.Namespace:
    """The options of every script; ``defaults`` are those that suit two CPU cores and a minute."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.tried.{name}")
    parser.add_argument("--device", help="cpu or cuda (CUDA if there is one)")
    parser.add_argument("--dtype", default="fp32", help="of the tower (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images at a time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contender; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch on a CPU (its own choice)")
    parser.add_argument("--photos", type=int, default=8, help="how many, where real ones are needed (%(default)s)")
    parser.add_argument("--data", type=Path, help="a folder of photos (bundled ones, shifted, by default)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result (%(default)s)")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    args.device, args.dtype = resolve_device(args.device), resolve_dtype(args.dtype)
    args.out /= f"tried-{name.replace('_', '-')}-{args.device.type}.json"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    return args


def turns(
    args: argparse.Namespace, ways: dict[str, Callable[[], object]], images: int | None = None
) -> dict[str, float]:
    """Milliseconds per image of each way, taking turns so that a busy machine slows all of them alike."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            wait(args.device)
            begin = clock(args)()
            way()
            wait(args.device)
            if turn:  # the first one warms up
                spent[name].append(clock(args)() - begin)
    return {name: 1000 * statistics.median(times) / (images or args.batch) for name, times in spent.items()}


def first_call(args: argparse.Namespace, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What a function gives, and the seconds of its first call, in which it is compiled."""
    begin = time.perf_counter()
    result = call()
    wait(args.device)
    return result, time.perf_counter() - begin


def clock(args: argparse.Namespace) -> Callable[[], float]:
    """The wall's; a single thread counts its own processor time, which other people's work does not enter."""
    return time.process_time if args.device.type == "cpu" and args.threads == 1 else time.perf_counter


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tower(args: argparse.Namespace) -> rc.Encoder:
    return rc.load(MODEL, device=args.device, dtype=args.dtype)


def random_pixels(args: argparse.Namespace, count: int | None = None) -> Tensor:
    return torch.rand(count or args.batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(args.device)


def photos(args: argparse.Namespace, size: int = 224) -> Tensor:
    """``--photos`` real ones, spread over the folder; repeated with a shift where there are fewer."""
    files = expand_inputs([args.data]) if args.data else bundled_photos()
    files = files[:: max(1, len(files) // args.photos)][: args.photos]
    found = as_pixels(files, size)
    return torch.stack([found[i % len(found)].roll(7 * (i // len(found)), 2) for i in range(args.photos)]).to(
        args.device
    )


def classifier(encoder: rc.Encoder) -> rc.ZeroShotClassifier:
    """Names of the label bank; the answer of undefended CLIP on the clean photo counts as right."""
    return rc.ZeroShotClassifier(encoder, list(LabelBank.load().vocabulary())[:100])


def attacked(clf: rc.ZeroShotClassifier, pixels: Tensor, eps: float = 4 / 255) -> Tensor:
    attack = attacks.PGD(eps=eps, steps=10)
    parts = pixels.split(32)
    with torch.enable_grad():
        return torch.cat([attack(clf, part, clf(part).argmax(-1).detach(), seed=0).images for part in parts])


def finish(
    args: argparse.Namespace,
    *,
    idea: str,
    what: str,
    before: float | None,
    after: float | None,
    kept: bool,
    why: str,
    unit: str = "ms per image",
    **more: Any,
) -> None:
    """Print the result and write it; ``ratio`` is after / before, so less is faster."""
    result = {
        "idea": idea,
        "what": what,
        "unit": unit,
        "before": before,
        "after": after,
        "ratio": after / before if before and after else None,
        **more,
        "kept": kept,
        "why": why,
        "command": shlex.join(["python", "-m", f"benchmarks.tried.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "device": device_name(args.device),
        "dtype": str(args.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": clock(args).__name__,
        "batch": args.batch,
        "rounds": args.rounds,
        "versions": {"react-clip": rc.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    storage.write_text(args.out, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
