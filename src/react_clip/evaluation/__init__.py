"""Evaluation: the protocol (leakage-free by default), the runner that survives being killed, and what it reports."""

from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.evaluation.run import evaluate, run_recipe
from react_clip.evaluation.validate import Validation, validate

__all__ = ["EvaluationResult", "Recipe", "Row", "Validation", "evaluate", "run_recipe", "validate"]
