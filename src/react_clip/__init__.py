"""react-clip: defend CLIP against adversarial images at test time, and measure how well that works.

The public names are listed in ``__init__.pyi`` and imported on first use: ``import react_clip`` alone does not import
torch.

>>> import react_clip as rc
>>> rc.ReACT().tau
0.7
"""

import lazy_loader

from react_clip.environment import share_cores

share_cores()
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
