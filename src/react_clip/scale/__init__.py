"""The same defence, evaluation and service on a Ray cluster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"embedding": ["Summary", "defend_dataset"]})
