"""Made-up results for tests of figures: many methods, a leakage grid, three mappings. They are never evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from react_clip.evaluation.result import EvaluationResult, SetInfo
from react_clip.evaluation.summary import mean_rows, summarise
from react_clip.report.run import Run
from react_clip.report.style import COLOURS, TOWERS, label_of

REAL = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "table1" / "result.json"
BUDGETS = (1, 4, 8, 16)
METHODS = {label_of(kind): kind for kind in COLOURS if kind not in TOWERS} | {"ReACT (calibrated)": "react"}
METHODS |= dict.fromkeys(("TeCoA", "PMG-AFT", "FARE", "CLIP-FT"), "undefended")
"""Methods by label; finetuned towers are told apart by their labels alone."""


def synthetic_run(
    defenses: list[dict[str, Any]],
    outcome: Any,
    *,
    sizes: dict[str, int],
    scoring: str = "leakage_free",
    budgets: Iterable[float] = BUDGETS,
    draws: int = 1,
) -> Run:
    """A run with random images: ``outcome(generator, config, eps, right)`` says which answers are correct."""
    frames: list[pd.DataFrame] = []
    for config, eps, (number, (name, size)) in product(defenses, (0, *budgets), enumerate(sizes.items())):
        right = np.random.default_rng(number).random(size) < 0.7
        attacked = (right | (scoring == "attack_all")) & (eps > 0)
        stream = np.random.default_rng([number, round(eps), len(frames)])
        drift = stream.normal(0.15 + 0.13 * eps, 0.1 + 0.02 * eps, size)
        drift = drift if config["kind"] in ("react", "defend-clip") else np.full(size, np.nan)
        work = 1.0 + 3 * list(COLOURS).index(config["kind"])
        columns = {
            **{"dataset": name, "attack": "pgd-10" if eps else "clean", "defense": config["label"], "eps": eps / 255},
            **{"index": np.arange(size), "label": 0, "clean_prediction": np.where(right, 0, 1)},
            **{"plain_prediction": np.where(right & ~attacked, 0, 1), "attacked": attacked, "attack_success": attacked},
            **{"gated": True, "passes": work, "backward_passes": work / 2 * (config["kind"] in ("ttc", "doc"))},
            **{"r": drift, "J": np.clip(drift / 3, 0, 0.69) if config["kind"] == "react" else np.nan},
            **{"score": drift, "sigma": np.nan, "d_low": 0.2 + 0.02 * drift, "d_high": 0.3 + 0.1 * drift},
        }
        for draw in range(draws):
            correct = outcome(stream, config, eps, right)
            answers = {"draw": draw, "correct": correct, "prediction": np.where(correct, 0, 1)}
            frames.append(pd.DataFrame({**columns, **answers}))
    images = pd.concat(frames, ignore_index=True)
    nothing: dict[str, Any] = {"attacks": (), "defenses": (), "worst_case_over": tuple}
    protocol: Any = SimpleNamespace(threat="oblivious", scoring=scoring, draws=draws, **nothing)
    rows, _ = summarise(protocol, [images])
    result = dataclasses.replace(
        EvaluationResult.load(REAL),
        **{"scoring": scoring, "draws": draws, "defense_seeds": tuple(range(draws)), "recipe": {"defenses": defenses}},
        sets=tuple(SetInfo(name, size, 10, "f", "text", "m", ()) for name, size in sizes.items()),
        attacks=(),
        rows=(*rows, *mean_rows(rows)),
    )
    return Run((Path("toy"),), result, result.recipe, images, ())


def many_methods() -> Run:
    """All methods, four of them finetuned towers."""
    strength = {label: 0.95 - 0.05 * place for place, label in enumerate(METHODS)}

    def outcome(stream: Any, config: dict[str, Any], eps: float, right: Any) -> Any:
        keep = strength[config["label"]] if config["label"] != "CLIP" else 0.0
        return right & (stream.random(len(right)) < (keep * math.exp(-eps / 40) if eps else 0.98))

    defenses = [{"kind": kind, "label": label} for label, kind in METHODS.items()]
    return synthetic_run(defenses, outcome, sizes={"a": 200, "b": 120})


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
        for sigma in (0.03, 0.06, 0.1, 0.2):
            for alpha in (0.6, 1.2, 2.4):
                config = {"kind": kind, "alpha": alpha, "mapping": {"kind": "constant", "sigma": sigma}}
                # Labels do not name the values: the grid must be read from `params`.
                params = {"mapping.sigma": sigma, "alpha": alpha}
                defenses.append({**config, "label": f"{kind} no. {len(defenses)}", "family": kind, "params": params})
    return synthetic_run(defenses, outcome, sizes={"a": 60, "b": 140}, scoring="attack_all", draws=draws)


def mapping_run() -> Run:
    """ReACT with three mappings that differ in nothing else."""
    mappings: list[dict[str, Any]] = [
        {"kind": "linear", "a": 0.03, "b": 0.042},
        {"kind": "logistic", "ceiling": 0.1, "steepness": 3.0, "midpoint": 0.5},
        {"kind": "power_law", "coefficient": 0.08, "exponent": 0.45},
    ]

    def outcome(stream: Any, config: dict[str, Any], eps: float, right: Any) -> Any:
        return right & (stream.random(len(right)) < 0.9 - 0.01 * eps)

    defenses: list[dict[str, Any]] = [{"kind": "undefended", "label": "CLIP"}]
    for place, mapping in enumerate(mappings):
        sweep = {"label": f"no. {place}", "family": "ReACT", "params": {"mapping.kind": mapping["kind"]}}
        defenses.append({"kind": "react", "alpha": 2.0, "tau": 0.7, "mapping": mapping, **sweep})
    return synthetic_run(defenses, outcome, sizes={"a": 150, "b": 100}, budgets=(*BUDGETS, 24, 32))
