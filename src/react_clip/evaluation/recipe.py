"""A recipe: everything that an evaluation runs, read from YAML or built by :func:`react_clip.evaluation.evaluate`.

Reading is strict: an unknown key, a wrong type or a value out of range is an error, because a typo that falls back to a
default costs hours and gives a wrong table.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from react_clip import attacks as attack_room
from react_clip import data as data_room
from react_clip import defenses as defense_room
from react_clip import storage
from react_clip.attacks import Attack
from react_clip.attacks.base import ADAPTIVE, OBLIVIOUS, TRANSFER
from react_clip.config import Configuration, Count, fields_of, read_length
from react_clip.defenses import Defense, ReACT, SecondLook
from react_clip.errors import ReactClipError
from react_clip.evaluation.yaml import read_yaml
from react_clip.optional import require

CLEAN = "clean"
"""Attack name of the rows about images without attack; no attack may have this label."""
MEAN = "mean"
"""Data set name of the rows that average over all sets; no set may have this name."""
THREATS = {
    OBLIVIOUS: "the attacker knows CLIP, its weights and its prompts, but not the defence",
    TRANSFER: "the attacker knows neither CLIP's weights nor the defence, and crafts on another model",
    ADAPTIVE: "the attacker knows CLIP and the defence in full except the noise it will draw, and attacks each "
    "defence with images of its own",
}
_NOT_IN_NINE = ("eurosat", "caltech256", "food101")

# ---------------------------------------------------------------------- field types


Line = Annotated[str, Field(max_length=300)]
Label = Annotated[Line, Field(min_length=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
RunSeed = Annotated[int, Field(ge=0, lt=2**31)]
Labels = Annotated[tuple[Label, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Several, or one without brackets."""


class LabelledAttack(Configuration):
    """An attack and its name in tables."""

    label: Label
    attack: Attack

    @property
    def eps(self) -> float:
        """The attack's budget."""
        return self.attack.eps

    @property
    def title(self) -> str:
        """The label with the budget, such as ``pgd-10 4/255``; natural damage has none."""
        return title_of(self.label, self.eps)

    def to_dict(self) -> dict[str, Any]:
        """The attack's entry in a recipe."""
        return {**self.attack.to_dict(), "label": self.label}


class LabelledDefense(Configuration):
    """A defence, its name in tables, and its coordinates in a sweep."""

    label: Label
    defense: Defense
    family: Line = ""
    """Name shared by the defences of one sweep; by default the label."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Swept fields (dotted where nested) and this defence's values of them; empty outside of sweeps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", self.family or self.label)

    def to_dict(self) -> dict[str, Any]:
        """The defence's entry in a recipe."""
        return {**self.defense.to_dict(), "label": self.label, "family": self.family, "params": dict(self.params)}


class Images(Configuration):
    """Storage of adversarial images: ``uint8`` or ``none``."""

    store: Literal["uint8", "none"] = "uint8"
    """Number format of the pixels; with ``none`` images are not stored."""


