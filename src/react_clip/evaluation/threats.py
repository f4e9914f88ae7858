"""Threat models: what the attacker knows, and which attacks fit."""

from __future__ import annotations

from collections.abc import Iterable

from react_clip.attacks import Attack
from react_clip.attacks.base import ADAPTIVE, OBLIVIOUS, TRANSFER
from react_clip.defenses import Defense
from react_clip.errors import ReactClipError

__all__ = ["ADAPTIVE", "OBLIVIOUS", "THREATS", "TRANSFER", "check"]

THREATS = {
    OBLIVIOUS: "the attacker knows CLIP, its weights and its prompts, but not the defence",
    TRANSFER: "the attacker knows neither CLIP's weights nor the defence, and crafts on another model",
    ADAPTIVE: "the attacker knows CLIP and the defence in full except the noise it will draw, and attacks each "
    "defence with images of its own",
}


def check(
    threat: str,
    transfer_model: str | None,
    attacks: Iterable[tuple[str, Attack | None]],
    defenses: Iterable[tuple[str, Defense]],
) -> None:
    """Refuse attacks that do not fit the threat model or a defence."""
    if (transfer_model is not None) != (threat == TRANSFER):
        raise ReactClipError(
            f"threat is {threat!r} and transfer_model is {transfer_model!r}; the model to craft on belongs to threat: "
            f"{TRANSFER}, and only to it"
        )
    defenses = list(defenses)
    for title, attack in attacks:
        if attack is None:
            continue
        if threat not in attack.threats:
            raise ReactClipError(
                f"threat is {threat!r}, but attack {title!r} belongs to {' or '.join(attack.threats)}; for it set "
                f"threat: {attack.threats[0]}"
            )
        for label, defense in defenses:
            if reason := attack.obstacle(defense):
                raise ReactClipError(
                    f"attack {title!r} cannot be run on defence {label!r}: {reason}; put it into an adaptive-suite, "
                    "which leaves out what makes no sense"
                )
