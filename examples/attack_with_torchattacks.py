"""torchattacks on CLIP and through a defence.

    pip install --no-deps torchattacks
    python examples/attack_with_torchattacks.py PHOTO ...

``as_module`` takes pixels in [0, 1] and gives logits: the library sees neither normalisation nor defence.
"""

import sys

import torch
import torchattacks

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
    torch.manual_seed(0)
    images: torch.Tensor = torchattacks.PGD(net, eps=EPS, alpha=EPS / 4, steps=STEPS)(x, y)
    return images


for name, net in nets.items():
    images = attack(net)
    right = ", ".join(f"{each} {int((nets[each](images).argmax(1) == y).sum())}/{len(y)}" for each in nets)
    print(f"made on {name}: right are {right}; pixels moved by {(images - x).abs().max() * 255:.2f}/255")
