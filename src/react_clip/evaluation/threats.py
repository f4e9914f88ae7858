"""What the attacker knows, and which attacks go with it: a robust accuracy means nothing without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from react_clip import adaptive as adaptive_room
from react_clip import attacks as attack_room
from react_clip.adaptive import AdaptiveAttack
from react_clip.attacks import Attack
from react_clip.defenses import Defense
from react_clip.errors import ReactClipError

OBLIVIOUS, TRANSFER, ADAPTIVE = "oblivious", "transfer", "adaptive"
THREATS = {
    OBLIVIOUS: "the attacker knows CLIP, its weights and its prompts, but not the defence",
    TRANSFER: "the attacker knows neither CLIP's weights nor the defence, and crafts on another model",
    ADAPTIVE: "the attacker knows CLIP and the defence in full except the noise it will draw, and attacks each "
    "defence with images of its own",
}

AnyAttack = Attack | AdaptiveAttack


def kinds() -> list[str]:
    """Everything that an attack of a recipe may be.

    >>> kinds()[0], kinds()[-1]
    ('apgd', 'adaptive-transfer')
    """
    return [*attack_room.names(), *adaptive_room.names()]


def read(config: Mapping[str, Any]) -> AnyAttack:
    """An attack of either family from plain values.

    >>> read({"kind": "adaptive-through", "steps": 5}).name
    'adaptive-through-5'
    """
    if config.get("kind") in adaptive_room.names():
        return adaptive_room.from_dict(config)
    return attack_room.from_dict(config)


def check(
    threat: str,
    transfer_model: str | None,
    attacks: Iterable[tuple[str, AnyAttack | None]],
    defenses: Iterable[tuple[str, Defense]],
) -> None:
    """Refuse attacks that do not go with the threat model, or not with a defence."""
    if (transfer_model is not None) != (threat == TRANSFER):
        raise ReactClipError(
            f"threat is {threat!r} and transfer_model is {transfer_model!r}; the model to craft on belongs to threat: "
            f"{TRANSFER}, and only to it"
        )
    defenses = list(defenses)
    for title, attack in attacks:
        knows = isinstance(attack, AdaptiveAttack)
        if attack is not None and knows != (threat == ADAPTIVE):
            other = f"choose one of {OBLIVIOUS}, {TRANSFER}" if threat == ADAPTIVE else f"set threat: {ADAPTIVE}"
            raise ReactClipError(
                f"threat is {threat!r}, but attack {title!r} {'knows' if knows else 'does not know'} the defence; for "
                f"it {other}"
            )
        for label, defense in defenses:
            if isinstance(attack, AdaptiveAttack) and (reason := attack.obstacle(defense)):
                raise ReactClipError(
                    f"attack {title!r} cannot be run on defence {label!r}: {reason}; put it into an adaptive-suite, "
                    "which leaves out what makes no sense"
                )