class Recipe(Configuration):
    """A whole run. Clean images are always evaluated, because robust accuracy means nothing without clean accuracy."""

    model: Label
    """The encoder, as ``rc.load`` takes it."""
    datasets: Labels
    """Names of data sets, or ``all``, ``downstream``, ``downstream-9`` or ``imagenet-suite``."""
    defenses: tuple[LabelledDefense, ...]
    """Defences, in the order of the tables."""
    attacks: tuple[LabelledAttack, ...] = ()
    """Attacks and natural damage; clean images are always evaluated."""
    title: Line = "Evaluation"
    """Heading of tables and pages."""
    paper: Line = ""
    """The part of the paper that the run reproduces."""
    dtype: Dtype = "fp32"
    """Precision of the defended encoder."""
    attack_dtype: Dtype | None = None
    """Precision of the encoder that attacks are crafted on; ``None`` takes that of the defended encoder."""
    limit: Count | None = None
    """Most images per set."""
    seed: RunSeed = 0
    """Seed of the attacks."""
    seeds: tuple[RunSeed, ...] = ()
    """Seeds of the defences' random draws: one answer per image for each; by default ``seed``."""
    scoring: Literal["leakage_free", "attack_all"] = "leakage_free"
    """``leakage_free``: attack only images that undefended CLIP gets right; accuracy counts all images."""
    threat: Literal["oblivious", "transfer", "adaptive"] = "oblivious"
    """The attacker has CLIP (``oblivious``), another model (``transfer``), or CLIP and the defence (``adaptive``)."""
    transfer_model: Label | None = None
    """The model that attacks are crafted on if the threat is ``transfer``."""
    images: Images = Images()
    """Storage of adversarial images."""
    batch: Count = 64
    """Images per shard and per encoder call."""
    worst_of: Labels = ()
    """Titles of attacks, such as ``pgd-10 4/255``, or ``all``: their worst case per image is a column of its own."""
    self_check: bool = True
    """Before the run, attack undefended CLIP; stop if that does not work."""
    preprocessing: Literal["paper", "model"] = "paper"
    """``paper``: shorter side to 256 (bilinear), central 224 pixels; ``model``: as the checkpoint says."""

    def __post_init__(self) -> None:
        for name in ("datasets", "defenses"):
            if not getattr(self, name):
                raise ReactClipError(f"{name} is empty; name at least one")
        if MEAN in self.datasets:
            raise ReactClipError(f"a data set is called {MEAN!r}, as the mean over sets is; rename its folder")
        object.__setattr__(self, "seeds", self.seeds or (self.seed,))
        _check_unique("seed", self.seeds, "name each once")
        _check_unique("data set", self.datasets, "name each once")
        _check_unique("attack", [attack.title for attack in self.attacks], "give one of them a label")
        _check_unique("defence", [defense.label for defense in self.defenses], "give one of them a label")
        self._check_threat()
        titles = [item.title for item in self.attacks]
        if unknown := [title for title in self.worst_of if title not in (*titles, "all")]:
            known = ", ".join([*titles, "all"])
            raise ReactClipError(f"worst_of names {unknown[0]!r}, which is no attack of the recipe; choose of {known}")

    def _check_threat(self) -> None:
        """Refuse attacks that do not fit the threat model."""
        if (self.transfer_model is not None) != (self.threat == TRANSFER):
            raise ReactClipError(
                f"threat is {self.threat!r} and transfer_model is {self.transfer_model!r}; the model to craft on "
                f"belongs to threat: {TRANSFER}, and only to it"
            )
        for item in self.attacks:
            if item.label == CLEAN:
                raise ReactClipError(
                    f"attack {item.title!r} is called {CLEAN!r}, as images without attack are; rename it"
                )
            if self.threat not in item.attack.threats:
                raise ReactClipError(
                    f"threat is {self.threat!r}, but attack {item.title!r} belongs to "
                    f"{' or '.join(item.attack.threats)}; for it set threat: {item.attack.threats[0]}"
                )

    def with_sets_under(self, root: Path) -> Self:
        """A copy with group names such as ``downstream`` or ``all`` replaced by the sets that they stand for."""
        names = dict.fromkeys(name for word in self.datasets for name in _sets_of(word, root))
        return self.replace(datasets=tuple(names))

    def with_seeds_and_budgets(
        self, seed: int | None, seeds: Sequence[int] | None, budgets: Sequence[float] | None
    ) -> Self:
        """A copy with those that are not ``None``; attacks that differ only in their budget become one of each.

        A new ``seed`` is also that of the defences where these had the same one and no other.
        """
        changes: dict[str, Any] = {} if seed is None else {"seed": seed}
        if seeds or (seed is not None and self.seeds == (self.seed,)):
            changes["seeds"] = tuple(seeds or ())
        if budgets:
            each = [(item, eps) for item in self.attacks for eps in (budgets if item.eps else (0.0,))]
            copies = [LabelledAttack(item.label, item.attack.replace(eps=eps)) for item, eps in each]
            changes["attacks"] = tuple(dict.fromkeys(copies))
        return self.replace(**changes)

    def fingerprint(self) -> str:
        """SHA-256 of the whole configuration."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The recipe as it would be written, without grids."""
        attacks, defenses = ([item.to_dict() for item in items] for items in (self.attacks, self.defenses))
        return {**super().to_dict(), "attacks": attacks, "defenses": defenses}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The recipe with these keys; entries with several budgets or severities, or with a grid, are expanded."""
        values = dict(data)
        if "attacks" in values:
            values["attacks"] = [item for entry in _entries("attacks", values) for item in _attacks(entry)]
        if "defenses" in values:
            model = str(values.get("model"))
            values["defenses"] = [item for entry in _entries("defenses", values) for item in _defenses(entry, model)]
        return super().from_dict(values)

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None) -> Self:
        """Read a YAML file; ``model`` replaces the recipe's, and with it the constants of ``calibrated: true``.

        Attacks and defences written as ``module:Class`` may be in files beside the recipe.
        """
        values = read_yaml(Path(path))
        if (beside := str(Path(path).resolve().parent)) not in sys.path:
            sys.path.append(beside)
        return cls.from_dict(values if model is None else {**values, "model": model})

    def save(self, path: str | Path) -> None:
        """Write the recipe as YAML."""
        yaml = require("yaml", "writing recipes", extra="eval")
        storage.write_text(Path(path), yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120))


def format_eps(eps: float) -> str:
    """A budget as a fraction of 255.

    >>> format_eps(8 / 255)
    '8/255'
    """
    return f"{eps * 255:.4g}/255"


def title_of(attack: str, eps: float) -> str:
    """An attack with its budget; clean images, natural damage and the worst case over several budgets have none.

    >>> title_of("pgd-10", 4 / 255), title_of("clean", 0.0)
    ('pgd-10 4/255', 'clean')
    """
    return f"{attack} {format_eps(eps)}" if eps and not attack.startswith("worst of") else attack


def _check_unique(what: str, labels: Sequence[object], way_out: str) -> None:
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ReactClipError(f"{what} {twice[0]!r} is there {labels.count(twice[0])} times; {way_out}")


def _sets_of(word: str, root: Path) -> list[str]:
    specs = [data_room.get(name) for name in data_room.names()]
    downstream = [spec.name for spec in specs if spec.group == "downstream"]
    groups = {
        "downstream": downstream,
        "downstream-9": [name for name in downstream if name not in _NOT_IN_NINE],
        "imagenet-suite": [spec.name for spec in specs if spec.group == "imagenet"],
    }
    if word != "all":
        return groups.get(word, [word])
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    names = [name for name in folders if not name.startswith(".")]
    if not names:
        raise ReactClipError(f"datasets is 'all', but {root} holds no folders; give --data ROOT or name the sets")
    return names


# ---------------------------------------------------------------------- entries of a recipe


def _entries(name: str, values: Mapping[str, Any]) -> list[Any]:
    """The entries of a list of attacks or defences; one that is only a name becomes ``{"kind": name}``."""
    entries = values[name]
    if not isinstance(entries, list | tuple) or not all(
        isinstance(item, str | dict | Configuration) for item in entries
    ):
        raise ReactClipError(f"{name} is {entries!r:.80}; it must be a list of names, mappings or objects like ReACT()")
    return [{"kind": entry} if isinstance(entry, str) else entry for entry in entries]


def _attacks(entry: Any) -> list[LabelledAttack]:
    """One attack per budget or severity of the entry; none for ``clean``: clean images are always evaluated."""
    if not isinstance(entry, dict):
        return [entry if isinstance(entry, LabelledAttack) else LabelledAttack(entry.name, entry)]
    if entry == {"kind": CLEAN}:
        return []
    config = {name: value for name, value in entry.items() if name != "label"}
    configs = [config]
    for name in ("eps", "severity"):
        if isinstance(several := config.get(name), list) and several:
            configs = [{**config, name: value} for value in several]
    attacks = [attack_room.from_dict(config) for config in configs]
    return [LabelledAttack(entry.get("label", attack.name), attack) for attack in attacks]


class DefenseEntry(Configuration):
    """Keys of a defence's entry in a recipe that are not fields of the defence itself."""

    label: Label | None = None
    """Its name; fields of the grid in braces, and ``{model}``, are filled in."""
    calibrated: bool | None = None
    """Start from the constants for the model (true), or from the defaults whatever the model (false)."""
    family: Line = ""
    params: dict[str, Any] = Field(default_factory=dict)
    """The sweep that the defence belongs to, and its place there; a grid sets both."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Values of fields, of which every combination is a defence."""


