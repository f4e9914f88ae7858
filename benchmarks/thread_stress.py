"""Eight threads share an encoder and its defences: every answer must have the bits that it has in one thread.

A GPU adds up gradients in no fixed order, so there these may differ by rounding.

    python benchmarks/thread_stress.py --count 20

The result is the entry "threads" of benchmarks/results/serve.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that all threads add up floats in the same order

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from _common import RESULTS, where, write
from torch import Tensor

import react_clip as rc

THREADS = 8
GRADIENTS = {"gradients": False, "gradients with checkpoints": True}
"""Jobs that differentiate, and whether activations are computed again instead of kept."""
Job = Callable[[], list[Tensor]]


def jobs(clf: rc.ZeroShotClassifier) -> dict[str, Job]:
    """Everything that threads may do with one classifier: features, defended answers, gradients, copies of weights."""
    encoder = clf.encoder
    full = encoder.image_size
    small = encoder.size_near(176 / 224) or full
    generator = torch.Generator().manual_seed(0)
    images = {count: torch.rand(count, 3, full, full, generator=generator).to(encoder.device) for count in (1, 2)}
    guards = {"ReACT": rc.ReACT(tau=0.0, probe_samples=1, views=1), "SecondLook": rc.SecondLook(threshold=0.0)}

    def features(count: int) -> list[Tensor]:
        return encoder.encode_several([images[count], images[count][..., :small, :small].contiguous()])

    def answers(guard: rc.Defense, count: int) -> list[Tensor]:
        answer = guard(clf, images[count], seed=0)
        return [answer.logits, answer.features, answer.passes, *answer.diagnostics.values()]

    def gradients(differentiable: bool) -> list[Tensor]:
        leaf = images[1].clone().requires_grad_()
        module = rc.as_module(clf, guards["ReACT"], differentiable=differentiable)
        with torch.enable_grad():
            return list(torch.autograd.grad(module(leaf).max(), leaf))

    return {
        **{f"features of {count}": partial(features, count) for count in images},
        **{f"{name}, {count}": partial(answers, guard, count) for name, guard in guards.items() for count in images},
        **{name: partial(gradients, differentiable) for name, differentiable in GRADIENTS.items()},
        "fingerprint": lambda: [torch.tensor(int(encoder.fingerprint(), 16) % 2**62)],
    }


def alike(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Same shape, and values that differ by at most ``rounding`` times the largest."""
    return one.shape == other.shape and bool((one - other).abs().max() <= rounding * other.abs().max())


def stress(clf: rc.ZeroShotClassifier, count: int) -> tuple[Counter[str], Counter[str]]:
    """Run all jobs in turn on eight threads, ``count`` times each; numbers of calls, and of answers with other bits."""
    work = jobs(clf)
    repeats = 3 if clf.device.type == "cuda" else 1  # a GPU records a graph when it meets a shape again
    expected = {name: [job() for _ in range(repeats)][-1] for name, job in work.items()}
    calls, wrong = Counter[str](), Counter[str]()

    def check(name: str) -> tuple[str, bool]:
        rounding = 1e-4 if clf.device.type == "cuda" and name in GRADIENTS else 0.0
        pairs = zip(work[name](), expected[name], strict=True)
        return name, all(
            alike(one.double().nan_to_num(), other.double().nan_to_num(), rounding) for one, other in pairs
        )

    with ThreadPoolExecutor(THREADS) as threads:
        for name, same in threads.map(check, count * list(work)):
            calls[name] += 1
            wrong[name] += not same
    return calls, +wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--count", type=int, default=20, help="calls of each job")
    args = parser.parse_args()
    clf = rc.ZeroShotClassifier(rc.load(args.model, compile=True), ["cat", "dog", "car", "tree"])
    began = time.monotonic()
    calls, wrong = stress(clf, args.count)
    found = {
        "model": args.model,
        "threads": THREADS,
        "seconds": round(time.monotonic() - began, 1),
        "calls": dict(calls),
    }
    result: dict[str, Any] = where() | found | {"answers": calls.total(), "other_bits": dict(wrong)}
    path = RESULTS / "serve.json"
    write(path.name, json.loads(path.read_text()) | {"threads": result})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
