"""Shared by the ideas of `tried.py`: photos, towers, times of alternatives by turns, and how often answers agree."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import react_clip as rc
from react_clip.attacks import PGD
from react_clip.encoders.base import Encoder
from react_clip.encoders.loading import resolve_device, resolve_dtype
from react_clip.encoders.vision import VisionEncoder
from react_clip.environment import device_name, versions

Entry = dict[str, Any]
Ways = dict[str, Callable[[], object]]

MODEL = "clip-vit-b-16"
SIZES = (224, 176, 160)
"""Sides of the image, the look and the moved look."""


class Setting:
    """Options, photos and classifiers of a run; photos are read and attacked once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name = ""  # of the idea that is being measured
        self.device, self.dtype = resolve_device(args.device), resolve_dtype(args.dtype)
        self.gpu = self.device.type == "cuda"
        self.batch: int = args.batch or (128 if self.gpu else 4)
        self._known_answers: dict[rc.ZeroShotClassifier, dict[str, dict[str, Tensor]]] = {}
        self.rounds: int = args.rounds or (7 if self.gpu else 3)
        if args.threads:
            torch.set_num_threads(args.threads)
        # One thread counts its own processor time, which other programs on the machine do not change.
        self.clock = time.process_time if not self.gpu and args.threads == 1 else time.perf_counter

    def load(self, **options: Any) -> VisionEncoder:
        """Another copy of the tower."""
        encoder = rc.load(MODEL, device=self.device, **{"dtype": self.dtype, **options})
        assert isinstance(encoder, VisionEncoder)
        return encoder

    def classifier(self, encoder: Encoder) -> rc.ZeroShotClassifier:
        """ImageNet's classes."""
        with np.load(self.args.heads / "imagenet.npz") as head:
            names, features = head["folders"].tolist(), torch.from_numpy(head["features"])
        return rc.ZeroShotClassifier.from_features(encoder, names, features.to(encoder.device))

    @cached_property
    def clf(self) -> rc.ZeroShotClassifier:
        """ImageNet's classes on the tower as shipped, which ideas are compared with; on a GPU with CUDA graphs."""
        return self.classifier(self.load(compile=True))

    @cached_property
    def clean(self) -> Tensor:
        """``--photos`` photos ``[N, 3, S, S]`` in [0, 1], spread over the folder; ends the run if it has fewer."""
        files = sorted(path for path in self.args.data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        if not self.batch <= self.args.photos <= len(files):
            sys.exit(
                f"{self.args.data} has {len(files)} photos; --photos is {self.args.photos} and must not exceed them, "
                f"nor --batch ({self.batch}) exceed --photos"
            )
        files = files[:: len(files) // self.args.photos][: self.args.photos]
        return self.clf.encoder.prepare(files)

    @cached_property
    def attacked(self) -> Tensor:
        """The first ``--attacked`` photos, attacked with a budget of 4/255."""
        return self.attacked_at(4 / 255)

    def attacked_at(self, eps: float) -> Tensor:
        """The first ``--attacked`` photos, attacked by PGD against the answers of undefended CLIP."""
        attack, parts = PGD(eps=eps, steps=10), self.clean[: self.args.attacked].split(64)
        with torch.enable_grad():
            return torch.cat([attack(self.clf, part, self.clf(part).argmax(-1), seed=0).images for part in parts])

    @property
    def batches(self) -> list[int]:
        """Batch sizes that are measured."""
        return sorted({1, 8, self.batch} if self.gpu else {1, self.batch})

    def turns(self, ways: Ways, images: int) -> dict[str, float]:
        """Milliseconds per image of each way: the median over rounds in which they take turns."""
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for name, way in ways.items():
                self.wait()
                begin = self.clock()
                way()
                self.wait()
                if turn:  # the first round warms up
                    spent[name].append(self.clock() - begin)
        return {name: 1000 * statistics.median(times) / images for name, times in spent.items()}

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def defended(self, clf: rc.ZeroShotClassifier, images: Tensor, batch: int) -> Callable[[], object]:
        """A call that answers all images with SecondLook and reads the labels."""
        guard = rc.SecondLook(max_batch=batch)
        return lambda: [guard(clf, part, seed=0).labels.cpu() for part in images.split(batch)]

    def compare(self, before: rc.ZeroShotClassifier, after: rc.ZeroShotClassifier) -> dict[str, Any]:
        """Milliseconds per image of the plain encoder and of SecondLook by batch size, each before and after."""
        found: dict[str, Any] = {}
        for batch in self.batches:
            images = self.clean[: max(batch, 32 if self.gpu else 1)]
            images = self.clean if self.gpu and batch == self.batch else images
            for name, of in (("plain", self.plain), ("second look", self.defended)):
                ways = {"before": of(before, images, batch), "after": of(after, images, batch)}
                found[f"{name}, batch {batch}"] = self.turns(ways, len(images))
        return found

    def plain(self, clf: rc.ZeroShotClassifier, images: Tensor, batch: int) -> Callable[[], object]:
        """A call that encodes all images."""
        return lambda: [clf.encoder.encode_views(part) for part in images.split(batch)]

    def agreement(self, clf: rc.ZeroShotClassifier, exact: rc.ZeroShotClassifier | None = None) -> dict[str, Any]:
        """Share of photos for which SecondLook decides and answers as with ``exact``, or the encoder in place."""
        exact = exact or self.clf
        kinds = {"clean": self.clean, **({"attacked": self.attacked} if self.args.attacked else {})}
        if exact not in self._known_answers:
            self._known_answers[exact] = {kind: self.answers(exact, images) for kind, images in kinds.items()}
        known = self._known_answers[exact]
        return {kind: agree(known[kind], self.answers(clf, images)) for kind, images in kinds.items()}

    def answers(self, clf: rc.ZeroShotClassifier, images: Tensor) -> dict[str, Tensor]:
        """Decisions and answers of SecondLook."""
        guard = rc.SecondLook(max_batch=self.batch)
        parts = []
        for number, part in enumerate(images.split(self.batch)):
            parts.append(guard(clf, part, seed=0))
            if not self.gpu and number % 10 == 9:
                print(f"   {(number + 1) * self.batch} of {len(images)} photos", flush=True)
        names = ("branch", "labels", "drift", "features")
        return {name: torch.cat([getattr(out, name) for out in parts]).cpu() for name in names}

    def entry(self, idea: str, what: str, before: float, after: float, **more: Any) -> Entry:
        """An entry of the result file; ``ratio`` below 1 is faster."""
        return {
            "idea": idea,
            "what": what,
            "unit": "ms per image",
            "before": before,
            "after": after,
            "ratio": after / before,
            **more,
            "command": shlex.join(["python", *(word for word in sys.argv if word not in self.args.ideas), self.name]),
            "device": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "clock": self.clock.__name__,
            "batch": self.batch,
            "rounds": self.rounds,
            "versions": versions(),
        }


def agree(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Any]:
    """Shares of equal decisions and answers, and how far the features lie apart."""

    def share(name: str) -> float:
        return (one[name] == other[name]).double().mean().item()

    return {
        "photos": len(one["branch"]),
        "same_gate": share("branch"),
        "same_label": share("labels"),
        "largest_change_of_drift": (one["drift"] - other["drift"]).abs().max().item(),
        "smallest_cosine": (one["features"].double() * other["features"].double()).sum(1).min().item(),
    }
