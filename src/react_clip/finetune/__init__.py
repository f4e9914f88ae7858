"""Adversarially finetuned image towers: TeCoA, PMG-AFT, FARE and CLIP-FT; an interrupted run can be continued.

The public names are listed in ``__init__.pyi`` and imported on first use: the settings of a run need no torch.

>>> from react_clip import finetune
>>> finetune.names()
['clip-ft', 'fare', 'pmg-aft', 'tecoa']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
