"""Classifiers for the label lists that requests bring, cached in memory.

Nothing of a request is written to the library's cache on disk, which belongs to the owner of the machine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Literal

import torch

from react_clip.bank import LabelBank
from react_clip.serve.engine import Engine
from react_clip.zeroshot import DEFAULT_TEMPLATES, ZeroShotClassifier

_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Names and templates."""

_PROMPTS = 32
"""Prompts encoded at a time: the engine answers images in between, so a long list does not delay them."""


class LabelCache:
    """The ``settings.label_cache`` label lists that were used last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        encoder = engine.encoder
        self.source: Literal["text", "bank", "preset"] = (
            "text" if encoder.has_text else "bank" if encoder.base == LabelBank.load().encoder else "preset"
        )
        """Source of class features: text tower, label bank, or neither (only the server's own labels)."""
        self._lists: OrderedDict[_Key, asyncio.Task[ZeroShotClassifier]] = OrderedDict()

    async def get(self, names: tuple[str, ...], templates: tuple[str, ...]) -> ZeroShotClassifier:
        """Classifier of validated names. Equal requests share one computation; cancelling one does not end it."""
        key = (names, templates)
        if key not in self._lists:
            self._lists[key] = task = asyncio.create_task(self._compute(names, templates))
            task.add_done_callback(partial(self._drop_failed, key))
            if len(self._lists) > self._engine.settings.label_cache:
                self._lists.popitem(last=False)
        self._lists.move_to_end(key)
        return await asyncio.shield(self._lists[key])

    def _drop_failed(self, key: _Key, done: asyncio.Task[ZeroShotClassifier]) -> None:
        if done.cancelled() or done.exception():
            self._lists.pop(key, None)

    async def _compute(self, names: tuple[str, ...], templates: tuple[str, ...]) -> ZeroShotClassifier:
        encoder = self._engine.encoder
        if self.source == "bank":
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
