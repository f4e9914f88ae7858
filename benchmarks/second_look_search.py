"""Compare rules for SecondLook on train photos, from stored features of many views.

    python benchmarks/second_look_search.py views DATA HEADS VIEWS [--sets NAME ...]  encode the views (on a GPU)
    python benchmarks/second_look_search.py rules VIEWS RESULT.json  compare rules on them (a CPU takes a minute)

DATA holds <set>/train/<class>/ photos and HEADS the class features <set>.npz. Attacks see only what plain CLIP gets
right; other images keep their clean answers, as in an evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import react_clip as rc
from react_clip import attacks, data, functional, noise
from react_clip.augment import Motion, smaller_copy
from react_clip.data import load_head
from react_clip.environment import device_name, versions

SETS = ("imagenet", "caltech101", "oxford_pets", "cifar10", "cifar100", "stl10", "eurosat", "dtd10")
PHOTOS, ATTACKED_PHOTOS, CALIBRATION_PHOTOS = 200, 50, 400
NATURAL = {
    "clean": None,
    "noise 0.02": attacks.Corruption(type="noise", severity=0.02),
    "noise 0.05": attacks.Corruption(type="noise", severity=0.05),
    "JPEG 30": attacks.Corruption(type="jpeg", severity=30),
    "blur 2": attacks.Corruption(type="blur", severity=2),
    "contrast 0.4": attacks.Corruption(type="contrast", severity=0.4),
    "brightness 0.4": attacks.Corruption(type="brightness", severity=0.4),
}
ATTACKS = {
    **{f"PGD {eps}": attacks.PGD(eps=eps / 255) for eps in (1, 4, 8, 16)},
    "PGD eps/4 16": attacks.PGD(eps=16 / 255, step_size="eps/4"),
    **{f"APGD {eps}": attacks.APGD(eps=eps / 255) for eps in (1, 4)},
    **{f"C&W {eps}": attacks.CW(eps=eps / 255) for eps in (1, 4)},
    "stopped PGD 4": attacks.PGD(eps=4 / 255, steps=40, stop="success"),
    "stopped PGD 4, margin 5": attacks.PGD(eps=4 / 255, steps=40, stop="success", margin=5),
    "FAB 4": attacks.FAB(eps=4 / 255),
    "Square 8, 300 queries": attacks.Square(eps=8 / 255, queries=300),
}
CONDITIONS = {**NATURAL, **ATTACKS}
VIEWS = (
    *("f", "128", "144", "160", "176", "192", "moved", "moved+.05", "other+.05"),
    *("160 moved", "160 other+.05", "176 moved", "192 moved", "128 moved", "144 moved"),
)
SHARES = {"128": 65, "144": 82, "160": 101, "176": 122, "192": 145}  # tokens, of 197 at 224 pixels


def views_of(encoder: rc.Encoder, pixels: Tensor) -> Tensor:
    """Unit features ``[B, V, D]`` of the views that rules combine."""
    keys = noise.fork(noise.stream_keys(pixels, 0), torch.arange(4, device=pixels.device)[:, None])
    moved, other = Motion()(pixels, keys[0]), Motion()(pixels, keys[1])
    sigma = torch.full_like(pixels[:, 0, 0, 0], 0.05)
    noisy, other_noisy = noise.noisy_view(moved, keys[2], sigma), noise.noisy_view(other, keys[3], sigma)
    smaller = [smaller_copy(pixels, size) for size in (128, 144, 160, 176, 192)]
    views = [pixels, *smaller, moved, noisy, other_noisy, smaller_copy(moved, 160), smaller_copy(other_noisy, 160)]
    views += [smaller_copy(moved, size) for size in (176, 192, 128, 144)]
    return torch.stack([encoder.encode_views(view) for view in views], 1)


@torch.no_grad()
def encode_views(root: Path, heads: Path, out: Path, sets: list[str]) -> None:
    """Write the views of every set under every condition, as int8 with one scale per dimension."""
    encoder = rc.load("clip-vit-b-16", dtype="bf16" if torch.cuda.is_available() else "fp32")
    out.mkdir(parents=True, exist_ok=True)
    for name in sets:
        photos, head = data.load(name, root=root, split="train").align(load_head(heads / f"{name}.npz"))
        clf = rc.ZeroShotClassifier.from_features(encoder, head.names, head.features, unique=False)
        chosen = photos.take(PHOTOS)
        pixels, labels = encoder.prepare([photo.source for photo in chosen.photos]), torch.tensor(chosen.labels)
        fewer = {photo.id for photo in photos.take(ATTACKED_PHOTOS).photos}
        attacked = torch.tensor([i for i, photo in enumerate(chosen.photos) if photo.id in fewer])
        found: dict[str, Tensor] = {}
        for condition, attack in CONDITIONS.items():
            rows = attacked if condition in ATTACKS else torch.arange(len(labels))
            images, y = pixels[rows.to(pixels.device)], labels[rows].to(pixels.device)
            images = images if attack is None else attack(clf, images, y).images
            found[condition] = torch.cat([views_of(encoder, part) for part in images.split(100)])
        print(f"{name}: {len(pixels)} photos", flush=True)
        if name in ("imagenet", "caltech101"):
            more = photos.take(CALIBRATION_PHOTOS, seed=1)
            batches = torch.tensor(range(len(more))).split(100)
            found["calibration"] = torch.cat(
                [views_of(encoder, encoder.prepare([more.photos[i].source for i in batch])) for batch in batches]
            )
        scale = torch.stack([features.abs().amax((0, 1)) for features in found.values()]).amax(0) / 127
        stored = {key: (value / scale).round().to(torch.int8).cpu().numpy() for key, value in found.items()}
        text = head.features.numpy().astype(np.float16)
        arrays = {"scale": scale.cpu().numpy(), "labels": labels.numpy(), "attacked": attacked.numpy(), "text": text}
        np.savez(out / f"{name}.npz", **arrays, **stored)
    about = {"command": " ".join(sys.argv), "device": device_name(encoder.device), "versions": versions()}
    (out / "about.json").write_text(json.dumps(about))


class Views:
    """The stored views of all sets: features ``[B, V, D]`` and logits ``[B, V, K]`` by condition."""

    def __init__(self, folder: Path) -> None:
        self.features: dict[str, dict[str, Tensor]] = {}
        self.logits: dict[str, dict[str, Tensor]] = {}
        self.labels: dict[str, dict[str, Tensor]] = {}
        for name in SETS:
            stored = np.load(folder / f"{name}.npz")
            scale, text = torch.from_numpy(stored["scale"]), torch.from_numpy(stored["text"]).float()
            labels = torch.from_numpy(stored["labels"])
            attacked = torch.from_numpy(stored["attacked"])
            conditions = [*CONDITIONS, *(["calibration"] if "calibration" in stored.files else [])]
            features = {key: functional.normalize(torch.from_numpy(stored[key]).float() * scale) for key in conditions}
            logits = {key: 100 * value @ text.T for key, value in features.items()}
            wrong = (logits["clean"][:, 0].argmax(1) != labels)[attacked]
            for key in ATTACKS:
                features[key][wrong] = features["clean"][attacked][wrong]
                logits[key][wrong] = logits["clean"][attacked][wrong]
            self.features[name], self.logits[name] = features, logits
            self.labels[name] = {key: labels[attacked] if key in ATTACKS else labels for key in CONDITIONS}

    def quantile(self, look: str, weight: float, share: float) -> float:
        """Score below which this share of the calibration photos lies."""
        sets = ("imagenet", "caltech101")
        parts = [score(self.features[s]["calibration"], self.logits[s]["calibration"], look, weight) for s in sets]
        return float(torch.quantile(torch.cat(parts), share))


def score(features: Tensor, logits: Tensor, view: str, weight: float) -> Tensor:
    """Distance of a view's feature from the image's, plus ``weight`` times J between their predictions."""
    index = VIEWS.index(view)
    distance = (features[:, index] - features[:, 0]).norm(dim=1)
    return distance + weight * functional.js_divergence(logits[:, 0], logits[:, index])


Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From features ``[B, V, D]`` and logits ``[B, V, K]`` to the answer's logits ``[B, K]`` and the passes ``[B]``."""


