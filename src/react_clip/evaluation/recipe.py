"""What to evaluate, as one frozen value: read from a YAML recipe, or built by :func:`react_clip.evaluation.evaluate`.

Reading is strict: an unknown key, a wrong type or a value out of range is refused with what would be right, because a
typo that silently falls back to a default costs hours and produces a wrong table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from react_clip import attacks as attack_room
from react_clip import data as data_room
from react_clip import defenses as defense_room
from react_clip.attacks import PGD, Attack
from react_clip.config import pop_kind
from react_clip.defenses import Defense, ReACT
from react_clip.encoders.base import DTYPES
from react_clip.errors import ReactClipError
from react_clip.evaluation import grid, threats, yaml_text
from react_clip.evaluation.threats import ADAPTIVE, OBLIVIOUS, THREATS

SCORINGS = ("leakage_free", "attack_all")
STORES = ("float16", "uint8", "none")
MEAN = "mean"
"""What the rows over all sets are called; no set may have this name."""

_NOT_IN_NINE = ("eurosat", "caltech256", "food101")
_KEYS = [
    "title",
    "paper",
    "model",
    "dtype",
    "attack_dtype",
    "datasets",
    "limit",
    "attacks",
    "defenses",
    "draws",
    "seed",
]
_KEYS += ["scoring", "threat", "transfer_model", "images", "batch", "self_check"]


@dataclass(frozen=True)
class LabelledAttack:
    """An attack and what tables call it; ``None`` attacks nothing."""

    label: str
    attack: Attack | None

    @property
    def eps(self) -> float:
        """The budget, 0 for clean images."""
        return self.attack.eps if self.attack is not None else 0.0

    @property
    def adaptive(self) -> bool:
        """Whether each defence meets images of its own."""
        return self.attack is not None and ADAPTIVE in self.attack.threats

    @property
    def title(self) -> str:
        """The label with the budget, such as ``pgd-10 4/255``."""
        return f"{self.label} {format_eps(self.eps)}" if self.attack is not None else self.label


@dataclass(frozen=True)
class LabelledDefense:
    """A defence, its name in tables, and its place in a sweep."""

    label: str
    defense: Defense
    family: str = ""
    """Name shared by the defences of one sweep; by default the label."""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Swept fields (dotted where nested) and this defence's values of them; empty outside of sweeps."""

    def __post_init__(self) -> None:
        _check_text("a defence's label", self.label)
        object.__setattr__(self, "family", self.family or self.label)
        _check_text("a defence's family", self.family)
        if not isinstance(self.params, Mapping):
            raise ReactClipError(f"params of {self.label!r} is {_short(self.params)}; write params: {{tau: 0.5}}")
        config = self.defense.to_dict()
        for name, value in self.params.items():
            if (actual := grid.value_at(config, name)) != value:
                raise ReactClipError(f"params of {self.label!r} says that {name} is {value!r}; it is {actual!r}")

    def to_dict(self) -> dict[str, Any]:
        """The entry of a recipe that stands for this defence."""
        return {**self.defense.to_dict(), "label": self.label, "family": self.family, "params": dict(self.params)}


CLEAN = LabelledAttack("clean", None)
SELF_CHECK_ATTACK = LabelledAttack("pgd-10", PGD(eps=1 / 255, steps=10))


