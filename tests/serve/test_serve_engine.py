"""The engine and the application around it, in this process: batches, deadlines, abandoned requests, failures."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from serve_client import GUARD, LABELS, SECOND_LOOK, as_form, check_error, in_loop, record_batches

import react_clip as rc
from react_clip import noise
from react_clip.accelerate import HostCopy
from react_clip.preprocess import to_pixels
from react_clip.serve import memory
from react_clip.serve.answers import Answer, Photo
from react_clip.serve.app import DemoAttack, create_app
from react_clip.serve.decoding import Decoder
from react_clip.serve.engine import Engine
from react_clip.serve.errors import RequestError
from react_clip.serve.labels import LabelCache, LabelList
from react_clip.serve.remote import LoopExecutor
from react_clip.serve.settings import Settings
from toys import RecordsOnACPU, on_a_gpu, patch_encoder

SECRET = b"some secret bytes"


@pytest.fixture
def engine(encoder: rc.Encoder) -> Iterator[Engine]:
    settings = Settings(batch=16, queue=32, label_cache=2, deadline=1e6, demo=True)
    preset = rc.ZeroShotClassifier(encoder, LABELS)
    engine = Engine(encoder, GUARD, preset, secret=SECRET, settings=settings)
    yield engine
    engine.stop()


def prepared(photos: list[bytes]) -> list[Photo]:
    pixels = [to_pixels(photo, 32) for photo in photos]
    return [Photo(image, int(noise.stream_keys(image[None], SECRET))) for image in pixels]


def passes(answer: Answer) -> int:
    return int(answer.diagnostics["passes"])


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine computes nothing within this block: images that are queued in it share a batch."""
    release = threading.Event()
    engine.run(release.wait)
    try:
        yield
    finally:
        release.set()


@pytest.mark.parametrize("guard", [GUARD, SECOND_LOOK], ids=lambda guard: guard.name)
def test_images_of_different_lists_share_a_batch_and_keep_their_answers(
    engine: Engine, encoder: rc.Encoder, photos: list[bytes], guard: rc.ReACT | rc.SecondLook
) -> None:
    engine.guard = guard
    other = rc.ZeroShotClassifier(encoder, ["zebra", "boat", "a red car", "moon", "cup"])
    batches = record_batches(engine)
    lists = [engine.preset if i % 3 else other for i in range(len(photos))]
    with held(engine):
        futures = [engine.submit([photo], classes)[0] for photo, classes in zip(prepared(photos), lists, strict=True)]
    answers = [future.result() for future in futures]
    assert batches == [(len(photos), 2)]
    assert {answer.diagnostics["gated"] for answer in answers} == {True, False}
    for photo, classes, answer in zip(photos, lists, answers, strict=True):
        alone = guard(classes, [photo], seed=SECRET)
        assert classes.names[int(answer.probs.argmax())] == alone.names[0]
        assert torch.allclose(answer.feature, alone.features[0], atol=1e-5)
        assert torch.allclose(answer.probs, alone.probs[0], atol=1e-3)
        assert (answer.diagnostics["gated"], passes(answer)) == (bool(alone.gated[0]), int(alone.passes[0]))


