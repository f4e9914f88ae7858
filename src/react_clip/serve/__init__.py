"""The defence as a service: one model, and an engine that batches images of different callers.

This package imports neither attacks nor evaluation. Its modules need ``pip install '-e .[serve]'``, so only the
command line imports them, and only when it serves.
"""
