"""Untrusted bytes to pixels, in a few threads beside the event loop.

A thread cannot be stopped, so what bounds its time is checked first: the format by its first bytes, the pixels by the
header. A job that takes too long is given up by its caller and keeps its place until it ends, so that threads stay few.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from react_clip import noise
from react_clip.errors import ReactClipError
from react_clip.preprocess import Limits, to_pixels
from react_clip.serve.body import image_bytes
from react_clip.serve.engine import Photo
from react_clip.serve.problems import RequestError
from react_clip.serve.settings import FORMATS, Settings

P = ParamSpec("P")
T = TypeVar("T")


class DecoderPool:
    """Runs what costs time and memory: parsing bodies and decoding images."""

    def __init__(self, settings: Settings, *, size: int, secret: bytes) -> None:
        self._timeout = settings.decode_timeout
        self._limits = Limits(max_bytes=settings.max_body, max_pixels=settings.max_pixels, formats=FORMATS)
        self._size, self._secret = size, secret
        self._threads = ThreadPoolExecutor(settings.decoders, thread_name_prefix="react-clip-decode")
        self._places = asyncio.Semaphore(settings.decoders)

    async def photo(self, field: str, image: str | bytes) -> Photo:
        """One image, from a file's bytes or their base64, as pixels and the key of its noise."""
        return await self.run(field, self._decode, field, image)

    async def run(self, field: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread; waiting for a place counts towards the request's deadline only."""
        await self._places.acquire()
        try:
            job = self._threads.submit(function, *args, **kwargs)
        except BaseException:
            self._places.release()
            raise
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda _: _quietly(loop, self._places.release))
        try:
            async with asyncio.timeout(self._timeout):
                return await shielded(job)
        except TimeoutError:
            raise RequestError(
                422, f"{field} took longer than {self._timeout:g} s to read; scale it down", field=field
            ) from None

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, field: str, image: str | bytes) -> Photo:
        data = image_bytes(field, image)
        check_format(field, data)
        try:
            pixels = to_pixels(data, self._size, self._limits)
        except ReactClipError as error:
            raise RequestError(422, str(error).replace("the image", field, 1), field=field) from None
        return Photo(pixels, noise.stream_keys(pixels[None], self._secret)[0])


def shielded(job: Future[T]) -> Awaitable[T]:
    """Wait without the power to cancel: others may wait too, and who gives up leaves no error unheard for the log."""
    future = asyncio.wrap_future(job)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(future)


def check_format(field: str, data: bytes) -> None:
    """Refuse what does not start like a JPEG, PNG or WebP file: no other decoder ever sees a caller's bytes.

    >>> check_format("images[0]", b"GIF89a")
    Traceback (most recent call last):
    ...
    react_clip.serve.problems.RequestError: images[0] is no JPEG, PNG or WebP file; convert it to one of them
    """
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not (webp or data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"))):
        raise RequestError(415, f"{field} is no JPEG, PNG or WebP file; convert it to one of them", field=field)


def _quietly(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Tell the loop, unless it has ended while a thread was still busy."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        return
