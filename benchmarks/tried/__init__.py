"""Ideas that might make the defence cheaper, one small script each; ``python -m benchmarks.tried`` runs them all."""