def test_no_batch_needs_a_graph_that_the_start_has_not_recorded(
    encoder: rc.Encoder, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RecordsOnACPU(max_rows=144)
    monkeypatch.setattr(encoder, "backend", backend)
    settings = Settings(batch=5, deadline=1e6, constant_work=True)  # as on a GPU
    preset, other = (rc.ZeroShotClassifier(encoder, names) for names in (LABELS, LABELS[::-1]))
    engine = Engine(encoder, SECOND_LOOK, preset, secret=SECRET, settings=settings)
    ready = prepared(photos)
    try:
        engine.run(lambda: engine._record_graphs(ready[0])).result()
        at_start, branches = set(backend.calls), set()
        assert at_start
        for size in range(1, 6):
            for first in range(len(ready) - size + 1):
                for classes in (preset, other):
                    futures = engine.submit(ready[first : first + size], classes)
                    branches |= {future.result().branch for future in futures}
    finally:
        engine.stop()
    assert len(branches) > 1, "batches must differ in the number of images that need more views"
    assert set(backend.calls) == at_start


@on_a_gpu
@pytest.mark.parametrize("guard", [SECOND_LOOK, rc.ReACT()], ids=["second_look", "react"])
def test_a_gpu_answers_as_the_library_does(guard: Any, photos: list[bytes]) -> None:
    """On the engine's thread and on the event loop's; batches with one label list and with two."""
    encoder = patch_encoder().cuda().accelerate()
    preset, other = (rc.ZeroShotClassifier.from_features(encoder, list("abc")[:k], torch.eye(k, 12)) for k in (2, 3))
    engine = Engine(encoder, guard, preset, secret=SECRET, settings=Settings(batch=8, deadline=1e6))
    engine.start()

    async def check(lists: list[rc.ZeroShotClassifier]) -> None:
        images = list(zip(photos, prepared(photos), lists, strict=False))
        futures = [engine.submit([photo], classes)[0] for _, photo, classes in images]
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures))
        for (file, _, classes), answer in zip(images, answers, strict=True):
            alone = guard(classes, [file], seed=SECRET)
            assert torch.allclose(answer.feature, alone.features[0].cpu(), atol=1e-4)
            assert torch.allclose(answer.probs, alone.probs[0].cpu(), atol=1e-3)

    async def check_both() -> None:
        await check([preset] * len(photos))
        await check([preset, other] * len(photos))

    async def check_on_loop() -> None:
        engine.run_on(LoopExecutor())
        await check_both()

    in_loop(check_both())
    in_loop(check_on_loop())


class Copied:
    """Stands for the event of a GPU: results are there when ``done`` is true; with ``fails`` the batch has failed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.done, self.fails = fails, fails

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error")
        return self.done

    def synchronize(self) -> None:
        if not self.query():
            raise AssertionError("the engine waits for a batch instead of asking for it")


@pytest.mark.parametrize("early", [False, True], ids=["when it is done", "when it is nearly done"])
def test_the_next_batch_starts_before_the_last_is_answered(
    encoder: rc.Encoder, photos: list[bytes], monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """On an event loop that goes on while a GPU computes; also if one batch fails. A third one waits."""
    preset = rc.ZeroShotClassifier(encoder, LABELS)
    engine = Engine(encoder, SECOND_LOOK, preset, secret=SECRET, settings=Settings(batch=1, deadline=1e6))
    engine.start()
    events = [Copied(), Copied(fails=True), Copied()]
    compute, ready, started = engine._compute, prepared(photos), list[list[bool]]()

    def start(batch: list[Any]) -> HostCopy:
        started.append([future.done() for future in futures])
        results = compute(batch)
        monkeypatch.setattr(results, "_made", events[len(started) - 1])
        return results

    async def turns() -> None:
        """Let the loop run what is due: the engine computes on its thread."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def check() -> None:
        engine.run_on(LoopExecutor())
        engine._polls = True
        # Seconds that a batch of one image is expected to take.
        monkeypatch.setattr(engine, "_batch_seconds", {1: 0.0} if early else {})
        futures.append(engine.submit(ready[:1], preset)[0])
        await turns()
        for image in ready[1:3]:
            futures.append(engine.submit([image], preset)[0])
            await turns()
        assert len(started) == 1 + early
        events[0].done = True
        await turns()
        assert not any(started[1]), "the second starts before the first is answered"
        assert futures[0].result().branch
        with pytest.raises(RequestError, match="could not answer"):
            futures[1].result()
        assert not futures[2].done()
        events[2].done = True
        assert (await asyncio.wrap_future(futures[2])).branch

    futures: list[Future[Answer]] = []
    monkeypatch.setattr(engine, "_compute", start)
    in_loop(check())


