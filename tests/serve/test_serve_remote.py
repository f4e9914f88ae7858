"""An engine that answers through a socket and shared memory, in this process: the same answers, refusals, lost ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import values
from serve_client import LABELS, SECOND_LOOK, in_loop, record_batches

import react_clip as rc
from react_clip import noise
from react_clip.preprocess import to_8bit
from react_clip.serve.answers import Answer, Photo
from react_clip.serve.engine import Engine
from react_clip.serve.errors import RequestError
from react_clip.serve.labels import LabelList
from react_clip.serve.metrics import share_between_processes
from react_clip.serve.remote import ModelServer, RemoteEngine, SharedMemory
from react_clip.serve.responses import Info
from react_clip.serve.settings import Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SECRET = b"some secret bytes"
PRESET = LabelList(LABELS, preset=True)
Check = Callable[[RemoteEngine, Engine], Any]


@pytest.fixture
def engine(encoder: rc.Encoder) -> Engine:
    preset = rc.ZeroShotClassifier(encoder, LABELS)
    settings = Settings(batch=16, queue=16, processes=2, deadline=1e6)
    return Engine(encoder, SECOND_LOOK, preset, secret=SECRET, settings=settings)


@pytest.fixture
def run(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Check], None]:
    """Run a coroutine with both ends."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    share_between_processes(str(tmp_path), 0)

    @asynccontextmanager
    async def connected() -> AsyncIterator[RemoteEngine]:
        memory = SharedMemory(1)
        server = ModelServer(engine, memory, str(tmp_path))
        async with server.listening():
            remote = RemoteEngine(
                Info.of(engine, demo=False),
                engine.preprocessing,
                memory=memory,
                place=0,
                folder=str(tmp_path),
                secret=SECRET,
                settings=engine.settings,
            )
            await remote.connect()
            yield remote
            remote.stop()

    async def check_with(check: Check) -> None:
        async with connected() as remote:
            await asyncio.wait_for(check(remote, engine), 60)

    return lambda check: in_loop(check_with(check))


def prepared(engine: Engine, photos: list[bytes]) -> list[Photo]:
    pixels = [to_8bit(photo, engine.preprocessing) for photo in photos]
    return [Photo(image, int(noise.stream_keys(image[None], SECRET))) for image in pixels]


def assert_same(first: Answer, second: Answer) -> None:
    assert torch.equal(first.feature, second.feature)
    assert torch.equal(first.probs, second.probs)
    assert (first.diagnostics, first.branch) == (second.diagnostics, second.branch)


@pytest.mark.parametrize("labels", [PRESET, LabelList(("boat", "zebra", "cup"), ("a {}!",))], ids=["preset", "own"])
def test_answers_are_the_engines(run: Callable[[Check], None], photos: list[bytes], labels: LabelList) -> None:
    async def check(remote: RemoteEngine, engine: Engine) -> None:
        images = prepared(engine, photos)
        answers = await remote.ask(images, labels)
        assert len({answer.branch for answer in answers}) > 1
        for answer, direct in zip(answers, await engine.ask(images, labels), strict=True):
            assert_same(answer, direct)

    run(check)


def test_requests_share_batches_and_slots_are_reused(run: Callable[[Check], None], photos: list[bytes]) -> None:
    async def check(remote: RemoteEngine, engine: Engine) -> None:
        batches, images = record_batches(engine), prepared(engine, photos)
        for _ in range(5):
            alone = [[image] for image in images]
            answers = await asyncio.gather(*(remote.ask(one, PRESET) for one in alone))
            for [answer], direct in zip(answers, await engine.ask(images, PRESET), strict=True):
                assert torch.allclose(answer.feature, direct.feature, atol=1e-6)
        sizes = [size for size, _ in batches]
        assert sum(sizes) == 10 * len(images)
        assert max(sizes) == len(images)
        assert remote.free_slots == engine.settings.queue

    run(check)


def test_images_of_a_request_in_batches_with_longer_label_lists(
    run: Callable[[Check], None], photos: list[bytes]
) -> None:
    async def check(remote: RemoteEngine, engine: Engine) -> None:
        engine.settings = engine.settings.model_copy(update={"batch": 4})
        batches, images = record_batches(engine), prepared(engine, photos)[:5]
        longer = LabelList(("boat", "zebra", "cup", "moon", "hat"))
        await remote.ask(images[:1], longer)  # so that its classes are known
        first, second = await asyncio.gather(remote.ask(images, PRESET), remote.ask(images[:3], longer))
        assert batches[1:] == [(4, 1), (4, 2)]
        for answers, labels in ((first, PRESET), (second, longer)):
            for answer, image in zip(answers, images, strict=False):
                [direct] = await engine.ask([image], labels)
                assert len(answer.probs) == len(labels.names)
                assert torch.allclose(answer.row, direct.row, atol=1e-5, equal_nan=True)

    run(check)


def test_refusals_reach_the_caller(run: Callable[[Check], None], photos: list[bytes]) -> None:
    async def check(remote: RemoteEngine, engine: Engine) -> None:
        images = prepared(engine, photos)
        with pytest.raises(RequestError, match="queue is full") as refused:
            await remote.ask(images * 2, PRESET)
        assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
        engine.encoder.encode_text = lambda prompts: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        try:
            with pytest.raises(RequestError, match="labels could not be encoded") as failed:
                await remote.ask(images[:1], LabelList(("a new one",)))
        finally:
            del engine.encoder.encode_text  # type: ignore[method-assign]
        assert (failed.value.status, failed.value.kind) == (503, "unavailable")
        assert len(await remote.ask(images, PRESET)) == len(images)

    run(check)


def test_images_of_a_cancelled_request_are_not_computed(run: Callable[[Check], None], photos: list[bytes]) -> None:
    async def check(remote: RemoteEngine, engine: Engine) -> None:
        batches, images = record_batches(engine), prepared(engine, photos)
        request = remote.ask(images, PRESET)
        request.send(None)  # until it waits for its answers, without a turn of the event loop
        with pytest.raises(asyncio.CancelledError):
            request.throw(asyncio.CancelledError())
        assert len(await remote.ask(images[:2], PRESET)) == 2
        assert batches == [(2, 1)]
        assert remote.free_slots == engine.settings.queue

    run(check)
