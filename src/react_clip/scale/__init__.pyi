from .embedding import defend_dataset as defend_dataset
from .output import Summary as Summary
