"""The engine and the application around it, in this process: batches, deadlines, abandoned requests, failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest
import torch
from serve_client import GUARD, LABELS, as_form, as_json, check_error

import react_clip as rc
from react_clip import noise
from react_clip.preprocess import to_pixels
from react_clip.serve.app import DemoAttack, create_app
from react_clip.serve.engine import (
    Answer,
    BatchStats,
    ClassList,
    Engine,
    EngineError,
    ExpiredError,
    OverloadedError,
    Photo,
)
from react_clip.serve.labels import LabelCache
from react_clip.serve.settings import Settings

SECRET = b"some secret bytes"


@pytest.fixture
def engine(encoder: rc.Encoder) -> Iterator[Engine]:
    """Not started: images that are queued before the start share a batch."""
    preset = ClassList.of(rc.ZeroShotClassifier(encoder, LABELS))
    settings = Settings(batch=16, queue=32, label_cache=2, deadline=1e6, demo=True)
    engine = Engine(encoder, GUARD, preset, secret=SECRET, settings=settings)
    yield engine
    engine.stop()


def prepared(photos: list[bytes]) -> list[Photo]:
    pixels = [to_pixels(photo, 32) for photo in photos]
    return [Photo(image, noise.stream_keys(image[None], SECRET)[0]) for image in pixels]


def passes(answer: Answer) -> int:
    return int(answer.diagnostics["passes"])


def record_batches(engine: Engine) -> list[BatchStats]:
    batches: list[BatchStats] = []
    engine.on_batch = batches.append
    return batches


def test_images_of_different_lists_share_a_batch_and_keep_their_answers(
    engine: Engine, encoder: rc.Encoder, photos: list[bytes]
) -> None:
    other = ClassList.of(rc.ZeroShotClassifier(encoder, ["zebra", "boat", "a red car", "moon", "cup"]))
    batches = record_batches(engine)
    lists = [engine.preset if i % 3 else other for i in range(len(photos))]
    futures = [engine.submit([photo], classes)[0] for photo, classes in zip(prepared(photos), lists, strict=True)]
    engine.start()
    answers = [future.result() for future in futures]
    assert batches[0].images == len(photos) + 1, "the warm-up image came last and joined them"
    assert batches[0].label_lists == 2
    assert {passes(answer) for answer in answers} >= {3, 13}, "gates that opened and gates that did not"
    for photo, classes, answer in zip(photos, lists, answers, strict=True):
        clf = rc.ZeroShotClassifier.from_features(encoder, classes.names, classes.features)
        alone = GUARD(clf, [photo], seed=SECRET)
        assert classes.names[int(answer.probs.argmax())] == alone.names[0]
        assert torch.allclose(answer.feature, alone.features[0], atol=1e-5)
        assert torch.allclose(answer.probs, alone.probs[0], atol=1e-3)
        assert (answer.diagnostics["gated"], passes(answer)) == (bool(alone.gated[0]), int(alone.passes[0]))
    opened = sum(answer.diagnostics["gated"] for answer in answers)
    assert batches[0].gates_opened - opened in (0, 1), "the warm-up image may have opened its gate too"
    assert batches[0].passes - sum(map(passes, answers)) in (3, 4, 13, 14)


def test_all_views_are_drawn_for_features(engine: Engine, photos: list[bytes]) -> None:
    engine.guard = GUARD.replace(tau=-1e9, sequential=0.5)
    engine.start()
    ready = prepared(photos[:4])
    answers = [future.result() for future in engine.submit(ready, engine.preset)]
    features = [future.result() for future in engine.submit(ready, engine.preset, all_views=True)]
    assert [passes(answer) for answer in features] == [13] * 4
    assert sum(map(passes, answers)) < 4 * 13
    mixed = engine.submit(ready[:2], engine.preset) + engine.submit(ready[2:], engine.preset, all_views=True)
    assert [passes(one.result()) for one in mixed] == [passes(answers[0]), passes(answers[1]), 13, 13]
    assert torch.allclose(mixed[3].result().feature, features[3].feature, atol=1e-5)


def test_the_queue_takes_a_request_whole_or_not_at_all(engine: Engine, photos: list[bytes]) -> None:
    ready = prepared(photos)
    engine.submit(ready + ready, engine.preset)
    with pytest.raises(OverloadedError):
        engine.submit(ready, engine.preset)
    assert (engine.waiting, engine.free_slots) == (24, 8)
    engine.submit(ready[:8], engine.preset)
    assert engine.free_slots == 0


def test_cancelled_images_are_not_computed(engine: Engine, photos: list[bytes]) -> None:
    batches = record_batches(engine)
    first, second = engine.submit(prepared(photos[:2]), engine.preset)
    assert second.cancel()
    engine.start()
    assert passes(first.result()) > 0
    assert batches[0].images == 2, "the first one and the warm-up"


def in_loop(coroutine: Any) -> Any:
    """Run a coroutine in a thread, because a browser's event loop may run in this one."""
    with ThreadPoolExecutor() as thread:
        return thread.submit(asyncio.run, coroutine).result()


