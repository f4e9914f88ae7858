"""Classifiers for the label lists that requests bring, cached in memory.

Nothing of a request is written to the library's cache on disk, which belongs to the owner of the machine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from react_clip.bank import LabelBank
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.serve.errors import RequestError
from react_clip.zeroshot import DEFAULT_TEMPLATES, ZeroShotClassifier

if TYPE_CHECKING:
    from react_clip.serve.engine import Engine

_PROMPTS = 32
"""Prompts encoded at a time: the engine answers images in between, so a long list does not delay them."""


def label_source(encoder: Encoder) -> Literal["text", "bank", "preset"]:
    """Source of class features: text tower, label bank, or neither (only the server's own labels)."""
    return "text" if encoder.has_text else "bank" if encoder.base == LabelBank.load().encoder else "preset"


@dataclass(frozen=True)
class LabelList:
    """Names and templates of a request, or with ``preset`` the names of the service's own classes."""

    names: tuple[str, ...]
    templates: tuple[str, ...] = ()
    preset: bool = False


class LabelCache:
    """The ``settings.label_cache`` label lists that were used last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lists: OrderedDict[LabelList, asyncio.Task[ZeroShotClassifier]] = OrderedDict()

    async def get(self, labels: LabelList) -> ZeroShotClassifier:
        """Classifier of validated names; raises 422 where there are no features for them.

        Equal requests share one computation; cancelling one does not end it.
        """
        if labels not in self._lists:
            self._lists[labels] = task = asyncio.create_task(self._compute(labels.names, labels.templates))
            task.add_done_callback(partial(self._drop_failed, labels))
            if len(self._lists) > self._engine.settings.label_cache:
                self._lists.popitem(last=False)
        self._lists.move_to_end(labels)
        try:
            return await asyncio.shield(self._lists[labels])
        except ReactClipError as error:
            # The rest of the library's message is for programmers; a caller can only choose other names.
            line = str(error).partition("; use one of its names")[0] + "; choose other labels"
            raise RequestError(422, line, field="labels") from None

    def _drop_failed(self, labels: LabelList, done: asyncio.Task[ZeroShotClassifier]) -> None:
        if done.cancelled() or done.exception():
            self._lists.pop(labels, None)

    async def _compute(self, names: tuple[str, ...], templates: tuple[str, ...]) -> ZeroShotClassifier:
        encoder = self._engine.encoder
        if label_source(encoder) == "bank":
            return ZeroShotClassifier.from_features(encoder, names, LabelBank.load().features(names))
        # Not str.format, which would give a caller's template access to attributes.
        prompts = [template.replace("{}", name) for template in templates or DEFAULT_TEMPLATES for name in names]
        parts = []
        for start in range(0, len(prompts), _PROMPTS):
            encode = partial(encoder.encode_text, prompts[start : start + _PROMPTS])
            parts.append(await asyncio.wrap_future(self._engine.run(encode)))
        features = torch.cat(parts).reshape(-1, len(names), encoder.dim).mean(0)
        # On the engine's thread too: checking the features waits for a GPU.
        build = partial(ZeroShotClassifier.from_features, encoder, names, features)
        return await asyncio.wrap_future(self._engine.run(build))
