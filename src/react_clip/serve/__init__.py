"""The defence as a service: one model, and an engine that batches images of different callers.

This package imports neither attacks nor evaluation. Its modules need ``pip install '-e .[serve]'``, so each is imported
on first use of one of the names in ``__init__.pyi``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
