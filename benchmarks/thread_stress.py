"""Eight threads share an encoder and its defences: every answer must have the bits that it has in one thread.

    python benchmarks/thread_stress.py --minutes 5

The result is the entry "threads" of benchmarks/results/serve.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that all threads add up floats in the same order

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from _common import RESULTS, where, write
from torch import Tensor

import react_clip as rc

THREADS = 8
Job = Callable[[], list[Tensor]]


def jobs(clf: rc.ZeroShotClassifier) -> dict[str, Job]:
    """Everything that threads may do with one classifier: features, defended answers, gradients, copies of weights."""
    encoder = clf.encoder
    full = encoder.image_size
    small = encoder.size_near(176 / 224) or full
    generator = torch.Generator().manual_seed(0)
    images = {count: torch.rand(count, 3, full, full, generator=generator).to(encoder.device) for count in (1, 2, 3)}
    guards = {"ReACT": rc.ReACT(tau=0.0, views=2), "SecondLook": rc.SecondLook(threshold=0.0), "AGC": rc.defenses.AGC()}

    def features(count: int) -> list[Tensor]:
        return encoder.encode([images[count], images[count][..., :small, :small].contiguous()])

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
        **{f"{name}, {count}": partial(answers, guard, count) for name, guard in guards.items() for count in (1, 3)},
        "gradients": partial(gradients, False),
        "gradients with checkpoints": partial(gradients, True),
        "fingerprint": lambda: [torch.tensor(int(encoder.fingerprint(), 16) % 2**62)],
    }


def stress(clf: rc.ZeroShotClassifier, enough: Callable[[int], bool]) -> tuple[Counter[str], Counter[str]]:
    """Run all jobs in turn on eight threads until ``enough(number of calls)``; counts of calls, and of other bits."""
    work = jobs(clf)
    repeats = 3 if clf.device.type == "cuda" else 1  # a GPU records a graph when it meets a shape again
    expected = {name: [job() for _ in range(repeats)][-1] for name, job in work.items()}
    calls, wrong = Counter[str](), Counter[str]()

    def names() -> Iterable[str]:
        for number, name in enumerate(itertools.cycle(work)):
            if enough(number):
                return
            yield name

    def check(name: str) -> tuple[str, bool]:
        found = work[name]()
        same = all(
            one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
            for one, other in zip(found, expected[name], strict=True)
        )
        return name, same

    turns = iter(names())
    with ThreadPoolExecutor(THREADS) as threads:
        waiting = [threads.submit(check, name) for name in itertools.islice(turns, THREADS)]
        while waiting:
            name, same = waiting.pop(0).result()
            calls[name] += 1
            wrong[name] += not same
            waiting += [threads.submit(check, name) for name in itertools.islice(turns, 1)]
    return calls, +wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--minutes", type=float, default=5.0)
    args = parser.parse_args()
    clf = rc.ZeroShotClassifier(rc.load(args.model, compile=True), ["cat", "dog", "car", "tree"])
    until = time.monotonic() + 60 * args.minutes
    calls, wrong = stress(clf, lambda number: time.monotonic() > until)
    found = {"model": args.model, "threads": THREADS, "minutes": args.minutes, "calls": dict(calls)}
    result: dict[str, Any] = where() | found | {"answers": calls.total(), "other_bits": dict(wrong)}
    path = RESULTS / "serve.json"
    write(path.name, json.loads(path.read_text()) | {"threads": result})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
