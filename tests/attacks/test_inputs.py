"""Bad input is refused in one clear line; configurations can be written and read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from react_clip import attacks
from react_clip.attacks import APGD, FAB, PGD, Adaptive, Attack, AutoAttack, Square, Suite
from react_clip.attacks.problem import Model
from react_clip.errors import ReactClipError

X = torch.full((2, 3, 4, 4), 0.5)
Y = torch.tensor([0, 1])


def linear(x: Tensor) -> Tensor:
    return x.flatten(1)[:, :4]


def refuse(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ReactClipError, match=re.escape(text)):
        call()


@pytest.mark.parametrize("kind", [PGD, APGD, FAB, Square, AutoAttack])
def test_eps_in_255ths_is_refused(kind: type[Attack]) -> None:
    refuse("write 8/255", lambda: kind(eps=8))
    refuse("write 8/255", lambda: kind()(linear, X, Y, eps=8.0))
    refuse("write 8/255", lambda: kind()(linear, X, Y, eps=torch.tensor([0.1, 8.0])))


@pytest.mark.parametrize(
    ("text", "x", "y"),
    [
        ("shape (3, 4, 4)", X[0], Y),
        ("divide bytes by 255", (X * 255).byte(), Y),
        ("pixels span 0.5 to 127.5", torch.cat([X[:1], 255 * X[:1]]), Y),
        ("labels have shape (1,)", X, Y[:1]),
        ("class indices from 0", X, Y.float()),
        ("class indices from 0", X, Y - 1),
        ("at least 5 classes, as a label is 4", X, Y + 3),
    ],
)
def test_bad_images_and_labels(text: str, x: Tensor, y: Tensor) -> None:
    refuse(text, lambda: PGD(steps=1)(linear, x, y))


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("NaN or infinite values", lambda x: linear(x) * torch.nan),
        ("2 images with shape (2,)", lambda x: linear(x)[:, 0]),
        ("2 images with shape (1, 4)", lambda x: linear(x)[:1]),
        ("at least 2 classes", lambda x: linear(x)[:, :1]),
    ],
)
def test_bad_models(text: str, model: Model) -> None:
    refuse(text, lambda: PGD(steps=1)(model, X, Y * 0))
    refuse(text, lambda: Square(queries=2)(model, X, Y * 0))


def test_budgets_per_image() -> None:
    refuse("eps has shape (3,)", lambda: PGD()(linear, X, Y, eps=torch.zeros(3)))
    refuse("eps is nan", lambda: PGD()(linear, X, Y, eps=torch.tensor([0.1, torch.nan])))
    refuse("eps is -0.1", lambda: PGD()(linear, X, Y, eps=torch.tensor([0.1, -0.1])))
    refuse("eps is '4/255'", lambda: PGD()(linear, X, Y, eps="4/255"))  # type: ignore[arg-type]
    scalar, number = (PGD(steps=2)(linear, X, Y, eps=e).images for e in (torch.tensor(0.25), 0.25))
    assert torch.equal(scalar, number)


def test_models_without_gradients_need_square() -> None:
    def blind(x: Tensor) -> Tensor:
        with torch.no_grad():
            return linear(x)

    for attack in (PGD(steps=1), APGD(steps=1), FAB(steps=1)):
        refuse("use attacks.Square", lambda attack=attack: attack(blind, X, Y * 0))
    assert Square(eps=0.1, queries=50)(blind, X, Y).success.all()


def test_broken_gradients_are_refused() -> None:
    # sqrt has an infinite slope at 0, and 0 * inf is NaN: finite logits, useless gradient.
    refuse("gradient holds NaN", lambda: PGD(steps=1)(lambda x: linear(x) + (0 * x).sum().sqrt(), X, Y))


# --- configurations ---------------------------------------------------------------------------------------------------


def test_kinds_of_earlier_recipes_are_read() -> None:
    cw = PGD(eps=8 / 255, steps=5, loss="margin")
    assert attacks.CW(eps=8 / 255, steps=5) == attacks.from_dict({"kind": "cw", "eps": "8/255", "steps": 5}) == cw
    for objective in ("through", "both", "evade", "bpda", "feature"):
        new = Adaptive(objective=objective, steps=7)  # type: ignore[arg-type]
        assert attacks.from_dict({"kind": f"adaptive-{objective}", "steps": 7}) == new
        assert new.name == f"adaptive-{objective}-7"
    suite = Suite.from_dict({"members": ["adaptive-through", {"kind": "adaptive-evade", "lambdas": [1, 10]}]})
    assert [member.name for member in suite.members] == ["adaptive-through-100", "adaptive-evade-100"]


SUITE = {"kind": "adaptive-suite"}


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("attack 'deepfool' does not exist; choose one of adaptive, ", {"kind": "deepfool"}),
        ("step_size is 'eps/3'", {"kind": "pgd", "step_size": "eps/3"}),
        ("eps is", {"kind": "corruption", "eps": "4/255"}),
        ("'adaptive-both-100' is a suite,", SUITE | {"members": ["adaptive-both", "adaptive-both"]}),
        ("give eps to the suite", SUITE | {"members": [{"kind": "adaptive-both", "eps": "1/255"}]}),
        ("'adaptive-suite-8' is a suite", SUITE | {"members": ["adaptive-suite"]}),
        ("'pgd-10' is a suite, does not know the defence", SUITE | {"members": ["pgd"]}),
    ],
)
def test_bad_configurations(text: str, config: dict[str, Any]) -> None:
    refuse(text, lambda: attacks.from_dict(config))
