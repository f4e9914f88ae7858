"""Our attacks beside those of other libraries, on the same photos, tower and budget: `bench/attack-libraries.json`.

    pip install --no-deps torchattacks foolbox eagerpy GitPython gitdb smmap adversarial-robustness-toolbox
    python benchmarks/attack_libraries.py DATA/oxford_pets/test HEADS/oxford_pets.npz --count 100

Images are compared as the libraries return them, before rounding to 8 bits. A small budget and few steps leave some
photos right, so that there is something to compare. On a CPU a smaller side takes a fraction of the time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

import foolbox
import numpy as np
import torch
import torchattacks
from art.attacks.evasion import ProjectedGradientDescentPyTorch
from art.estimators.classification import PyTorchClassifier
from pyautoattack.autopgd_base import APGDAttack
from torch import Tensor, nn

import react_clip as rc
from react_clip import noise
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import Problem, budgets
from react_clip.augment import smaller_copy
from react_clip.data import load_class_features
from react_clip.environment import device_name
from react_clip.storage import class_folders

LIBRARIES = {"torchattacks": "torchattacks", "foolbox": "foolbox", "ART": "adversarial-robustness-toolbox"}
LIBRARIES |= {"pyautoattack": "pyautoattack"}
A = rc.attacks


class Net(nn.Module):
    """CLIP with its classes, for pixels of any side in whole patches."""

    def __init__(self, clf: rc.ZeroShotClassifier) -> None:
        super().__init__()
        self.clf = clf

    def forward(self, pixels: Tensor) -> Tensor:
        return self.clf.logits(self.clf.encoder.encode(pixels))


def pairs(net: Net, eps: float, steps: int) -> list[tuple[str, str, rc.attacks.Attack, object]]:
    """Library, its attack, ours with the same settings, and theirs as a function of photos and labels."""
    step, device = eps / 4, str(net.clf.device)
    model = foolbox.PyTorchModel(net, bounds=(0, 1), device=device)

    def art(x: Tensor, y: Tensor) -> Tensor:
        np.random.seed(0)
        wrapped = PyTorchClassifier(
            net, nn.CrossEntropyLoss(), tuple(x.shape[1:]), len(net.clf.names), clip_values=(0, 1), device_type="cpu"
        )
        options = {"eps": eps, "eps_step": step, "max_iter": steps, "num_random_init": 1, "verbose": False}
        attack = ProjectedGradientDescentPyTorch(wrapped, batch_size=len(x), **options)
        return torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy()))

    ta = {"eps": eps, "alpha": step, "steps": steps}
    di, l2 = {**ta, "decay": 1.0, "resize_rate": 0.75, "diversity_prob": 1.0}, 255 * eps
    mi = A.DIFGSM(steps=steps, step_size=step, probability=0)
    linf_pgd, l2_pgd = (
        foolbox.attacks.LinfPGD(abs_stepsize=step, steps=steps),
        foolbox.attacks.L2PGD(abs_stepsize=l2 / 4, steps=steps),
    )
    pgd, seldom = A.PGD(steps=steps, step_size="eps/4"), {"resize_rate": 0.75, "diversity_prob": 0.0}
    return [
        ("torchattacks", "PGD", pgd, torchattacks.PGD(net, **ta)),
        ("torchattacks", "MIFGSM", mi, torchattacks.MIFGSM(net, decay=1.0, **ta)),
        ("torchattacks", "TIFGSM", mi.replace(smooth=7), torchattacks.TIFGSM(net, **{**di, **seldom})),
        ("torchattacks", "DIFGSM", mi.replace(probability=1), torchattacks.DIFGSM(net, **di)),
        ("foolbox", "LinfPGD", pgd, lambda x, y: linf_pgd(model, x, y, epsilons=eps)[1]),
        ("foolbox", "L2PGD", A.L2PGD(eps=l2, steps=steps), lambda x, y: l2_pgd(model, x, y, epsilons=l2)[1]),
        ("ART", "PGD", pgd, art),
        (
            "pyautoattack",
            "APGD-CE",
            A.APGD(steps=steps),
            lambda x, y: APGDAttack(net, n_iter=steps, eps=eps, loss="ce", device=device).perturb(x, y),
        ),
    ]


def ours(attack: rc.attacks.Attack, net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Our images before rounding."""
    rows, keys = torch.arange(len(x), device=x.device), noise.stream_keys(x, 0)
    radius = budgets(attack.eps, x, attack.most)
    spent, flat = torch.zeros(2, len(x), device=x.device), torch.full((len(x),), torch.nan, device=x.device)
    with torch.enable_grad():
        return attack.search(Problem(net, attack.ball(x, radius, keys), y, keys, rows, None, spent, flat)).detach()


def main() -> None:
    """Write one entry for each attack of each library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--eps", type=float, default=0.5, help="in 255ths")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bench/attack-libraries.json"))
    args = parser.parse_args()
    clip, head, eps = rc.load("clip-vit-b-16"), load_class_features(args.head), args.eps / 255
    net = Net(rc.ZeroShotClassifier.from_features(clip, head.names, head.features)).eval()
    folders = {folder: files for folder, files in class_folders(args.photos).items() if folder in head.folders}
    chosen = sorted(((at, folder, file) for folder, files in folders.items() for at, file in enumerate(files)))
    x = smaller_copy(clip.prepare([file for _, _, file in chosen[: args.count]]), args.side)
    y = torch.tensor([head.folders.index(folder) for _, folder, _ in chosen[: args.count]], device=x.device)
    rows = []
    result = {"schema": 1, "command": shlex.join(["python", *sys.argv]), "model": "clip-vit-b-16"}
    result |= {"device": device_name(x.device), "set": args.photos.parent.name, "photos": len(x), "side": args.side}
    result |= {"eps_255": args.eps, "steps": args.steps, "attacks": rows}
    result["versions"] = {name: importlib.metadata.version(package) for name, package in LIBRARIES.items()}
    result["versions"] |= {"torch": torch.__version__, "react-clip": rc.__version__}
    with torch.no_grad():
        result["right_clean"] = int((net(x).argmax(1) == y).sum())
    known: dict[str, Tensor] = {}
    for library, name, attack, theirs in pairs(net, eps, args.steps):
        torch.manual_seed(0)
        attack = attack if isinstance(attack, A.L2PGD) else attack.replace(eps=eps)
        if repr(attack) not in known:
            known[repr(attack)] = ours(attack, net, x, y)
        found = known[repr(attack)], theirs(x, y).detach().to(x)
        with torch.no_grad():
            logits = [net(images) for images in found]
        right = [answer.argmax(1) == y for answer in logits]
        row = {"library": library, "attack": name, "ours": repr(attack)}
        for who, answer, images, still in zip(("ours", "theirs"), logits, found, right, strict=True):
            row |= {f"right_{who}": int(still.sum()), f"margin_{who}": round(float(margin(answer, y).mean()), 3)}
            row[f"largest_{who}_255"] = round(255 * float((images - x).abs().max()), 3)
        row["photos_apart"] = int((right[0] != right[1]).sum())
        row["equal_pixels"] = round(float(((found[0] - found[1]).abs() < 1e-6).float().mean()), 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
