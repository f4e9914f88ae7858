"""The demo: attack a caller's photo and compare the answers of plain and defended CLIP.

The attack runs beside the model's thread, on one thread of its own, and therefore only where the model is in this
process.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Request
from torch import Tensor

from react_clip import noise
from react_clip.preprocess import data_uri, to_float, to_image
from react_clip.serve import responses
from react_clip.serve.client import ModelClient
from react_clip.serve.model import Model
from react_clip.serve.reading import read
from react_clip.serve.requests import Asked, AttackRequest, described

_DEADLINES = 9
"""Time for an attack, as a multiple of the deadline."""
_DRAWN = 127.0
"""Largest change in the picture of a perturbation, around grey, in 255ths."""


def routes(model: Model, secret: bytes) -> APIRouter:
    """The demo's route."""
    router, thread = APIRouter(prefix="/v1/demo", responses=responses.ERRORS), ThreadPoolExecutor(1)

    @router.post("/attack", openapi_extra=described(AttackRequest, eps=4))
    async def attack_photo(
        request: Request, asked: Annotated[Asked[AttackRequest], read(AttackRequest, _DEADLINES)]
    ) -> dict[str, Any]:
        """Attack a photo and compare the answers of plain and defended CLIP; slows down all other requests."""
        client: ModelClient = request.app.state.service.client
        eps, labels, left = asked.body.eps, asked.labels, Event()
        answers = await client.ask(asked.pixels, keys=asked.keys, labels=asked.body.labels)  # its labels are known now
        try:
            attack = asyncio.get_running_loop().run_in_executor(thread, attacked_with_answers, model, asked, left)
            photos, plain = await attack
        finally:
            left.set()  # the page's slider leaves many attacks behind
        key = noise.secret_key(photos[1], secret)
        answers += await client.ask(photos[1:], keys=[key], labels=asked.body.labels)
        versions: list[dict[str, Any]] = [
            {
                "image": data_uri(to_image(to_float(photo))),  # as the model sees it
                "plain": responses.top(labels, probs, asked.body.top_k),
                "defended": responses.top(labels, answer.probs, asked.body.top_k),
                "diagnostics": responses.Diagnostics.of(answer.numbers),
            }
            for photo, probs, answer in zip(photos, plain, answers, strict=True)
        ]
        change, scale = to_float(photos[1]) - to_float(photos[0]), _DRAWN / eps if eps else 1.0
        return {
            "model": client.info.model,
            "eps": eps,
            "attacked_label": versions[0]["plain"][0].label,
            "clean": versions[0],
            "attacked": versions[1],
            "perturbation": data_uri(to_image(0.5 + scale * change)),
            "amplification": scale,  # of the change in that picture
        }

    return router


def attacked_with_answers(model: Model, asked: Asked[AttackRequest], left: Event) -> tuple[Tensor, Tensor]:
    """The photo before and after the attack, ``[2, 3, S, S]`` in 8 bits, and plain CLIP's probabilities for both."""
    classes, eps = model.labels_of(asked.body.labels).classes, asked.body.eps / 255
    assert classes is not None, "the labels were needed for the first answer"
    clean = to_float(asked.pixels.to(model.encoder.device))

    def advance(_: int) -> None:
        if left.is_set():
            raise asyncio.CancelledError

    attacked = clean
    if eps > 0 and model.attack is not None:
        attacked = model.attack(classes, clean, int(classes(clean).argmax()), eps, advance)
    photos = torch.cat([clean, attacked]).mul(255).round().byte()
    with torch.no_grad():
        plain = model.encoder.similarity.probabilities(classes(to_float(photos)))
    return photos.cpu(), plain.cpu()