@pytest.mark.parametrize(("left", "starts"), [(120.0, True), (200.0, False)])
def test_the_next_batch_starts_with_time_to_spare(engine: Engine, left: float, starts: bool) -> None:
    """The last start took 100 seconds; the next one may take longer, and the GPU must not wait for it."""
    computing: Any = SimpleNamespace(images=[None], began=time.monotonic())
    engine._start_seconds, engine._batch_seconds = 100.0, {1: left}
    engine._computing.append(computing)
    assert engine._is_nearly_idle() is starts
    engine._computing.clear()


def test_a_batch_waits_for_images_on_their_way_and_for_nothing_else(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "settings", engine.settings.model_copy(update={"max_wait": 120_000.0}))
    batches = record_batches(engine)
    first, second, third = prepared(photos[:3])
    engine.submit([first], engine.preset)[0].result(60)
    with engine.expect(1):
        futures = engine.submit([first], engine.preset)
        futures += engine.submit([second], engine.preset)
        assert not wait(futures, 0.2).done, "a third image is being decoded"
        futures += engine.submit([third], engine.preset)
    wait(futures, 60)
    assert batches == [(1, 1), (3, 1)]
    with engine.expect(100):  # more than a batch holds
        futures = [engine.submit([first], engine.preset)[0] for _ in range(engine.settings.batch)]
        wait(futures, 60)
    assert batches[2:] == [(engine.settings.batch, 1)]


def test_all_views_are_drawn_for_features(engine: Engine, photos: list[bytes]) -> None:
    engine.guard = GUARD.replace(tau=-1e9, sequential=0.5)
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
    with held(engine):
        engine.submit(ready + ready, engine.preset)
        with pytest.raises(RequestError, match="queue is full"):
            engine.submit(ready, engine.preset)
        assert (engine.waiting, engine.free_slots) == (24, 8)
        engine.submit(ready[:8], engine.preset)
        assert engine.free_slots == 0


def test_functions_that_wait_are_limited(engine: Engine) -> None:
    with held(engine):
        waiting = [engine.run(lambda: None) for _ in range(31)]
        with pytest.raises(RequestError, match="too much to do"):
            engine.run(lambda: None)
    assert [future.result() for future in waiting] == [None] * 31
    assert engine.run(lambda: 7).result() == 7