def _defenses(entry: Any, model: str) -> list[LabelledDefense]:
    """The defence of an entry, or one per combination of its grid."""
    if not isinstance(entry, dict):
        return [entry if isinstance(entry, LabelledDefense) else LabelledDefense(entry.name, entry)]
    said = DefenseEntry.from_dict({name: value for name, value in entry.items() if name in fields_of(DefenseEntry)})
    config = {name: value for name, value in entry.items() if name not in fields_of(DefenseEntry)}
    constants = _constants(config.get("kind"), model, said.calibrated, {*config, *said.grid})
    defense = defense_room.from_dict({**constants, **config})
    # One recipe may run on several models whose results are compared, so each needs its own label.
    label = None if said.label is None else said.label.replace("{model}", model.rstrip("/").rpartition("/")[2])
    if not said.grid:
        return [LabelledDefense(label or defense.name, defense, said.family, said.params)]
    family = said.family or (label if label and "{" not in label else defense.kind)
    swept = []
    for values in itertools.product(*said.grid.values()):
        point, swept_config = dict(zip(said.grid, values, strict=True)), defense.to_dict()
        for name, value in point.items():
            _set_at(swept_config, name, value)
        params = {name: read_length(value) if "/" in str(value) else value for name, value in point.items()}
        chosen = defense_room.from_dict(swept_config)
        swept.append(LabelledDefense(_grid_label(label or defense.kind, point), chosen, family, params))
    return swept


