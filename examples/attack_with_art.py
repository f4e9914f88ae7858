"""The Adversarial Robustness Toolbox on CLIP and through a defence.

    pip install adversarial-robustness-toolbox
    python examples/attack_with_art.py PHOTO ...

``as_module`` takes pixels in [0, 1] and gives logits: the library sees neither normalisation nor defence.
"""

import sys

import numpy as np
import torch
from art.attacks.evasion import ProjectedGradientDescentPyTorch
from art.estimators.classification import PyTorchClassifier

import react_clip as rc

EPS, STEPS = 4 / 255, 5
clip = rc.load("clip-vit-b-16")
clf = rc.ZeroShotClassifier(clip, ["cat", "coffee", "rocket", "dog"])
x = clip.prepare(sys.argv[1:])
y = clf(x).argmax(1)
nets = {
    "CLIP": rc.as_module(clf, rc.Undefended(), differentiable=True).eval(),
    "SecondLook": rc.as_module(clf, rc.SecondLook.for_encoder(clip), differentiable=True).eval(),
}


def attack(net: torch.nn.Module) -> torch.Tensor:
    """Images that the library makes against a network."""
    np.random.seed(0)
    wrapped = PyTorchClassifier(net, torch.nn.CrossEntropyLoss(), x.shape[1:], len(clf.names), clip_values=(0, 1))
    pgd = ProjectedGradientDescentPyTorch(wrapped, eps=EPS, eps_step=EPS / 4, max_iter=STEPS, verbose=False)
    return torch.from_numpy(pgd.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)


for name, net in nets.items():
    images = attack(net)
    right = ", ".join(f"{each} {int((nets[each](images).argmax(1) == y).sum())}/{len(y)}" for each in nets)
    print(f"made on {name}: right are {right}; pixels moved by {(images - x).abs().max() * 255:.2f}/255")