def test_images_are_answered_while_a_long_label_list_is_computed(engine: Engine, photos: list[bytes]) -> None:
    async def check() -> None:
        long = asyncio.create_task(LabelCache(engine).get(tuple(f"thing {i}" for i in range(600)), ()))
        await asyncio.sleep(0)
        [image] = engine.submit(prepared(photos[:1]), engine.preset)
        await asyncio.wrap_future(image)
        assert not long.done(), "the image ran between two parts of the list"
        assert (await long).features.shape == (600, 32)

    engine.start()
    in_loop(check())


def test_label_lists_are_shared_and_the_cache_is_bounded(
    engine: Engine, encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, calls, encode_text = ("cat", "boat"), [], encoder.encode_text
    plain = rc.ZeroShotClassifier(encoder, names).class_features
    ensemble = rc.ZeroShotClassifier(encoder, names, templates=["a {}", "the {}!"]).class_features
    monkeypatch.setattr(encoder, "encode_text", lambda prompts: (calls.append(prompts), encode_text(prompts))[1])

    async def check() -> None:
        cache = LabelCache(engine)
        first, second = await asyncio.gather(cache.get(names, ()), cache.get(names, ()))
        assert first is second
        assert len(calls) == 1
        assert torch.allclose(first.features, plain, atol=1e-5)
        assert torch.allclose((await cache.get(names, ("a {}", "the {}!"))).features, ensemble, atol=1e-5)
        assert await cache.get(names, ()) is first
        await cache.get(("dog",), ())
        assert await cache.get(names, ()) is first, "the cache has two places, the other list was older"
        await cache.get(names, ("a {}", "the {}!"))
        assert len(calls) == 4
        monkeypatch.setattr(encoder, "encode_text", lambda prompts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await cache.get(("new",), ())
        monkeypatch.setattr(encoder, "encode_text", encode_text)
        assert (await cache.get(("new",), ())).names == ("new",), "a failed list is not cached"

    engine.start()
    in_loop(check())


def test_a_failure_costs_its_batch_and_not_the_engine(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(engine.encoder, "encode_views", lambda pixels: pixels.flatten(1)[:, :32] * torch.nan)
        with pytest.raises(EngineError):
            engine.submit(prepared(photos[:1]), engine.preset)[0].result()
    assert passes(engine.submit(prepared(photos[:1]), engine.preset)[0].result()) > 0


def test_waiting_images_are_answered_before_the_end(engine: Engine, photos: list[bytes]) -> None:
    engine.start()
    futures = engine.submit(prepared(photos), engine.preset)
    engine.stop()
    assert all(future.done() for future in futures)
    assert not engine.alive
    with pytest.raises(OverloadedError):
        engine.submit(prepared(photos[:1]), engine.preset)


def test_expired_images_fail_and_batches_shrink(encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more images arrive at once than can be answered before the deadline."""
    seconds, deadline, count = 0.05, 2.0, 200
    preset = ClassList.of(rc.ZeroShotClassifier(encoder, ["cat", "dog"]))
    settings = Settings(batch=count, queue=count, deadline=deadline)
    engine = Engine(encoder, rc.ReACT(), preset, secret=SECRET, settings=settings)
    compute = engine._compute

    def slow(batch: list[Any]) -> list[Any]:
        time.sleep(seconds * len(batch))
        return compute(batch)

    monkeypatch.setattr(engine, "_compute", slow)
    try:
        engine.start()
        batches = record_batches(engine)
        photo = Photo(torch.full((3, encoder.image_size, encoder.image_size), 0.5), torch.zeros((), dtype=torch.long))
        futures = engine.submit([photo] * count, preset)
        wait(futures)
    finally:
        engine.stop()
    errors = [future.exception() for future in futures]
    assert {type(error) for error in errors} == {type(None), ExpiredError}
    # A busy machine only makes batches smaller.
    assert max(batch.images for batch in batches) <= deadline / 4 / seconds


# ---------------------------------------------------------------------- the application


def ask(engine: Engine, path: str, attack: DemoAttack | None = None, **body: Any) -> Any:
    """POST to an application in this process."""

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine, attack))
        async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
            return await client.post(path, **body)

    return in_loop(post())


def test_the_application_takes_any_attack(engine: Engine, photos: list[bytes]) -> None:
    engine.start()

    def brighten(pixels: torch.Tensor, classes: ClassList, label: int, eps: float) -> torch.Tensor:
        assert classes.names == LABELS
        assert eps == pytest.approx(2 / 255)
        return (pixels + eps).clamp(0, 1)

    answer = ask(engine, "/v1/demo/attack", brighten, **as_json(photos[:1], eps=2)).json()
    assert answer["attacked"]["image"] != answer["clean"]["image"]


def test_a_late_answer_is_503_and_its_images_are_not_computed(engine: Engine, photos: list[bytes]) -> None:
    engine.start()
    engine.settings = Settings(deadline=0.2)
    release = threading.Event()
    batches = record_batches(engine)
    engine.run(lambda: torch.tensor(release.wait(60)))
    late = ask(engine, "/v1/classify", **as_form(photos[:8]))
    release.set()
    check_error(late, 503, "0.2 s")
    assert late.json()["error"]["type"] == "deadline"
    assert int(late.headers["retry-after"]) >= 1
    engine.run(lambda: torch.zeros(1)).result(60)
    assert batches == []


def test_a_model_that_fails_is_503(engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start()
    monkeypatch.setattr(engine, "_compute", lambda batch: 1 / 0)
    answer = ask(engine, "/v1/classify", **as_form(photos[:1]))
    check_error(answer, 503, "could not answer")
    assert answer.json()["error"]["type"] == "unavailable"


def test_an_attack_of_an_abandoned_request_is_not_computed(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    run, queued, release, computed = engine.run, threading.Event(), threading.Event(), []

    def run_later(function: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Queue the attack behind a task that waits."""
        run(lambda: torch.tensor(release.wait(60)))
        attack = run(function)
        queued.set()
        return attack

    def attack(pixels: torch.Tensor, classes: ClassList, label: int, eps: float) -> torch.Tensor:
        computed.append(eps)
        return pixels

    async def ask_and_leave() -> None:
        transport = httpx.ASGITransport(create_app(engine, attack))
        async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
            task = asyncio.create_task(client.post("/v1/demo/attack", **as_form(photos[:1])))
            await asyncio.to_thread(queued.wait, 60)
            task.cancel()
            await asyncio.wait([task])

    monkeypatch.setattr(engine, "run", run_later)
    in_loop(ask_and_leave())
    release.set()
    run(lambda: torch.zeros(1)).result(60)
    assert computed == []