def cost(view: str) -> float:
    """Passes of a view: its share of the tokens."""
    return SHARES.get(view[:3], 197) / 197


def towards(logits: Tensor, views: tuple[str, ...], strength: float) -> Tensor:
    """Logits of f + strength (mean of views - f), up to a positive factor per image."""
    anchor = logits[:, [VIEWS.index(view) for view in views]].mean(1)
    return logits[:, 0] + strength * (anchor - logits[:, 0])


def two_gates(t1: float, t2: float) -> Rule:
    """The rule of the prototype: two scores with J, a moved view, and a noisy one."""

    def rule(features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        suspicious = score(features, logits, "160", 0.2) >= t1
        differs = logits[:, 0].argmax(1) != logits[:, VIEWS.index("160")].argmax(1)
        attacked = suspicious & (score(features, logits, "moved", 0.2) >= t2)
        doubtful = towards(logits, ("160", "moved"), 0.7)
        answer = torch.where(differs[:, None], doubtful, logits[:, 0])
        answer = torch.where(attacked[:, None], towards(logits, ("160", "moved", "other+.05"), 2.0), answer)
        return answer, 1 + cost("160") + (suspicious | differs).float() + attacked.float()

    return rule


def one_gate(
    threshold: float,
    look: str = "160",
    extra: str = "160 moved",
    doubtful: str = "160 moved",
    weight: float = 0.0,
    alpha: float = 2.0,
    blend: float = 1.0,
    far: float = 0.0,
) -> Rule:
    """One score. ``extra`` is the second view of suspicious images, ``doubtful`` that of those whose look differs.

    Doubtful images whose score is below ``far`` get no second view, and their answer moves 0.6 of the way to the look.
    """

    def rule(features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        distance = score(features, logits, look, weight)
        attacked = distance >= threshold
        differs = (logits[:, 0].argmax(1) != logits[:, VIEWS.index(look)].argmax(1)) & ~attacked
        near = differs & (distance < far)
        differs = differs & ~near
        views = (look, doubtful) if doubtful else (look,)
        answer = torch.where(differs[:, None], towards(logits, views, blend), logits[:, 0])
        answer = torch.where(near[:, None], towards(logits, (look,), 0.6), answer)
        answer = torch.where(attacked[:, None], towards(logits, (look, extra), alpha), answer)
        spent = attacked * cost(extra) + differs * (cost(doubtful) if doubtful else 0.0)
        return answer, 1 + cost(look) + spent

    return rule


def confirmed(rule: Rule, look: str, threshold: float) -> Rule:
    """A rule for those images alone whose ``look`` lies as far away as ``threshold``, or has another best class."""

    def screened(features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        differs = logits[:, 0].argmax(1) != logits[:, VIEWS.index(look)].argmax(1)
        suspicious = (score(features, logits, look, 0.0) >= threshold) | differs
        answer, passes = rule(features, logits)
        spent = 1 + cost(look) + suspicious * (passes - 1)
        return torch.where(suspicious[:, None], answer, logits[:, 0]), spent

    return screened


def rules(views: Views) -> Iterator[tuple[str, str, Rule]]:
    """The rules to compare: name of the varied constant, its value, and the rule."""
    gate = views.quantile("160", 0.0, 0.97)
    yield "rule", "plain CLIP", lambda features, logits: (logits[:, 0], torch.ones(len(logits)))
    yield "rule", "two gates with J, full-size views and noise (the prototype)", two_gates(0.44, 0.42)
    with_j = views.quantile("160", 0.4, 0.97)
    yield (
        "rule",
        "one gate with J, small noisy view, blend 0.7",
        one_gate(with_j, extra="160 other+.05", doubtful="", weight=0.4, blend=0.7),
    )
    yield (
        "rule",
        "one gate without J, small noisy view, blend 0.7",
        one_gate(gate, extra="160 other+.05", doubtful="", blend=0.7),
    )
    yield "rule", "one gate without J, small moved view (SecondLook)", one_gate(gate)
    for share in (0.9, 0.95, 0.97, 0.98, 0.99):
        yield "share of clean photos below t", f"{share:g}", one_gate(views.quantile("160", 0.0, share))
    for look in ("144", "160", "176", "192"):
        yield "size of the look", look, one_gate(views.quantile(look, 0.0, 0.97), look=look)
    for extra in ("moved", "other+.05", "160 moved", "160 other+.05"):
        yield "second view", extra, one_gate(gate, extra=extra, doubtful=extra)
    for weight in (0.0, 0.2, 0.4):
        yield "weight of J", f"{weight:g}", one_gate(views.quantile("160", weight, 0.97), weight=weight)
    for alpha in (1.5, 2.0, 2.5, 3.0):
        yield "alpha", f"{alpha:g}", one_gate(gate, alpha=alpha)
    for blend in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.3):
        yield "blend", f"{blend:g}", one_gate(gate, blend=blend)
    for doubtful in ("", "moved", "160 moved"):
        for share in (0.95, 0.97, 0.98):
            for blend in (0.5, 0.6, 0.7, 0.8, 1.0):
                threshold = views.quantile("160", 0.0, share)
                name = f"share {share:g}, blend {blend:g}, doubtful {doubtful or 'look only'}"
                yield "together", name, one_gate(threshold, doubtful=doubtful, blend=blend)
    shipped = one_gate(views.quantile("176", 0.0, 0.97), look="176")
    yield "second view of the rule that we ship", "160 moved", shipped
    for small in ("128 moved", "144 moved"):
        rule = one_gate(views.quantile("176", 0.0, 0.97), look="176", extra=small, doubtful=small)
        yield "second view of the rule that we ship", small, rule
    for far in (0.25, 0.3, 0.35, 0.4, 0.5):
        rule = one_gate(views.quantile("176", 0.0, 0.97), look="176", far=far)
        yield "distance from which doubtful images get the second view", f"{far:g}", rule
    for look in ("128", "144", "160"):
        for share in (0.9, 0.95, 0.97):
            rule = confirmed(shipped, look, views.quantile(look, 0.0, share))
            yield "look before the one that we ship", f"{look}, {share:g} of clean photos below t", rule
    for look, small in (("176", "176 moved"), ("192", "192 moved")):
        threshold = views.quantile(look, 0.0, 0.97)
        for blend in (0.5, 0.7, 1.0):
            rule = one_gate(threshold, look=look, extra=small, doubtful=small, blend=blend)
            yield "size of both looks", f"{look}, blend {blend:g}", rule


def compare_rules(folder: Path, out: Path) -> None:
    """Accuracy in per cent, the mean over sets, of every rule under every condition, and its passes."""
    views = Views(folder)
    rows = []
    for group, value, rule in rules(views):
        row: dict[str, object] = {"group": group, "value": value}
        accuracies, passes = {}, {}
        for condition in CONDITIONS:
            answers = {s: rule(views.features[s][condition], views.logits[s][condition]) for s in SETS}
            right = [float((answers[s][0].argmax(1) == views.labels[s][condition]).float().mean()) for s in SETS]
            accuracies[condition] = 100 * float(np.mean(right))
            passes[condition] = float(np.mean([float(answers[s][1].mean()) for s in SETS]))
        row |= {"accuracy": accuracies, "passes_clean": passes["clean"]}
        row["passes_attacked"] = float(np.mean([passes[key] for key in ATTACKS]))
        row["natural"] = float(np.mean([accuracies[key] for key in NATURAL]))
        row["attacked"] = float(np.mean([accuracies[key] for key in ATTACKS]))
        rows.append(row)
        numbers = (accuracies["clean"], row["natural"], row["attacked"], row["passes_clean"], row["passes_attacked"])
        print(f"{group:30} {value:60}", *(f"{number:6.2f}" for number in numbers))
    about = json.loads((folder / "about.json").read_text())
    about |= {"rules": " ".join(sys.argv), "sets": SETS, "photos": PHOTOS, "attacked": ATTACKED_PHOTOS}
    about["threshold"] = views.quantile("160", 0.0, 0.97)
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("views", "rules"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    arguments = parser.parse_args()
    if arguments.step == "views":
        encode_views(*arguments.paths, arguments.sets)
    else:
        compare_rules(*arguments.paths)
