"""The registry of data sets, and one way to load any of them.

>>> from react_clip import data
>>> len(data.names()), data.get("dtd").templates
(17, ('A surface with a {} texture.',))
"""

from react_clip.data.dataset import ClassFeatures, ImageDataset, Photo, load_class_features
from react_clip.data.loading import load
from react_clip.data.registry import DatasetSpec, default_root, get, names

__all__ = [
    "ClassFeatures",
    "DatasetSpec",
    "ImageDataset",
    "Photo",
    "default_root",
    "get",
    "load",
    "load_class_features",
    "names",
]
