"""Evaluation of defences: recipes, runs that can be interrupted and continued, numbers, flags, proofs and results."""

from react_clip.evaluation.numbers import Row
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.results import EvaluationResult
from react_clip.evaluation.run import evaluate, run_recipe
from react_clip.evaluation.store import run_folder
from react_clip.evaluation.validate import Validation, validate

__all__ = ["EvaluationResult", "Recipe", "Row", "Validation", "evaluate", "run_folder", "run_recipe", "validate"]