def test_images_are_answered_while_a_long_label_list_is_computed(engine: Engine, photos: list[bytes]) -> None:
    async def check() -> None:
        long = asyncio.create_task(LabelCache(engine).get(LabelList(tuple(f"thing {i}" for i in range(600)))))
        await asyncio.sleep(0)
        [image] = engine.submit(prepared(photos[:1]), engine.preset)
        await asyncio.wrap_future(image)
        assert not long.done(), "the image ran between two parts of the list"
        assert (await long).class_features.shape == (600, 32)

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
        first, second = await asyncio.gather(cache.get(LabelList(names)), cache.get(LabelList(names)))
        assert first is second
        assert len(calls) == 1
        assert torch.allclose(first.class_features, plain, atol=1e-5)
        both = await cache.get(LabelList(names, ("a {}", "the {}!")))
        assert torch.allclose(both.class_features, ensemble, atol=1e-5)
        assert await cache.get(LabelList(names)) is first
        await cache.get(LabelList(("dog",)))
        assert await cache.get(LabelList(names)) is first, "the cache has two places, the other list was older"
        await cache.get(LabelList(names, ("a {}", "the {}!")))
        assert len(calls) == 4
        monkeypatch.setattr(encoder, "encode_text", lambda prompts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await cache.get(LabelList(("new",)))
        monkeypatch.setattr(encoder, "encode_text", encode_text)
        assert (await cache.get(LabelList(("new",)))).names == ("new",), "a failed list is not cached"

    in_loop(check())


def test_a_failure_costs_its_batch_and_not_the_engine(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.encoder, "encode_views", lambda pixels: pixels.flatten(1)[:, :32] * torch.nan)
        with pytest.raises(RequestError, match="could not answer"):
            engine.submit(prepared(photos[:1]), engine.preset)[0].result()
    assert passes(engine.submit(prepared(photos[:1]), engine.preset)[0].result()) > 0


def test_expired_images_fail_and_batches_shrink(encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more images arrive at once than can be answered before the deadline."""
    seconds, deadline, count = 0.05, 5.0, 200
    preset = rc.ZeroShotClassifier(encoder, ["cat", "dog"])
    settings = Settings(batch=count, queue=count, deadline=deadline)
    engine = Engine(encoder, rc.ReACT(), preset, secret=SECRET, settings=settings)
    compute = engine._compute

    def slow(batch: list[Any]) -> Any:
        time.sleep(seconds * len(batch))
        return compute(batch)

    monkeypatch.setattr(engine, "_compute", slow)
    try:
        engine.start()
        batches = record_batches(engine)
        photo = Photo(torch.full((3, encoder.image_size, encoder.image_size), 0.5), key=0)
        futures = engine.submit([photo] * count, preset)
        wait(futures)
    finally:
        engine.stop()
    errors = [future.exception() for future in futures]
    assert {getattr(error, "kind", None) for error in errors} == {None, "deadline"}
    # A busy machine only makes batches smaller.
    assert max(images for images, _ in batches) <= deadline / 4 / seconds


# ---------------------------------------------------------------------- the application


@asynccontextmanager
async def client_of(engine: Engine, attack: DemoAttack | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process."""
    transport = httpx.ASGITransport(create_app(engine, attack))
    async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
        yield client


def test_a_late_answer_is_503_and_its_images_are_not_computed(engine: Engine, photos: list[bytes]) -> None:
    engine.settings = Settings(deadline=0.2)

    async def post() -> httpx.Response:
        async with client_of(engine) as client:
            return await client.post("/v1/classify", **as_form(photos[:8]))

    with held(engine):
        late = in_loop(post())
        batches = record_batches(engine)
    check_error(late, 503, "0.2 s")
    assert late.json()["error"]["type"] == "deadline"
    assert int(late.headers["retry-after"]) >= 1
    engine.run(lambda: None).result()
    assert batches == []


def test_an_attack_of_an_abandoned_request_is_not_computed(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queued, computed = engine.run, threading.Event(), []

    def run_later(function: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        queued.set()
        return run(function)

    def attack(
        clf: rc.ZeroShotClassifier, pixels: torch.Tensor, label: int, eps: float, progress: Callable[[int, int], None]
    ) -> torch.Tensor:
        computed.append(eps)
        return pixels

    async def ask_and_leave() -> None:
        async with client_of(engine, attack) as client:
            task = asyncio.create_task(client.post("/v1/demo/attack", **as_form(photos[:1])))
            await asyncio.to_thread(queued.wait, 60)
            task.cancel()
            await asyncio.wait([task])

    monkeypatch.setattr(engine, "run", run_later)
    with held(engine):
        in_loop(ask_and_leave())
    run(lambda: None).result()
    assert computed == []


def test_a_slow_attack_has_its_own_deadline_tells_its_steps_and_ends_when_its_caller_leaves(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, photos: list[bytes]
) -> None:
    go_on, began, steps = threading.Event(), threading.Event(), []

    def attack(
        clf: rc.ZeroShotClassifier, pixels: torch.Tensor, label: int, eps: float, progress: Callable[[int, int], None]
    ) -> torch.Tensor:
        for step in range(1, 4):
            progress(step, 3)
            steps.append(step)
            began.set()
            go_on.wait(60)
        return pixels

    async def ask() -> tuple[dict[str, int], int]:
        async with client_of(engine, attack) as client:
            task = asyncio.create_task(client.post("/v1/demo/attack", **as_form(photos[:1])))
            await asyncio.to_thread(began.wait, 60)
            # Longer than the deadline of other requests.
            await asyncio.sleep(3 * engine.settings.deadline)
            shown = (await client.get("/v1/demo/progress")).json()
            go_on.set()
            return shown, (await task).status_code

    async def leave() -> None:
        async with client_of(engine, attack) as client:
            task = asyncio.create_task(client.post("/v1/demo/attack", **as_form(photos[:1])))
            await asyncio.to_thread(began.wait, 60)
            task.cancel()
            await asyncio.wait([task])
            assert (await client.get("/v1/demo/progress")).json() == {"done": 0, "steps": 0}

    settings = engine.settings.model_copy(update={"deadline": 0.2, "demo_deadline": 60.0})
    monkeypatch.setattr(engine, "settings", settings)
    assert in_loop(ask()) == ({"done": 1, "steps": 3}, 200)
    assert steps == [1, 2, 3]
    go_on.clear()
    began.clear()
    in_loop(leave())
    go_on.set()
    engine.run(lambda: None).result()
    assert steps == [1, 2, 3, 1], "the second step of the abandoned attack raised"


def leave_free_blocks(libc: ctypes.CDLL, count: int, size: int) -> list[ctypes.c_void_p]:
    """Allocate and fill blocks, then free all but every 64th, so that no free end of a heap is left to shrink."""
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for index, block in enumerate(blocks):
        if index % 64:
            libc.free(block)
    return blocks[::64]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(memory.find_malloc_trim() is None, reason="the C library is not glibc")
def test_freed_memory_is_returned_while_the_service_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SECONDS", 0.1)
    count, size, libc = 4096, 2**16, ctypes.CDLL(None)
    libc.malloc_trim(0)  # what earlier tests freed would hold some of the blocks
    total, before = count * size, resident_bytes()
    with ThreadPoolExecutor(1) as thread:  # its heaps are not the main thread's
        left = thread.submit(leave_free_blocks, libc, count, size).result()
        assert resident_bytes() > before + 0.8 * total, "glibc keeps what was freed"

        async def run_until_returned() -> None:
            app = create_app(engine)
            async with asyncio.timeout(60), app.router.lifespan_context(app):
                while resident_bytes() > before + 0.3 * total:
                    await asyncio.sleep(0.05)

        in_loop(run_until_returned())
    for block in left:
        libc.free(block)


def test_garbage_collections_leave_out_what_is_loaded() -> None:
    looked_at = len(gc.get_objects())
    try:
        memory.spare_loaded_objects()
        assert len(gc.get_objects()) < looked_at / 10
    finally:
        gc.unfreeze()


def test_requests_start_no_threads_of_the_framework(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 40 threads with a heap each would serve plain functions of FastAPI."""
    calls = []

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        calls.append(function)
        return function(*args)

    monkeypatch.setattr("anyio.to_thread.run_sync", run_sync)

    async def ask() -> set[int]:
        async with client_of(engine) as client:
            answers = [await client.post(path, **as_form(photos[:2])) for path in ("/v1/classify", "/v1/embed")]
            answers += [await client.get(path) for path in ("/v1/info", "/v1/models", "/healthz", "/readyz")]
            return {answer.status_code for answer in answers}

    assert in_loop(ask()) == {200}
    assert calls == []


def test_one_small_photo_is_decoded_without_a_thread(engine: Engine) -> None:
    """Larger ones, and several of them, are decoded in threads: the same pixels and keys."""
    decoder = Decoder(engine.settings, preprocessing=engine.preprocessing, secret=SECRET)
    threads: list[str] = []
    decode = decoder._decode

    def note(field: str, image: Any) -> Photo:
        threads.append(threading.current_thread().name)
        return decode(field, image)

    decoder._decode = note  # type: ignore[method-assign]

    def files(*sides: int) -> list[bytes]:
        out = []
        for side in sides:
            stream = io.BytesIO()
            Image.new("RGB", (side, side), "orange").save(stream, "PNG")
            out.append(stream.getvalue())
        return out

    async def check() -> None:
        loop = threading.current_thread().name
        [small] = await decoder.photos(files(512))
        assert threads.pop() == loop
        [large] = await decoder.photos(files(513))
        assert threads.pop() != loop
        pair = await decoder.photos(files(512, 512))
        assert loop not in threads
        for photo in (large, *pair):
            assert torch.equal(photo.pixels, small.pixels)
            assert photo.key == small.key
        damaged = files(512)[0][:-30]
        with pytest.raises(RequestError, match=r"images\[0\] cannot be decoded"):
            await decoder.photos([damaged])

    in_loop(check())
    decoder.close()