@dataclass(frozen=True)
class Recipe:
    """A run in full. Clean images are always evaluated: a robust accuracy means nothing without the clean one."""

    model: str
    datasets: tuple[str, ...]
    attacks: tuple[LabelledAttack, ...]
    defenses: tuple[LabelledDefense, ...]
    title: str = "Evaluation"
    paper: str = ""
    dtype: str = "fp32"
    attack_dtype: str | None = None
    """Precision of the attacked encoder; ``None`` takes that of the defended one."""
    limit: int | None = None
    draws: int = 1
    seed: int = 0
    scoring: str = "leakage_free"
    threat: str = OBLIVIOUS
    transfer_model: str | None = None
    """What attacks are crafted on where the threat is ``transfer``."""
    store: str = "float16"
    batch: int = 64
    self_check: bool = True

    def __post_init__(self) -> None:
        for name in ("title", "paper", "model"):
            _check_text(name, getattr(self, name))
        for name in ("dtype", "attack_dtype"):
            if name == "dtype" or self.attack_dtype is not None:
                _check_choice(name, getattr(self, name), tuple(DTYPES))
        for name, least in (("draws", 1), ("batch", 1), ("seed", 0), ("limit", 1)):
            value = getattr(self, name)
            if name != "limit" or value is not None:
                _check_whole(name, value, least)
        _check_choice("scoring", self.scoring, SCORINGS)
        _check_choice("threat", self.threat, tuple(THREATS))
        if self.transfer_model is not None:
            _check_text("transfer_model", self.transfer_model)
        _check_choice("images.store", self.store, STORES)
        if not isinstance(self.self_check, bool):
            raise ReactClipError(f"self_check is {self.self_check!r}; it is true or false")
        if not self.datasets or not self.defenses:
            missing = "datasets" if not self.datasets else "defenses"
            raise ReactClipError(f"{missing} is empty; name at least one")
        if MEAN in self.datasets:
            raise ReactClipError(f"a data set is called {MEAN!r}, as the mean over sets is; rename its folder")
        _check_unique("data set", self.datasets, "name each once")
        _check_unique("attack", [attack.title for attack in self.all_attacks], "give one of them a label")
        _check_unique("defence", [defense.label for defense in self.defenses], "give one of them a label")
        attacks = [(item.title, item.attack) for item in self.attacks]
        threats.check(self.threat, self.transfer_model, attacks, [(i.label, i.defense) for i in self.defenses])

    @property
    def all_attacks(self) -> tuple[LabelledAttack, ...]:
        """Clean images first, then the attacks."""
        return (CLEAN, *self.attacks)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The defence's seed of each draw."""
        return tuple(range(self.seed, self.seed + self.draws))

    @property
    def own_self_check(self) -> LabelledAttack | None:
        """PGD-10 at 1/255 on the model itself where the recipe has it among its attacks."""
        if self.threat != OBLIVIOUS:
            return None
        return next((item for item in self.attacks if item.attack == SELF_CHECK_ATTACK.attack), None)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def with_sets_under(self, root: Path) -> Recipe:
        """Group words such as ``downstream`` or ``all`` written out as the sets they stand for."""
        return self.replace(
            datasets=tuple(dict.fromkeys(name for word in self.datasets for name in _expand(word, root)))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values in the recipe's own format; :meth:`from_dict` gives the recipe back."""
        attacks = [{**item.attack.to_dict(), "label": item.label} for item in self.attacks if item.attack is not None]
        values: dict[str, Any] = {
            "title": self.title,
            "paper": self.paper,
            "model": self.model,
            "dtype": self.dtype,
            "attack_dtype": self.attack_dtype or self.dtype,
            "datasets": list(self.datasets),
            "limit": self.limit,
            "attacks": [CLEAN.label, *attacks],
            "defenses": [item.to_dict() for item in self.defenses],
            "draws": self.draws,
            "seed": self.seed,
            "scoring": self.scoring,
            "threat": self.threat,
            "images": {"store": self.store},
            "batch": self.batch,
            "self_check": self.self_check,
        }
        if self.transfer_model is not None:
            values["transfer_model"] = self.transfer_model
        # As JSON and YAML see them: tuples are lists, so that what is read back compares equal.
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    def fingerprint(self) -> str:
        """SHA-256 of the whole configuration."""
        return fingerprint(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Read the recipe format; see the module's docstring."""
        _check_keys("the recipe", values, _KEYS)
        if missing := [key for key in ("model", "datasets", "defenses") if key not in values]:
            raise ReactClipError(f"the recipe has no {missing[0]!r}; it needs model, datasets and defenses")
        fields = {
            key: value for key, value in values.items() if key not in ("images", "attacks", "defenses", "datasets")
        }
        images = values.get("images", {})
        if not isinstance(images, Mapping):
            raise ReactClipError("images is no mapping; write images: {store: float16}")
        _check_keys("images", images, ["store"])
        # YAML reads a bare `none` as text but `null` as nothing; both mean that no image is kept.
        store = images.get("store", "float16")
        return cls(
            datasets=tuple(_names("datasets", values["datasets"])),
            attacks=tuple(item for entry in _entries("attacks", values.get("attacks", [])) for item in _attacks(entry)),
            defenses=tuple(
                item for entry in _entries("defenses", values["defenses"]) for item in _defenses(entry, values["model"])
            ),
            store="none" if store is None else store,
            **fields,
        )

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None) -> Recipe:
        """Read a YAML file; ``model`` replaces the recipe's, and with it what ``calibrated: true`` stands for."""
        values = yaml_text.read_mapping(Path(path))
        return cls.from_dict(values if model is None else {**values, "model": model})


def fingerprint(values: Any) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def format_eps(eps: float) -> str:
    """A budget the way people write it.

    >>> format_eps(8 / 255)
    '8/255'
    """
    return f"{eps * 255:.4g}/255"


def _attacks(entry: Any) -> list[LabelledAttack]:
    """One entry of the list: ``clean``, a kind, or a mapping whose ``eps`` may be a list."""
    if entry == CLEAN.label:
        return []
    values = {"kind": entry} if isinstance(entry, str) else dict(entry)
    kinds = attack_room.names()
    kind = values.get("kind")
    if not isinstance(kind, str) or (kind not in kinds and ":" not in kind):
        raise ReactClipError(f"attack {_short(kind)} does not exist; choose one of {CLEAN.label}, {', '.join(kinds)}")
    label = values.pop("label", None)
    budgets = values.get("eps")
    if budgets == []:
        raise ReactClipError(f"attack {kind!r} has an empty list of eps; give at least one, such as [4/255]")
    found = []
    for eps in budgets if isinstance(budgets, list) else [budgets]:
        config = values if budgets is None else {**values, "eps": eps}
        try:
            attack = attack_room.from_dict(config)
        except TypeError as error:
            raise ReactClipError(f"attack {kind!r} is not understood: {error}") from None
        if label is not None:
            _check_text("an attack's label", label)
        found.append(LabelledAttack(label or attack.name, attack))
    return found


def _defenses(entry: Any, model: Any) -> list[LabelledDefense]:
    """One entry of the list: a name, or a mapping with its fields.

    ``calibrated`` starts from the constants for the model; ``grid`` expands to one defence per combination of its
    values. ``family`` and ``params`` say which sweep a hand-written entry belongs to; a grid sets both itself.
    """
    values = {"kind": entry} if isinstance(entry, str) else dict(entry)
    kind = pop_kind(values)
    label, sweep = values.pop("label", None), values.pop("grid", None)
    family: Any = values.pop("family", "")
    params: Any = values.pop("params", {})
    if values.pop("calibrated", False):
        if kind != ReACT.kind:
            raise ReactClipError(f"defence {_short(kind)} cannot be calibrated; only {ReACT.kind} can")
        values = {**ReACT.constants_for(str(model)).to_dict(), **values}
    if label is not None:
        _check_text("a defence's label", label)
        # One recipe serves several towers whose results are put side by side, so each needs a name of its own.
        label = label.replace("{model}", str(model).rstrip("/").rpartition("/")[2])
    values = {**values, "kind": kind}
    if sweep is None:
        defense = defense_room.from_dict(values)
        return [LabelledDefense(label or defense.name, defense, family, params)]
    # From all fields, so that a dotted one leads into its default.
    complete = defense_room.from_dict(values).to_dict()
    family = family or (kind if label is None or "{" in label else label)
    found = []
    for point in grid.expand(complete, label or kind, sweep):
        defense = defense_room.from_dict(point.config)
        # The defence's own values: it may read numbers from text.
        config = defense.to_dict()
        found.append(LabelledDefense(point.label, defense, family, {n: grid.value_at(config, n) for n in point.params}))
    return found


def _expand(word: str, root: Path) -> list[str]:
    specs = [data_room.get(name) for name in data_room.names()]
    if word == "downstream":
        return [spec.name for spec in specs if spec.group == "downstream"]
    if word == "downstream-9":
        return [spec.name for spec in specs if spec.group == "downstream" and spec.name not in _NOT_IN_NINE]
    if word == "imagenet-suite":
        return [spec.name for spec in specs if spec.group == "imagenet"]
    if word != "all":
        return [word]
    found = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    found = [name for name in found if not name.startswith(".")]
    if not found:
        raise ReactClipError(f"datasets is 'all', but {root} holds no folders; give --data ROOT or name the sets")
    return found


def _entries(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ReactClipError(f"{name} is {_short(value)}; it must be a list such as [react]")
    for entry in value:
        if not isinstance(entry, str | dict) or (
            isinstance(entry, dict) and any(not isinstance(k, str) for k in entry)
        ):
            raise ReactClipError(f"{name} holds {_short(entry)}; an entry is a name or a mapping with names as keys")
    return value


def _names(name: str, value: Any) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) and entry for entry in entries):
        raise ReactClipError(f"{name} is {_short(value)}; it must be a list of names, such as [oxford_pets] or [all]")
    return list(entries)


def _check_keys(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    if unknown := [key for key in values if key not in known]:
        raise ReactClipError(f"{where} has no key {_short(unknown[0])}; the keys are {', '.join(known)}")


def _check_text(name: str, value: Any) -> None:
    if (
        not isinstance(value, str)
        or len(value) > 300
        or not value.isprintable()
        or (name != "paper" and not value.strip())
    ):
        raise ReactClipError(f"{name} is {_short(value)}; it must be one line of text, at most 300 characters")


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ReactClipError(f"{name} is {_short(value)}; it must be a whole number >= {least}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ReactClipError(f"{name} is {_short(value)}; choose one of {', '.join(choices)}")


def _check_unique(what: str, labels: tuple[str, ...] | list[str], way_out: str) -> None:
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ReactClipError(f"{what} {twice[0]!r} is there {labels.count(twice[0])} times; {way_out}")


def _short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
