"""The demo: attack a caller's photo and compare the answers of plain and defended CLIP.

It computes beside the model's thread, on one thread of its own, and therefore only where the model is in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Request

from react_clip import noise
from react_clip.preprocess import data_uri, to_float, to_image
from react_clip.serve import openapi, requests, responses
from react_clip.serve.app import read
from react_clip.serve.model import Model

AttackBody = Annotated[requests.Asked[requests.AttackRequest], Depends(read(requests.AttackRequest))]

_IDLE = {"done": 0, "steps": 0}
_DRAWN = 127.0 / 255.0
"""Largest change in the picture of a perturbation, around grey."""


def routes(model: Model, secret: bytes) -> APIRouter:
    """The demo's routes."""
    router = APIRouter(prefix="/v1/demo", responses=openapi.errors(*openapi.BODY_ERRORS))
    thread, steps = ThreadPoolExecutor(1), _IDLE

    @router.post("/attack", openapi_extra=openapi.request_body(requests.AttackRequest, eps=4))
    async def attack_photo(request: Request, asked: AttackBody) -> dict[str, Any]:
        """Attack a photo and compare the answers of plain and defended CLIP; slows down all other requests."""
        nonlocal steps
        ended = False
        await request.app.state.service.client.submit(
            asked.pixels, asked.keys, asked.label_list
        )  # its labels are known now

        def advance(done: int, of: int) -> None:
            nonlocal steps
            if ended:  # the page's slider leaves many attacks behind
                raise asyncio.CancelledError
            steps = {"done": done, "steps": of}

        try:
            job = partial(compare, model, secret, asked, advance)
            return await asyncio.get_running_loop().run_in_executor(thread, job)
        finally:
            ended, steps = True, _IDLE

    @router.get("/progress")
    async def progress() -> dict[str, int]:
        """Steps of the attack that runs now."""
        return steps

    return router


def compare(
    model: Model, secret: bytes, asked: requests.Asked[requests.AttackRequest], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Answers of plain and defended CLIP for a photo before and after an attack."""
    encoder, eps, labels = model.encoder, asked.body.eps / 255, asked.labels
    classes = model.classes(asked.label_list)
    clean = to_float(asked.pixels.to(encoder.device))
    attacked = clean
    if eps > 0 and model.attack is not None:
        attacked = model.attack(classes, clean, int(classes(clean).argmax()), eps, progress)
    pixels = torch.cat([clean, attacked])
    with torch.no_grad():
        plain = encoder.similarity.probabilities(classes(pixels)).cpu()
        out = model.defense.run(encoder, pixels, noise.stream_keys(pixels, secret), classes)
    numbers = model.numbers(out)

    def version(row: int) -> dict[str, Any]:
        measured = {name: float(values[row]) for name, values in numbers.items()}
        return {
            "image": data_uri(to_image(pixels[row])),  # as the model sees it
            "plain": responses.top(labels, plain[row], asked.body.top_k),
            "defended": responses.top(labels, out.probs[row].cpu(), asked.body.top_k),
            "diagnostics": responses.Diagnostics.of(measured),
        }

    scale = _DRAWN / eps if eps else 1.0
    return {
        "model": model.info.model,
        "eps": asked.body.eps,
        "attacked_label": labels[int(plain[0].argmax())],
        "clean": version(0),
        "attacked": version(1),
        "perturbation": data_uri(to_image(0.5 + scale * (attacked[0] - clean[0]))),
        "amplification": scale,  # of the change in that picture
    }
