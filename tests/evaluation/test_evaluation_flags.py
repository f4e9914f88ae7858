"""Flags of a table's cells, each from the rows that raise it and from rows that just do not."""

from __future__ import annotations

from typing import Any

import pytest

from react_clip.evaluation.flags import flags

pd = pytest.importorskip("pandas")

CELL = ("pgd-40", 4 / 255, "guard")


def rows(attack: str = "pgd-40", draws: tuple[str, ...] = ("1" * 60 + "0" * 40,), **columns: Any) -> Any:
    """100 photos; each draw says which of them are right (1)."""
    frames = []
    for draw, answers in enumerate(draws):
        right = [answer == "1" for answer in answers]
        frame = pd.DataFrame({"index": range(len(right)), "correct": right, "robust": right, "draw": draw})
        frames.append(frame.assign(dataset="pets", attack=attack, eps=4 / 255, defense="guard", attacked=True))
    return pd.concat(frames).assign(**{"backward_passes": 0.0, "flat": 0.0, "softmax": False, **columns})


def test_a_sound_cell_has_none() -> None:
    table = pd.concat([rows(), rows("pgd-100", ("1" * 58 + "0" * 42,)), rows("square-1000", ("1" * 60 + "0" * 40,))])
    found = flags(table)
    assert found[CELL] == ()
    assert set(found) == {(attack, 4 / 255, "guard") for attack in ("pgd-40", "pgd-100", "square-1000")}


@pytest.mark.parametrize(
    ("table", "flag"),
    [
        ([rows(draws=("1" * 60 + "0" * 40, "1" * 59 + "0" * 41))], "random"),
        ([rows(draws=("1" * 60 + "0" * 40, "0" * 30 + "1" * 30 + "0" * 40))], "random"),
        ([rows(draws=("1" * 60 + "0" * 40, "0" * 60 + "1" * 40))], "random, and that decides"),
        ([rows(softmax=True)], "softmax output"),
        ([rows(flat=[1.0] * 11 + [0.0] * 89)], "zero gradient"),
        ([rows(), rows("square-1000", ("1" * 59 + "0" * 41,))], "a black box beats it"),
        ([rows(), rows("adaptive-square-200", ("1" * 59 + "0" * 41,))], "a black box beats it"),
        ([rows(backward_passes=1.0)], "optimises at inference"),
        ([rows(), rows("pgd-100", ("1" * 57 + "0" * 43,))], "not converged"),
        ([rows(), rows(draws=("1" * 57 + "0" * 43,)).assign(eps=1 / 255)], "a smaller budget beats it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_flag(table: list[Any], flag: str) -> None:
    assert flags(pd.concat(table))[CELL] == (flag,)


def test_what_is_another_attack_says_nothing_about_convergence() -> None:
    weaker = ("1" * 10 + "0" * 90,)
    for other in ("cw-100", "pgd-100-quarter", "pgd-10", "fab-t-100"):
        assert flags(pd.concat([rows(), rows(other, weaker)]))[CELL] == ()
    at_another_budget = rows("pgd-100", weaker).assign(eps=8 / 255)
    assert flags(pd.concat([rows(), at_another_budget]))[CELL] == ()


def test_older_runs_without_these_columns_and_clean_photos() -> None:
    table = rows(flat=[1.0] * 100).drop(columns=["flat", "softmax"])
    clean = rows("clean").assign(eps=0.0, attacked=False)
    assert flags(pd.concat([table, clean])) == {CELL: ()}