def _constants(kind: Any, model: str, calibrated: bool | None, given: set[str]) -> dict[str, Any]:
    """The calibrated constants of a defence; raises where there are none for the model and none are given."""
    calibratable: dict[Any, tuple[type[ReACT | SecondLook], str]] = {
        ReACT.kind: (ReACT, "tau"),
        SecondLook.kind: (SecondLook, "threshold"),
    }
    if kind not in calibratable:
        if calibrated:
            raise ReactClipError(f"defence {kind!r} cannot be calibrated; {' and '.join(calibratable)} can")
        return {}
    defense, threshold = calibratable[kind]
    if calibrated is False or (calibrated is None and threshold in given):
        return {}
    try:
        constants = defense.for_encoder(model).to_dict()
    except ReactClipError:
        raise ReactClipError(
            f"there is no calibration of {kind!r} for {model!r}; measure it (`react-clip calibrate PHOTOS "
            f"--defense {kind} --model {model}`) and give its {threshold}, or take the defaults knowingly "
            "with calibrated: false"
        ) from None
    return constants if calibrated else {}


def _set_at(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted field."""
    *outer, last = name.split(".")
    for part in outer:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[last] = value


def _grid_label(label: str, point: dict[str, Any]) -> str:
    """The label with its ``{field}`` or ``{field:.2f}`` filled in; without these the values are appended.

    >>> _grid_label("AOM", {"mapping.sigma": 0.05, "alpha": 2.0}), _grid_label("tau {tau:.2f}", {"tau": 0.5})
    ('AOM sigma=0.05 alpha=2', 'tau 0.50')
    """
    if "{" not in label:
        values = {name.rpartition(".")[2]: f"{v:g}" if isinstance(v, float) else v for name, v in point.items()}
        return " ".join([label, *(f"{name}={value}" for name, value in values.items())])
    try:
        return re.sub(r"{([\w.]*):?([^{}]*)}", lambda field: format(point[field[1]], field[2]), label)
    except (KeyError, ValueError, TypeError) as error:
        raise ReactClipError(
            f"label {label!r} cannot be filled in ({error!r}); the grid sweeps {', '.join(point)}"
        ) from None
