"""Defended CLIP for libraries in use: transformers pipelines, open_clip, Chroma, LangChain.

Each module imports its library, so each is imported on first use of one of the names in ``__init__.pyi``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
