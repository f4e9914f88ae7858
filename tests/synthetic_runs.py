"""Made-up runs for tests of tables, figures and pages: no model is asked. They are never evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from react_clip.evaluation.results import EvaluationResult, SelfCheck, SetInfo, write_images

CLIP: dict[str, Any] = {"kind": "undefended", "label": "CLIP"}
REACT: dict[str, Any] = {"kind": "react", "label": "ReACT", "tau": 0.7}
SECOND: dict[str, Any] = {"kind": "second_look", "label": "SecondLook", "threshold": 0.4}
DEFENSES = (CLIP, REACT, SECOND)
STRENGTH = {"undefended": 0.0, "react": 0.7, "second_look": 0.9}
SETS = {"pets": 60, "cars": 40}

Measured = dict[str, Any]
Outcome = Callable[[np.random.Generator, Mapping[str, Any], float, Any], Any]


def outcome(stream: np.random.Generator, entry: Mapping[str, Any], eps: float, right: Any) -> Any:
    """Clean, nearly what CLIP gets right; attacked, a part of it that the defence's kind sets."""
    return right & (stream.random(len(right)) < (STRENGTH.get(entry["kind"], 0.5) - eps if eps else 0.9))


def diagnostics(entry: Mapping[str, Any], stream: np.random.Generator, eps: float, size: int) -> Measured:
    """ReACT's own diagnostics; SecondLook measures a distance alone, and its score is that distance."""
    drift = stream.normal(0.2 + 30 * eps, 0.1, size)
    if entry["kind"] == "react":
        instability = np.clip(drift / 3, 0, 0.69)
        return {"drift": drift, "instability": instability, "score": drift + instability, "sigma": 0.03 + 0.04 * drift}
    return {"distance": drift, "score": drift} if entry["kind"] == "second_look" else {}


def synthetic_run(
    defenses: Sequence[dict[str, Any]] = DEFENSES,
    *,
    outcome: Outcome = outcome,
    sets: Mapping[str, int] = SETS,
    attacks: Mapping[str, Sequence[float]] = {"pgd-10": (1 / 255, 4 / 255)},
    natural: Sequence[str] = (),
    draws: int = 1,
    names: Sequence[str] = ("cat", "dog", "teapot"),
    **recipe: Any,
) -> EvaluationResult:
    """A run over random images, of which undefended CLIP gets about 70 % right."""
    settings: dict[str, Any] = {
        **{"model": "toy", "dtype": "fp32", "threat": "oblivious", "scoring": "leakage_free", "seed": 0},
        **{"draws": draws, "defenses": [dict(entry) for entry in defenses], **recipe},
    }
    settings["attacks"] = [{"label": name, "eps": eps} for name, budgets in attacks.items() for eps in budgets]
    titles = [("clean", 0.0), *((name, 0.0) for name in natural)]
    titles += [(name, eps) for name, budgets in attacks.items() for eps in budgets]
    frames = []
    for place, (dataset, size) in enumerate(sets.items()):
        photos = np.random.default_rng(place)
        right, label = photos.random(size) < 0.7, photos.integers(0, len(names), size)
        for number, entry in enumerate(defenses):
            for draw in range(draws):
                clean = None
                for attack, eps in titles:
                    stream = np.random.default_rng([place, number, draw, titles.index((attack, eps))])
                    attacked = (right | (settings["scoring"] == "attack_all")) & (eps > 0)
                    correct = outcome(stream, entry, eps, right)
                    clean = correct if clean is None else clean
                    wrong = (label + 1) % len(names)
                    columns = {
                        **{"dataset": dataset, "scoring": settings["scoring"], "threat": settings["threat"]},
                        **{"attack": attack, "defense": entry["label"], "eps": eps, "draw": draw, "seed": draw},
                        **{"photo": [f"{dataset} {index}" for index in range(size)]},
                        **{"attack_seed": 0, "index": np.arange(size), "label": label, "attacked": attacked},
                        **{"clean_prediction": np.where(right, label, wrong), "queries": 10.0 * attacked},
                        **{"plain_prediction": np.where(right & ~attacked, label, wrong), "clean_correct": clean},
                        **{"prediction": np.where(correct, label, wrong), "correct": correct},
                        **{"robust": correct & (clean | (eps == 0)), "attack_success": attacked},
                        **{"crafted_success": attacked, "gated": stream.random(size) < (0.9 if eps else 0.05)},
                        **{"passes": 1.0 + number, "backward_passes": 2.0 * (entry["kind"] == "ttc")},
                    }
                    frames.append(pd.DataFrame(columns | diagnostics(entry, stream, eps, size)))
    images = pd.concat(frames, ignore_index=True)
    images["gated"] &= images["defense"].map({entry["label"]: entry["kind"] for entry in defenses}) != "undefended"
    return EvaluationResult(
        **{"schema": 2, "title": "Toys", "created": "2026-01-01T00:00:00+00:00", "command": "react-clip x"},
        **{"paper": "", "commit": "abc", "package": "def", "versions": {"torch": "2"}, "device": "cpu"},
        **{"recipe": settings, "recipe_hash": "0", "checks": (), "notes": ()},
        self_check=SelfCheck(True, "pets", 1, 1.0, 0.0, 0.3),
        sets=tuple(SetInfo(name, size, len(names), name, "text", "m", (), tuple(names)) for name, size in sets.items()),
        images=images,
    )


def save_run(result: EvaluationResult, folder: Path) -> Path:
    """Write a run as ``react-clip evaluate`` would."""
    folder.mkdir(parents=True)
    write_images(folder / "images.parquet", [result.images])
    result.save(folder)
    return folder
