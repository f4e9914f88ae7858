"""What the registry says about one data set: its protocol (classes, split, prompts) and the places it can come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from react_clip.data.places import default_root

DEFAULT_TEMPLATE = "This is a photo of a {}."


@cache
def read_classes(name: str) -> tuple[tuple[str, str], ...]:
    """The ``(folder, class name)`` pairs of ``classes/<name>.txt``, in the official index order.

    >>> read_classes("stl10")[2]
    ('car', 'car')
    """
    text = files("react_clip.data").joinpath("classes", f"{name}.txt").read_text(encoding="utf-8")
    pairs = (line.split("\t") for line in text.splitlines())
    return tuple((folder, label) for folder, label in pairs)


@dataclass(frozen=True)
class DatasetSpec:
    """One of the paper's sets; ``classes`` and ``test_images`` are the paper's numbers, not what lies on disk."""

    name: str
    title: str
    classes: int
    test_images: int
    group: Literal["downstream", "imagenet"]
    page: str
    split: str = "test"
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    per_class: int | None = None
    """Photos kept per class in the test split; None keeps all."""
    official_splits: tuple[str, ...] = ("test",)
    """The splits that the official release has (the paper's test data is always called ``test`` here)."""
    torchvision: str = ""
    """The class of ``torchvision.datasets`` that reads or at least downloads it."""
    directories: tuple[str, ...] = ()
    """Where the official archive leaves its class folders, below the root; these hold the ``test`` split."""
    hub: str = ""
    """A Hugging Face repository of shards or parquet files, fetched into ``<root>/<name>`` on request."""
    hub_split: str = "test"
    """What that repository calls our ``test``."""
    archive: str = ""
    """A shell command that fetches the official archive, with ``{root}`` where the photos go."""
    class_list: str = ""
    """The file in ``classes/``, where it is not the set's own."""
    numbered: bool = False
    """Class folders are called by their index: ``0`` to ``999``."""
    ignored: tuple[str, ...] = ()
    """Folders of the release that are no class."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """What goes into the prompts, in index order."""
        return tuple(label for _, label in read_classes(self.class_list or self.name))

    @property
    def folders(self) -> tuple[str, ...]:
        """The release's own identifier of each class (folder name, WordNet id), in index order."""
        return tuple(folder for folder, _ in read_classes(self.class_list or self.name))

    @property
    def sources(self) -> tuple[str, ...]:
        """Where ``load`` looks, in order."""
        found = [f"folders <root>/{self.name}/<split>/<class>/"]
        found += [f"folders <root>/{directory}/<class>/" for directory in self.directories]
        found += [f"webdataset <root>/{self.name}/<split>/*.tar", f"parquet <root>/{self.name}/**/<split>*.parquet"]
        if self.torchvision:
            found.append(f"torchvision.datasets.{self.torchvision}")
        if self.hub:
            found.append(f"huggingface.co/datasets/{self.hub}")
        return tuple(found)

    @property
    def how_to_get(self) -> str:
        """The command and the page, for the default root."""
        return self.how_to_get_under(default_root())

    def how_to_get_under(self, root: Path) -> str:
        """The command that fetches the set into ``root``, and the page it comes from."""
        command = (
            self.archive.format(root=root)
            or f"python -c \"from react_clip import data; data.load('{self.name}', root='{root}', download=True)\""
        )
        return f"run: {command} (about the set: {self.page})"
