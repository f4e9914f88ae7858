from __future__ import annotations

import pytest
import torch

from react_clip.attacks import losses

GENERATOR = torch.Generator().manual_seed(3)
LOGITS = 5 * torch.randn(32, 6, generator=GENERATOR)
LABELS = torch.randint(6, (32,), generator=GENERATOR)


def brute_margin(row: list[float], label: int) -> float:
    return max(value for j, value in enumerate(row) if j != label) - row[label]


def test_margin_and_dlr_match_a_plain_loop() -> None:
    margins = [brute_margin(row, label) for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True)]
    spreads = [sorted(row)[-1] - sorted(row)[-3] for row in LOGITS.tolist()]
    torch.testing.assert_close(losses.margin(LOGITS, LABELS), torch.tensor(margins))
    expected = torch.tensor([m / s for m, s in zip(margins, spreads, strict=True)])
    torch.testing.assert_close(losses.dlr(LOGITS, LABELS), expected)


@pytest.mark.parametrize("loss", [losses.dlr, losses.best_dlr_targeted])
@pytest.mark.parametrize("classes", [3, 4, 6])
def test_dlr_ignores_shift_and_scale(loss: losses.Loss, classes: int) -> None:
    logits, labels = LOGITS[:, :classes], LABELS % classes
    torch.testing.assert_close(loss(7 * logits - 3, labels), loss(logits, labels), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [losses.dlr, losses.best_dlr_targeted])
def test_two_classes_fall_back_to_the_margin(loss: losses.Loss) -> None:
    logits, labels = LOGITS[:, :2], LABELS % 2
    assert torch.equal(loss(logits, labels), losses.margin(logits, labels))


def test_targeted_dlr_with_three_classes_uses_the_untargeted_denominator() -> None:
    logits, labels = LOGITS[:, :3], LABELS % 3
    runner_up = losses.ranked_targets(logits, labels, 1)[:, 0]
    torch.testing.assert_close(losses.dlr_targeted(logits, labels, runner_up), losses.dlr(logits, labels))


def test_best_targeted_dlr_is_the_maximum_over_targets() -> None:
    targets = losses.ranked_targets(LOGITS, LABELS, 99)
    assert targets.shape == (32, 5)
    values = torch.stack([losses.dlr_targeted(LOGITS, LABELS, t) for t in targets.unbind(1)]).amax(0)
    torch.testing.assert_close(losses.best_dlr_targeted(LOGITS, LABELS), values)


def test_targets_are_the_wrong_classes_strongest_first() -> None:
    targets = losses.ranked_targets(LOGITS, LABELS, 3)
    assert not bool((targets == LABELS[:, None]).any())
    values = LOGITS.gather(1, targets)
    assert bool((values[:, :-1] >= values[:, 1:]).all())
    strongest = losses.margin(LOGITS, LABELS) + LOGITS.gather(1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(values[:, 0], strongest)
