"""What the routes do: ask the engine about photos, and say what this service is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from torch import Tensor

from react_clip import noise
from react_clip.errors import ReactClipError
from react_clip.preprocess import data_uri, to_image
from react_clip.serve.answers import diagnostics, top, written
from react_clip.serve.classes import ClassList
from react_clip.serve.decode import DecoderPool, shielded
from react_clip.serve.engine import Answer, Engine, Photo
from react_clip.serve.intake import Intake, check_labels
from react_clip.serve.problems import RequestError
from react_clip.serve.schemas import AttackRequest, ClassifyRequest, EmbedRequest
from react_clip.serve.settings import Settings

DemoAttack = Callable[[Tensor, ClassList, int, float], Tensor]
"""``(pixels [1, 3, S, S], classes, index of the class to leave, eps in [0, 1]) -> attacked pixels``."""

MOST_EPS = 16
"""Strongest attack of the demo, in 255ths."""

_DRAWN = 127.0 / 255.0
"""How large the strongest allowed change is drawn, around grey."""

_TYPICAL_DRIFTS = (0.0, 2.0)
"""The drifts between which nearly all images lie; the range of sigma is told for them."""


class Service:
    """One engine behind the routes."""

    def __init__(self, engine: Engine, settings: Settings, demo: DemoAttack | None) -> None:
        self.engine, self.settings, self.demo = engine, settings, demo
        self.name = settings.name or public_name(engine.encoder.name)
        self.decoders = DecoderPool(settings, size=engine.encoder.image_size, secret=engine.secret)
        self._intake = Intake(settings, self.decoders, name=self.name)

    async def classify(self, request: Request) -> dict[str, Any]:
        """``POST /v1/classify``."""

        async def work(asked: ClassifyRequest, photos: list[Photo]) -> dict[str, Any]:
            answers = await self._ask(photos, await self._classes(asked.labels, asked.templates))
            results = []
            for index, answer in enumerate(answers):
                best = top(answer.classes, answer.probs, asked.top_k)
                results.append({"index": index, **best[0], "answers": best, **self._why(answer)})
            return {"model": self.name, "results": results}

        return await self._intake.handle(request, ClassifyRequest, work)

    async def embed(self, request: Request) -> dict[str, Any]:
        """``POST /v1/embed``; the labels only serve the gate."""

        async def work(asked: EmbedRequest, photos: list[Photo]) -> dict[str, Any]:
            answers = await self._ask(photos, await self._classes(asked.labels, asked.templates), whole=True)
            data = []
            for index, answer in enumerate(answers):
                feature = written(answer.feature, asked.encoding_format)
                data.append({"object": "embedding", "index": index, "embedding": feature, **self._why(answer)})
            usage = {"prompt_tokens": 0, "total_tokens": 0, "images": len(data)}
            return {"object": "list", "data": data, "model": self.name, "usage": usage}

        return await self._intake.handle(request, EmbedRequest, work)

    async def attack(self, request: Request) -> dict[str, Any]:
        """``POST /v1/demo/attack``: runs on the engine's thread and holds up everybody; that is why it is a demo."""
        demo = self.demo
        assert demo is not None, "the route exists only with a demo"

        async def work(asked: AttackRequest, photos: list[Photo]) -> dict[str, Any]:
            classes = await self._classes(asked.labels, asked.templates)
            [clean] = await self._ask(photos, classes)
            target, eps, pixels = int(clean.plain_probs.argmax()), asked.eps / 255, photos[0].pixels
            attacked, scale = pixels, 1.0
            if eps > 0:
                scale = _DRAWN / eps
                # Who moves a slider leaves many requests behind; those that still wait are not computed.
                wanted = [pixels[None]]
                run = self.engine.call(lambda: demo(wanted[0], classes, target, eps) if wanted else pixels)
                try:
                    attacked = (await shielded(run))[0].cpu()
                finally:
                    wanted.clear()
            photo = Photo(attacked, noise.stream_keys(attacked[None], self.engine.secret)[0])
            [after] = await self._ask([photo], classes)
            return {
                "model": self.name,
                "eps": asked.eps,
                "attacked_label": classes.names[target],
                "clean": _scene(pixels, clean, asked.top_k),
                "attacked": _scene(attacked, after, asked.top_k),
                "perturbation": data_uri(to_image(0.5 + scale * (attacked - pixels))),
                "amplification": scale,
            }

        return await self._intake.handle(request, AttackRequest, work)

    def info(self) -> dict[str, Any]:
        """``GET /v1/info``: what a page needs to know before it asks."""
        from react_clip.environment import __version__

        engine, settings, guard = self.engine, self.settings, self.engine.guard
        span = sorted(guard.mapping(torch.tensor(_TYPICAL_DRIFTS)).tolist())
        most = guard.cost()[0]
        return {
            "service": "react-clip",
            "version": __version__,
            "model": self.name,
            "image_size": engine.encoder.image_size,
            "dim": engine.encoder.dim,
            "labels": {
                "preset": list(engine.preset.names),
                "free": self._takes_labels,
                "source": engine.label_source if self._takes_labels else "preset",
                "templates": self._takes_labels and engine.label_source == "text",
            },
            "formats": ["image/jpeg", "image/png", "image/webp"],
            "limits": {
                "body_bytes": settings.max_body,
                "images": settings.max_images,
                "pixels": settings.max_pixels,
                "labels": settings.max_labels,
                "label_length": settings.max_label_length,
                "deadline_seconds": settings.deadline,
            },
            "diagnostics": settings.tells_diagnostics,
            "demo": None if self.demo is None else {"eps_least": 0, "eps_most": MOST_EPS},
            "defence": {
                "name": guard.name,
                "tau": guard.tau,
                "alpha": guard.alpha,
                "views": guard.views,
                "probe_sigma": [guard.sigma_low, guard.sigma_high],
                "sigma": {"least": span[0], "most": span[1], "mapping": guard.mapping.to_dict()},
                "passes": {"least": 1 + 2 * guard.probe_samples if guard.lazy else most, "most": most},
                "constant_work": not guard.lazy,
            },
        }

    @property
    def _takes_labels(self) -> bool:
        return self.engine.label_source != "preset" and not self.settings.fixed_labels

    async def _ask(self, photos: list[Photo], classes: ClassList, *, whole: bool = False) -> list[Answer]:
        futures = self.engine.submit(photos, classes, whole=whole)
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            # Whoever gave up must not be computed for.
            for future in futures:
                future.cancel()

    async def _classes(self, labels: list[str] | None, templates: list[str] | None) -> ClassList:
        if labels is None:
            if templates is not None:
                raise RequestError(422, "templates are given without labels; give both or neither", field="templates")
            return self.engine.preset
        if not self._takes_labels:
            line = "labels are given, but this service answers for its own only; leave them out"
            raise RequestError(422, line, field="labels")
        names, prompts = check_labels(labels, templates, self.settings)
        if prompts is not None and self.engine.label_source == "bank":
            line = "templates are given, but this model has no text tower; leave them out"
            raise RequestError(422, line, field="templates")
        try:
            return await shielded(self.engine.classes(names, prompts))
        except ReactClipError as error:
            # The library goes on with what a programmer could do; a caller has the names only.
            line = str(error).partition("; use one of its names")[0] + "; choose other labels"
            raise RequestError(422, line, field="labels") from None

    def _why(self, answer: Answer) -> dict[str, Any]:
        return {"diagnostics": diagnostics(answer)} if self.settings.tells_diagnostics else {}


def _scene(pixels: Tensor, answer: Answer, count: int) -> dict[str, Any]:
    return {
        "image": data_uri(to_image(pixels)),
        "plain": top(answer.classes, answer.plain_probs, count),
        "defended": top(answer.classes, answer.probs, count),
        "diagnostics": diagnostics(answer),
    }


def public_name(name: str) -> str:
    """A model's name without the folders of this machine.

    >>> public_name("openai/clip-vit-base-patch32"), public_name("clip-vit-b-16+/data/runs/tecoa.safetensors")
    ('openai/clip-vit-base-patch32', 'clip-vit-b-16+tecoa.safetensors')
    """
    base, plus, file = name.partition("+")
    base = Path(base).resolve().name if Path(base).is_dir() else base
    return base + plus + Path(file).name
