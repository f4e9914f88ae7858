"""The model's queue: what it refuses, what it forgets, and what a model that hangs looks like from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from serve_client import LABELS, SECOND_LOOK, as_form, check_error
from starlette.testclient import TestClient

import react_clip as rc
from programs import wait_for
from react_clip.serve.app import create_app
from react_clip.serve.client import ModelClient
from react_clip.serve.errors import RequestError
from react_clip.serve.model import Model
from react_clip.serve.settings import Secrets, Settings

Check = Callable[[ModelClient], Awaitable[None]]


class Held:
    """A model on a thread that can be held; ``computed`` are the numbers of images and prompts, in order."""

    def __init__(self, encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        values = {"queue": 32, "batch": 4, "deadline": 60.0, "max_labels": 200, **fields}
        self.settings = Settings.model_validate(values)
        preset = rc.ZeroShotClassifier(encoder, LABELS)
        self.model = Model(SECOND_LOOK, preset, self.settings)
        self.free, self.computed = threading.Event(), list[tuple[str, int]]()
        self.address = f"inproc://held-{id(self)}"
        run, encode_text, self.fails = self.model._run, encoder.encode_text, False

        def held(pixels: torch.Tensor, *rest: Any, **options: Any) -> rc.Defended:
            assert self.free.wait(60)
            self.computed.append(("images", len(pixels)))
            if self.fails:
                raise RuntimeError("of the test")
            return run(pixels, *rest, **options)

        def counted(prompts: list[str]) -> torch.Tensor:
            assert self.free.wait(60)
            self.computed.append(("prompts", len(prompts)))
            return encode_text(prompts)

        monkeypatch.setattr(self.model, "_run", held)
        monkeypatch.setattr(encoder, "encode_text", counted)

    def check(self, what: Check) -> None:
        """Run a check with a client; its loop is in a thread, because a browser's may run in this one."""

        async def connected() -> None:
            client = ModelClient(self.address, self.settings)
            with self.model.running(self.address):
                await client.connect()
                try:
                    await asyncio.wait_for(what(client), 60)
                finally:
                    self.free.set()
                    client.close()

        with ThreadPoolExecutor() as thread:
            thread.submit(asyncio.run, connected()).result()


@pytest.fixture
def hold(encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Held]:
    return lambda **fields: Held(encoder, monkeypatch, **fields)


def ask(client: ModelClient, images: int = 1, labels: list[str] | None = None) -> asyncio.Task[Any]:
    pixels = torch.randint(0, 255, (images, 3, 32, 32), dtype=torch.uint8)
    return asyncio.create_task(client.ask(pixels, keys=list(range(images)), labels=labels))


async def forget(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_the_queue_takes_a_request_whole_or_not_at_all(hold: Any) -> None:
    held = hold()

    async def check(client: ModelClient) -> None:
        tasks = [ask(client, 16), ask(client, 12)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="queue is full"):
            await ask(client, 8)
        tasks.append(ask(client, 4))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="queue is full"):
            client.admit(1)
        held.free.set()
        assert [len(await task) for task in tasks] == [16, 12, 4]
        assert sorted(held.computed) == [("images", size) for size in (4, 12, 16)], (
            "requests larger than --batch have batches of their own"
        )

    held.check(check)


def test_abandoned_images_free_their_places_and_are_not_computed(hold: Any) -> None:
    held = hold()

    async def check(client: ModelClient) -> None:
        first = ask(client)
        await asyncio.sleep(0.2)  # it is being computed
        abandoned = [ask(client, 15), ask(client, 16)]
        await asyncio.sleep(0.2)
        with pytest.raises(RequestError, match="queue is full"):
            client.admit(16)
        await forget(*abandoned)
        client.admit(16)
        kept = ask(client, 2)
        await asyncio.sleep(0.2)
        held.free.set()
        await asyncio.gather(first, kept)
        assert held.computed == [("images", 1), ("images", 2)]

    held.check(check)


