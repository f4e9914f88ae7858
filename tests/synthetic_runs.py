"""Results made up for tests of figures: many methods, a leakage grid, three mappings. They are never evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import MEAN
from react_clip.evaluation.result import EvaluationResult, Row, SelfCheck, SetInfo
from react_clip.report.run import PerImage, Run
from react_clip.report.style import LOOKS

BUDGETS = (1, 4, 8, 16)
METHODS = {
    "CLIP": "undefended",
    "ReACT (paper)": "react",
    "ReACT (calibrated)": "react",
    "AOM": "aom",
    "Defend-CLIP": "defend-clip",
    "TTC": "ttc",
    "DOC": "doc",
    "MAC": "mac",
    "Anti-adv": "anti-adv",
    "HD": "hd",
    "TTE": "tte",
    "R-TPT": "r-tpt",
    "SS-TPT": "ss-tpt",
    "TeCoA": "undefended",
    "PMG-AFT": "undefended",
    "FARE": "undefended",
    "CLIP-FT": "undefended",
}


def made(
    defenses: list[dict[str, Any]],
    outcome: Any,
    *,
    sizes: dict[str, int],
    scoring: str = "leakage_free",
    budgets: Iterable[float] = BUDGETS,
    draws: int = 1,
    seed: int = 0,
) -> Run:
    """A run whose images are drawn: ``outcome(generator, config, eps, right)`` says which answers are correct."""
    parts: list[dict[str, np.ndarray]] = []
    rows: list[Row] = []
    for config in defenses:
        for eps in (0.0, *(budget / 255 for budget in budgets)):
            group = []
            for number, (name, size) in enumerate(sizes.items()):
                right = np.random.default_rng(number).random(size) < 0.7
                attacked = (right | (scoring == "attack_all")) & (eps > 0)
                stream = np.random.default_rng([seed, number, round(eps * 255), len(parts) * (config["kind"] != "x")])
                correct = np.stack([outcome(stream, config, eps * 255, right) for _ in range(draws)])
                drift = stream.normal(0.15 + 0.13 * eps * 255, 0.1 + 0.02 * eps * 255, size)
                kind = config["kind"]
                measured = kind in ("react", "defend-clip")
                for draw in range(draws):
                    parts.append(
                        {
                            "dataset": np.full(size, name, dtype=object),
                            "attack": np.full(size, "pgd-10" if eps else "clean", dtype=object),
                            "defense": np.full(size, config["label"], dtype=object),
                            "eps": np.full(size, eps),
                            "index": np.arange(size),
                            "label": np.zeros(size, int),
                            "draw": np.full(size, draw),
                            "clean_prediction": np.where(right, 0, 1),
                            "plain_prediction": np.where(right & ~attacked, 0, 1),
                            "prediction": np.where(correct[draw], 0, 1),
                            "passes": np.full(size, 1),
                            "backward_passes": np.zeros(size, int),
                            "attacked": attacked,
                            "attack_success": attacked,
                            "correct": correct[draw],
                            "gated": np.ones(size, bool),
                            "r": drift if measured else np.full(size, np.nan),
                            "J": np.clip(drift / 3, 0, 0.69) if kind == "react" else np.full(size, np.nan),
                            "score": drift if measured else np.full(size, np.nan),
                            "sigma": np.full(size, np.nan),
                            "d_low": 0.2 + 0.02 * drift if measured else np.full(size, np.nan),
                            "d_high": 0.3 + 0.1 * drift if measured else np.full(size, np.nan),
                        }
                    )
                group.append(_row(config, name, eps, right, attacked, correct, scoring))
            rows += [*group, _mean(group)]
    images = PerImage({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    sets = tuple(SetInfo(name, size, 10, "f", "text", "m", ()) for name, size in sizes.items())
    result = EvaluationResult(
        schema=1,
        title="made up",
        paper="",
        created="",
        command="",
        versions={},
        device="cpu",
        dtype="fp32",
        attack_dtype="fp32",
        model="toy",
        threat="oblivious",
        threat_meaning="the attacker does not know the defence",
        scoring=scoring,
        draws=draws,
        attack_seed=0,
        defense_seeds=tuple(range(draws)),
        recipe={"defenses": defenses},
        recipe_hash="",
        self_check=SelfCheck(False, "", 0, math.nan, math.nan, 0.5),
        sets=sets,
        attacks=(),
        rows=tuple(rows),
        notes=(),
    )
    return Run((Path("toy"),), result, result.recipe, images, ())


def _row(config: dict[str, Any], name: str, eps: float, right: Any, attacked: Any, correct: Any, scoring: str) -> Row:
    share = metrics.wilson(float(correct.mean()), len(right))
    leaked = metrics.leakage(right, attacked, correct)
    work = 1.0 + 3 * (list(LOOKS).index(config["kind"]) if config["kind"] in LOOKS else 0)
    return Row(
        dataset=name,
        attack="pgd-10" if eps else "clean",
        eps=eps,
        defense=config["label"],
        threat="oblivious",
        scoring=scoring,
        n=len(right),
        attacked=int(attacked.sum()),
        accuracy=share.value,
        low=share.low,
        high=share.high,
        worst=share.value,
        majority=share.value,
        leakage=leaked,
        leakage_share=leaked / len(right),
        gate_rate=1.0,
        passes=work,
        backward_passes=work / 2 if config["kind"] in ("ttc", "doc", "r-tpt") else 0.0,
    )


def _mean(group: list[Row]) -> Row:
    share = metrics.mean_over_sets([row.accuracy for row in group], [row.n for row in group])
    images = sum(row.n for row in group)
    leaked = sum(row.leakage for row in group)
    return dataclasses.replace(
        group[0],
        dataset=MEAN,
        n=images,
        accuracy=share.value,
        low=share.low,
        high=share.high,
        leakage=leaked,
        leakage_share=leaked / images,
    )


def many_methods() -> Run:
    """Seventeen rows of a table, four of them other weights."""
    strength = {label: 0.95 - 0.05 * place for place, label in enumerate(METHODS)}

    def outcome(stream: Any, config: dict[str, Any], eps: float, right: Any) -> Any:
        keep = strength[config["label"]] if config["label"] != "CLIP" else 0.0
        return right & (stream.random(len(right)) < (keep * math.exp(-eps / 40) if eps else 0.98))

    defenses = [{"kind": kind, "label": label} for label, kind in METHODS.items()]
    return made(defenses, outcome, sizes={"a": 200, "b": 120})


def leakage_grid(draws: int = 1) -> Run:
    """AOM and Defend-CLIP over anchor scale and alpha, every image attacked; more alpha leaks more."""

    def outcome(stream: Any, config: dict[str, Any], eps: float, right: Any) -> Any:
        if config["kind"] == "undefended":
            return right & (eps == 0)
        sigma, alpha = config["mapping"]["sigma"], config["alpha"]
        fit = math.exp(-(((sigma - 0.05 - 0.006 * eps) / 0.07) ** 2)) * min(alpha / 2.0, 1.1)
        chance = np.where(right, 0.9 * fit, 0.65 * fit * alpha / 2.4) if eps else np.where(right, 0.95, 0.02)
        return stream.random(len(right)) < chance

    defenses: list[dict[str, Any]] = [{"kind": "undefended", "label": "CLIP"}]
    for kind in ("aom", "defend-clip"):
        for sigma in (0.03, 0.06, 0.1, 0.15, 0.2, 0.28):
            for alpha in (0.0, 0.6, 1.2, 1.8, 2.4):
                mapping = {"kind": "constant", "sigma": sigma}
                # Labels say nothing on purpose: what is a grid must be read from `params`.
                label = f"{kind} no. {len(defenses)}"
                defenses.append(
                    {
                        "kind": kind,
                        "alpha": alpha,
                        "mapping": mapping,
                        "label": label,
                        "family": kind,
                        "params": {"mapping.sigma": sigma, "alpha": alpha},
                    }
                )
    return made(defenses, outcome, sizes={"a": 60, "b": 140}, scoring="attack_all", draws=draws)


def mapping_run() -> Run:
    """ReACT with three mappings that differ in nothing else."""
    kinds = [
        {"kind": "linear", "a": 0.03, "b": 0.042},
        {"kind": "logistic", "ceiling": 0.1, "steepness": 3.0, "midpoint": 0.5},
        {"kind": "power_law", "coefficient": 0.08, "exponent": 0.45},
    ]

    def outcome(stream: Any, config: dict[str, Any], eps: float, right: Any) -> Any:
        return right & (stream.random(len(right)) < 0.9 - 0.01 * eps)

    defenses: list[dict[str, Any]] = [{"kind": "undefended", "label": "CLIP"}]
    defenses += [
        {
            "kind": "react",
            "alpha": 2.0,
            "tau": 0.7,
            "max_batch": 64 + place,
            "mapping": kind,
            "label": f"no. {place}",
            "family": "ReACT",
            "params": {"mapping.kind": kind["kind"]},
        }
        for place, kind in enumerate(kinds)
    ]
    return made(defenses, outcome, sizes={"a": 150, "b": 100}, budgets=(*BUDGETS, 24, 32))
