"""Several adaptive attacks, and per image the worst of them, judged on draws that none of them has seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip.adaptive.base import (
    JUDGE_DRAWS,
    AdaptiveAttack,
    AdaptiveResult,
    Crafted,
    Target,
    as_result,
)
from react_clip.adaptive.objectives import BPDA, Both, Evade, Feature, Through
from react_clip.adaptive.pipeline import Price, Tally
from react_clip.adaptive.wrapped import Queries, Rand, Transfer
from react_clip.defenses.base import Defense
from react_clip.errors import ReactClipError


class Suite(AdaptiveAttack):
    """The worst case over its members; the budget is the suite's, and a member that makes no sense on a defence rests.

    A member's images are judged on the same fresh draws as those of the others, and per image the one that is wrong in
    most of them counts. Every member attacks every image, or with ``in_turn`` only those that the members before it
    have left right in some of these draws: the worst case is the same for a fraction of the work, but a member's own
    share then covers only the images that were left to it.

    >>> Suite(members=(Both(steps=5), Evade(steps=5, lambdas=(1.0,)))).name
    'adaptive-suite-2'
    """

    kind = "adaptive-suite"
    members: Annotated[tuple[AdaptiveAttack, ...], Field(min_length=1)] = (
        Transfer(),
        Both(),
        Through(),
        Evade(),
        BPDA(),
        Feature(),
        Rand(steps=20, eot=4),
        Queries(queries=500, eot=4),
    )
    in_turn: bool = False

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ReactClipError(f"suite member {twice[0]!r} is there {names.count(twice[0])} times; name each once")

    @property
    def name(self) -> str:
        """``adaptive-suite-8``: how many members."""
        return f"{self.kind}-{len(self.members)}"

    @property
    def total_steps(self) -> int:
        """Those of all members."""
        return sum(member.total_steps for member in self.members)

    def able(self, defense: Defense) -> tuple[AdaptiveAttack, ...]:
        """The members that make sense on a defence, with the suite's budget."""
        return tuple(replace(member, eps=self.eps) for member in self.members if not member.obstacle(defense))

    def obstacle(self, defense: Defense) -> str:
        """Only if every member has one."""
        return "" if self.able(defense) else self.members[0].obstacle(defense)

    def price(self, defense: Defense, passes: Price) -> Price:
        """Those of the members and of judging all but one of them, which :meth:`cost` counts."""
        members = self.able(defense)
        parts = [member.price(defense, passes) for member in members]
        judged = JUDGE_DRAWS * (len(members) - 1)
        return sum(p[0] for p in parts) + judged * passes[0], sum(p[1] for p in parts) + judged * passes[1]

    def craft(self, target: Target) -> Crafted:
        """The chosen images alone."""
        found = self._judged(target)
        return Crafted(found.images, found.queries, found.backward)

    def _judged(self, target: Target) -> AdaptiveResult:
        images, worst = target.x, Tally(*torch.full((2, len(target.x)), -torch.inf, device=target.x.device))
        forward, backward = torch.zeros_like(target.y), torch.zeros_like(target.y)
        parts: dict[str, Tensor] = {}
        for member in self.able(target.defense):
            standing = worst.broken < 1 if self.in_turn else torch.ones_like(target.y, dtype=torch.bool)
            parts[member.name] = torch.full_like(worst.broken, torch.nan)
            rows = standing.nonzero().flatten()
            if not len(rows):
                continue
            found = member._judged(target.only(rows))
            tally = Tally(worst.broken.index_copy(0, rows, found.broken), worst.loss.index_copy(0, rows, found.loss))
            better = tally.beats(worst)
            images = torch.where(better[:, None, None, None], images.index_copy(0, rows, found.images), images)
            worst = worst.where(better, tally)
            forward, backward = forward.index_add(0, rows, found.queries), backward.index_add(0, rows, found.backward)
            parts[member.name] = parts[member.name].index_copy(0, rows, found.broken)
        return as_result(images, worst, forward, backward, parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; members have no budget of their own."""
        members = [
            {name: value for name, value in member.to_dict().items() if name != "eps"} for member in self.members
        ]
        return {**super().to_dict(), "members": members}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The suite from its fields; a member is a kind or a mapping."""
        entries = data.get("members", ()) if isinstance(data, Mapping) else ()
        for entry in entries if isinstance(entries, list | tuple) else ():
            if entry == cls.kind or (isinstance(entry, Mapping) and ("eps" in entry or entry.get("kind") == cls.kind)):
                raise ReactClipError("a suite member has no eps of its own and is no suite; give eps to the suite")
        return super().from_dict(data)