@pytest.mark.parametrize("what", ["new labels", "texts"])
def test_prompts_take_places_let_images_pass_and_end_with_their_callers(hold: Any, what: str) -> None:
    held = hold(queue=64)

    async def check(client: ModelClient) -> None:
        def prompts(number: int) -> asyncio.Task[Any]:
            texts = [f"thing {number} {place}" for place in range(200)]
            if what == "new labels":
                return ask(client, 1, texts)
            return asyncio.create_task(client.ask(texts=texts))

        first = ask(client)
        await asyncio.sleep(0.2)
        tasks = [prompts(number) for number in range(4)]
        await asyncio.sleep(0.2)
        image = ask(client, 16)
        await asyncio.sleep(0.2)
        await forget(tasks[0])
        held.free.set()
        await asyncio.gather(first, image)
        # Half of the 64 places are for prompts: 13 of each list, so that two lists fit.
        for refused in tasks[2:]:
            with pytest.raises(RequestError, match=f"of {what} wait"):
                await refused
        answers = await tasks[1]
        assert [len(each.feature) for each in answers] == [client.info.dim] * (1 if what == "new labels" else 200)
        assert sum(each for kind, each in held.computed if kind == "prompts") == 200, "nobody waits for the others"
        assert held.computed[1] == ("images", 16) or held.computed[2] == ("images", 16), "images are answered first"

    held.check(check)


def test_label_lists_are_computed_once(hold: Any) -> None:
    held = hold()
    held.free.set()

    async def check(client: ModelClient) -> None:
        names = ["a boat", "a zebra"]
        await asyncio.gather(*(ask(client, 1, names) for _ in range(3)))
        answers = await ask(client, 1, names)
        assert len(answers[0].probs) == 2
        assert [each for each in held.computed if each[0] == "prompts"] == [("prompts", 2)]

    held.check(check)


def test_a_slow_model_takes_what_it_can_answer_in_time_and_recovers(hold: Any) -> None:
    """Its measured rate counts: 3 s an image, of which 10 s may wait."""
    held = hold(deadline=20.0)
    held.model._rates.extend([3.0] * 3)
    held.model._seconds = 3.0

    async def check(client: ModelClient) -> None:
        await until(lambda: client._seconds == 3.0)
        first = ask(client, 4)
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="about 12 s of work wait; try again in 10 s") as refused:
            await ask(client)
        assert refused.value.headers == {"retry-after": "10"}
        held.free.set()
        await first
        held.model._rates.extend([30.0] * 3)
        held.model._seconds = 30.0  # nothing waits, so the next is taken and measured, however slow the last ones were
        for _ in range(3):
            await ask(client, 4)
        assert client._seconds < 3.0

    held.check(check)


def test_a_full_queue_is_not_ready_and_refuses_before_it_reads(hold: Any, photos: list[bytes]) -> None:
    held = hold()
    app = create_app(held.settings, Secrets(b"", frozenset()), model=held.model)
    with TestClient(app, base_url="http://localhost") as client, ThreadPoolExecutor() as pool:
        full = [pool.submit(client.post, "/v1/classify", **as_form(photos[:1] * 16)) for _ in range(2)]
        wait_for(lambda: client.get("/readyz").status_code == 503)
        try:
            for answer in (client.get("/readyz"), client.post("/v1/classify", content=b"no picture")):
                check_error(answer, 503, "the queue is full: about ")
                assert answer.headers["retry-after"] == "1"
        finally:
            held.free.set()
        assert [answer.result().status_code for answer in full] == [200, 200]
        wait_for(lambda: client.get("/readyz").status_code == 200)


async def until(condition: Callable[[], bool]) -> None:
    """Let the client listen until something holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_batch_that_fails_ends_its_requests_only(hold: Any) -> None:
    held = hold()
    held.free.set()
    held.fails = True

    async def check(client: ModelClient) -> None:
        with pytest.raises(RequestError, match="could not answer"):
            await ask(client, 6)
        held.fails = False
        assert len(await ask(client, 6)) == 6
        client.admit(16)

    held.check(check)
