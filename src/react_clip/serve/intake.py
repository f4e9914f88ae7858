"""From a request to checked fields and decoded photos, and to an answer in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from react_clip.errors import ReactClipError
from react_clip.serve.body import Buffers, media_type, parse_body, read_body
from react_clip.serve.decode import DecoderPool
from react_clip.serve.engine import EngineError, OverloadedError, Photo, TooLateError
from react_clip.serve.problems import RequestError, busy, shown
from react_clip.serve.schemas import Model, validate
from react_clip.serve.settings import Settings
from react_clip.zeroshot import check_names

T = TypeVar("T")


class Intake:
    """Bodies are read and images decoded before anything enters the engine's queue: who sends slowly waits alone."""

    def __init__(self, settings: Settings, decoders: DecoderPool, *, name: str) -> None:
        self._settings, self._decoders, self._name = settings, decoders, name
        self._buffers = Buffers(max(settings.max_buffered, settings.max_body))

    async def handle(
        self, request: Request, model: type[Model], work: Callable[[Model, list[Photo]], Awaitable[T]]
    ) -> T:
        """Read, check and decode a request, and give it to ``work``."""
        kind, boundary = media_type(request)
        with self._buffers.lease() as lease:
            try:
                body = await read_body(request, self._settings, lease)
            except ClientDisconnect:
                raise _gone() from None

            async def steps() -> T:
                fields = await self._decoders.run("the body", parse_body, body, boundary, self._settings)
                asked = validate(model, fields, strict=kind == "application/json")
                if asked.model not in (None, "", self._name):
                    raise RequestError(
                        422, f"model is {shown(asked.model)}; this service has {self._name!r}", field="model"
                    )
                if asked.labels is not None:
                    check_labels(asked.labels, asked.templates, self._settings)
                return await work(asked, await self._decode(asked.images))

            return await self._in_time(request, steps())

    async def _in_time(self, request: Request, work: Awaitable[T]) -> T:
        """The work's result, unless the deadline passes or the caller leaves; then nothing of it stays queued."""
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({task, left}, timeout=self._settings.deadline, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            if left.done():
                raise _gone()
            raise TooLateError
        except TooLateError:
            raise busy(
                f"the answer was not ready within {self._settings.deadline:g} s; try again, or send fewer images",
                kind="deadline",
            ) from None
        except OverloadedError:
            raise busy("the queue is full; try again soon") from None
        except EngineError:
            raise busy("the model could not answer this batch; try again", kind="unavailable") from None
        finally:
            left.cancel()
            task.cancel()

    async def _decode(self, images: list[str | bytes]) -> list[Photo]:
        most = self._settings.max_images
        if len(images) > most:
            raise RequestError(
                422, f"images has {len(images)} entries; the limit is {most}; send several requests", field="images"
            )
        jobs = [asyncio.ensure_future(self._decoders.photo(f"images[{i}]", image)) for i, image in enumerate(images)]
        try:
            return list(await asyncio.gather(*jobs))
        finally:
            for job in jobs:
                job.cancel()


def check_labels(
    labels: list[str], templates: list[str] | None, settings: Settings
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Names and templates within the limits."""
    for field, texts in (("labels", labels), ("templates", templates or [])):
        for i, text in enumerate(texts):
            if len(text) > settings.max_label_length:
                raise RequestError(
                    422,
                    f"{field}[{i}] has {len(text)} characters; the limit is {settings.max_label_length}; shorten it",
                    field=f"{field}[{i}]",
                )
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(
                    422,
                    f"{field}[{i}] is {shown(text)}, half of a surrogate pair; write text that UTF-8 can hold",
                    field=f"{field}[{i}]",
                )
    prompts = len(labels) * len(templates or [""])
    if prompts > settings.max_labels:
        raise RequestError(
            422,
            f"labels times templates makes {prompts} prompts; the limit is {settings.max_labels}; send fewer",
            field="labels",
        )
    for i, template in enumerate(templates or []):
        if template.count("{}") != 1:
            raise RequestError(
                422,
                f"templates[{i}] is {shown(template)}; it needs exactly one {{}} where the label goes",
                field=f"templates[{i}]",
            )
    try:
        return check_names(labels), None if templates is None else tuple(templates)
    except ReactClipError as error:
        raise RequestError(422, str(error), field="labels") from None


async def _disconnected(request: Request) -> None:
    """Returns when the caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _gone() -> RequestError:
    return RequestError(400, "the connection ended before the answer was ready", kind="disconnected")
