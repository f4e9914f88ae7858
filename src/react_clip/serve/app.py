"""The FastAPI application around an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from react_clip import noise
from react_clip.environment import __version__
from react_clip.preprocess import data_uri, from_8bit, to_image
from react_clip.serve import pages, requests, responses
from react_clip.serve.answers import Answer, Photo
from react_clip.serve.decoding import Decoder
from react_clip.serve.engine import Engine
from react_clip.serve.errors import RequestError, answer_http_error, busy, quote
from react_clip.serve.labels import LabelList
from react_clip.serve.memory import return_freed_memory
from react_clip.serve.metrics import Metrics
from react_clip.serve.middleware import RequestGuard
from react_clip.serve.remote import RemoteEngine
from react_clip.zeroshot import ZeroShotClassifier

DemoAttack = Callable[[ZeroShotClassifier, Tensor, int, float, Callable[[int, int], None]], Tensor]
"""``(classifier, pixels [1, 3, S, S], index of the class to leave, eps in [0, 1], progress) -> attacked pixels``, where
``progress(done, steps)`` is called after every step and raises if the caller is gone."""

_DRAWN = 127.0 / 255.0
"""Largest change in the picture of a perturbation, around grey."""


class Service:
    """Shared by the handlers: engine, settings, decoder threads, metrics and, with ``--demo``, an attack."""

    def __init__(self, engine: Engine | RemoteEngine, attack: DemoAttack | None) -> None:
        self.engine, self.settings, self.attack = engine, engine.settings, attack
        self.decoder = Decoder(self.settings, preprocessing=engine.preprocessing, secret=engine.secret)
        self.metrics = Metrics(shared=self.settings.processes > 1)
        self.started = int(time.time())
        self.attack_progress = responses.AttackProgress()
        if isinstance(engine, Engine):
            engine.on_batch, engine.on_queue = self.metrics.count_batch, self.metrics.waiting.set
            self.info = responses.Info.of(engine, demo=attack is not None)
        else:
            self.info = engine.info
        self.model = self.info.model
        self._preset = LabelList(tuple(self.info.labels.preset), preset=True)

    async def read(self, request: Request, model: type[requests.Request]) -> requests.Request:
        """The validated body of a request; FastAPI's own body parameters take JSON or a form, but not both."""
        with self.engine.expect(1):
            return await self.decoder.read(request, model)

    async def inputs(self, body: requests.ImageRequest) -> tuple[LabelList, list[Photo]]:
        """The labels that a request asks for, and its photos."""
        if body.model not in (None, "", self.model):
            raise RequestError(422, f"model is {quote(body.model)}; this service has {self.model!r}", field="model")
        if body.suspicious and not self.settings.tells_suspicious:
            line = "suspicious is asked for, but this service does not tell; leave it out (its operator: --suspicious)"
            raise RequestError(422, line, field="suspicious")
        labels = self._labels(body)
        with self.engine.expect(len(body.images)):
            return labels, await self.decoder.photos(body.images)

    def _labels(self, body: requests.ImageRequest) -> LabelList:
        if body.labels is None:
            return self._preset
        if not self.info.labels.free:
            line = "labels are given, but this service answers for its own only; leave them out"
            raise RequestError(422, line, field="labels")
        if body.templates is not None and not self.info.labels.templates:
            line = "templates are given, but this model has no text tower; leave them out"
            raise RequestError(422, line, field="templates")
        return LabelList(tuple(body.labels), tuple(body.templates or ()))

    def findings(self, body: requests.ImageRequest, answer: Answer) -> dict[str, Any]:
        """Fields of an answer about the defence's decision, null where callers may not see it or did not ask."""
        return {
            "diagnostics": responses.Diagnostics.of(answer) if self.settings.sends_diagnostics else None,
            "suspicious": answer.suspicious if body.suspicious else None,
        }


def service_of(request: Request) -> Service:
    """The service that a request reached."""
    service: Service = request.app.state.service
    return service


def direct(route: APIRoute) -> ASGIApp:
    """An application that gives each request to the route's handler and sends the model that it returns.

    FastAPI would look for the route and its dependencies, and check the answer again: more processor time.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        model: requests.Schema = await route.endpoint(Request(scope, receive))
        response = Response(model.model_dump_json(), media_type="application/json")
        await response(scope, receive, send)

    return answer


api = APIRouter(prefix="/v1", responses=pages.error_responses(*pages.BODY_ERRORS))
demo = APIRouter(prefix="/v1/demo", responses=pages.error_responses(*pages.BODY_ERRORS))
state = APIRouter(responses=pages.error_responses(401, 503))
site = APIRouter(include_in_schema=False)


@api.post(
    "/classify",
    openapi_extra=pages.request_body(requests.ClassifyRequest, top_k=3),
    responses=pages.example_answer(pages.CLASSIFIED),
)
async def classify(request: Request) -> responses.ClassifyResponse:
    """Classify photos, defended."""
    service = service_of(request)
    body = await service.read(request, requests.ClassifyRequest)
    labels, photos = await service.inputs(body)
    results = []
    for index, answer in enumerate(await service.engine.ask(photos, labels)):
        best = responses.top(labels.names, answer.probs, body.top_k)
        findings = service.findings(body, answer)
        results.append(
            responses.Result(
                index=index, label=best[0].label, probability=best[0].probability, answers=best, **findings
            )
        )
    return responses.ClassifyResponse(model=service.model, results=results)


@api.post(
    "/embed",
    openapi_extra=pages.request_body(requests.EmbedRequest, encoding_format="float"),
    responses=pages.example_answer(pages.EMBEDDED),
)
async def embed(request: Request) -> responses.EmbedResponse:
    """Defended unit features of photos, in the shape of OpenAI's embeddings; the labels are used by the gate only."""
    service = service_of(request)
    body = await service.read(request, requests.EmbedRequest)
    labels, photos = await service.inputs(body)
    data = [
        responses.Embedding(
            index=index,
            embedding=responses.encode_feature(answer.feature, body.encoding_format),
            **service.findings(body, answer),
        )
        for index, answer in enumerate(await service.engine.ask(photos, labels, all_views=True))
    ]
    return responses.EmbedResponse(data=data, model=service.model, usage=responses.Usage(images=len(data)))


@demo.post("/attack", openapi_extra=pages.request_body(requests.AttackRequest, eps=4))
async def attack(request: Request) -> responses.AttackResponse:
    """Attack a photo and compare the answers of plain and defended CLIP; delays all other requests."""
    service = service_of(request)
    body = await service.read(request, requests.AttackRequest)
    engine, eps = service.engine, body.eps / 255
    labels, [photo] = await service.inputs(body)
    assert isinstance(engine, Engine), "settings allow an attack in one process only"
    classes, pixels = await engine.classes(labels), from_8bit(photo.pixels)
    plain = await _plain_probs(engine, classes, pixels)
    target, attacked, scale = int(plain.argmax()), pixels, 1.0
    [clean] = await engine.ask([photo], labels)
    if eps > 0:
        scale = _DRAWN / eps
        attacked = await _attacked(service, engine, classes, pixels, target, eps)
    key = int(noise.stream_keys(attacked[None], engine.secret))
    [after] = await engine.ask([Photo(attacked, key)], labels)

    def compare(shown: Tensor, plain: Tensor, answer: Answer) -> responses.Comparison:
        return responses.Comparison(
            image=data_uri(to_image(shown)),
            plain=responses.top(labels.names, plain, body.top_k),
            defended=responses.top(labels.names, answer.probs, body.top_k),
            diagnostics=responses.Diagnostics.of(answer),
        )

    return responses.AttackResponse(
        model=service.model,
        eps=body.eps,
        attacked_label=labels.names[target],
        clean=compare(pixels, plain, clean),
        attacked=compare(attacked, await _plain_probs(engine, classes, attacked), after),
        perturbation=data_uri(to_image(0.5 + scale * (attacked - pixels))),
        amplification=scale,
    )


async def _plain_probs(engine: Engine, classes: ZeroShotClassifier, pixels: Tensor) -> Tensor:
    """Probabilities ``[K]`` of plain CLIP for pixels ``[3, S, S]``."""

    @torch.no_grad()
    def compute() -> Tensor:
        return engine.encoder.similarity.probabilities(classes(pixels[None].to(classes.device)))[0].cpu()

    return await asyncio.wrap_future(engine.run(compute))


async def _attacked(
    service: Service, engine: Engine, classes: ZeroShotClassifier, pixels: Tensor, target: int, eps: float
) -> Tensor:
    """Attacked pixels ``[3, S, S]``. An attack whose caller is gone ends: the page's slider leaves many behind."""
    run_attack, ended = service.attack, False
    assert run_attack is not None, "the route exists only with an attack"

    def advance(done: int, steps: int) -> None:
        if ended:
            raise asyncio.CancelledError
        service.attack_progress = responses.AttackProgress(done=done, steps=steps)

    try:
        job = engine.run(partial(run_attack, classes, pixels[None], target, eps, advance))
        return (await asyncio.wrap_future(job))[0].cpu()
    finally:
        ended = True
        service.attack_progress = responses.AttackProgress()


@demo.get("/progress")
async def progress(request: Request) -> responses.AttackProgress:
    """Steps of the attack that runs now."""
    return service_of(request).attack_progress


@state.get("/v1/info")
async def info(request: Request) -> responses.Info:
    """Model, labels, limits and defence of this service."""
    return service_of(request).info


@state.get("/v1/models")
async def models(request: Request) -> responses.ModelList:
    """The served model, in the shape of OpenAI's list."""
    service = service_of(request)
    return responses.ModelList(data=[responses.ServedModel(id=service.model, created=service.started)])


@state.get("/healthz")
async def healthz() -> responses.Status:
    """200 while the process is alive."""
    return responses.Status(status="alive")


@state.get("/readyz")
async def readyz(request: Request) -> responses.Status:
    """200 while the service takes requests; 503 while stopping or while the queue has no room for a full request."""
    service = service_of(request)
    if not service.engine.alive:
        raise busy("the model is not running", kind="stopping")
    if service.engine.free_slots < service.settings.max_images:
        raise busy("the queue has no room for a full request")
    return responses.Status(status="ready")


@site.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    shown = service_of(request).metrics
    return Response(shown.text(), media_type=shown.content_type)


@site.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The manual."""
    page = pages.manual(request.app.openapi(), str(request.base_url).rstrip("/"))
    return HTMLResponse(page, headers={"content-security-policy": pages.POLICY})


@site.get("/")
async def page() -> FileResponse:
    """The page to try the service."""
    return FileResponse(pages.STATIC / "page.html", headers={"content-security-policy": pages.POLICY})


def create_app(
    engine: Engine | RemoteEngine, attack: DemoAttack | None = None, *, keys: frozenset[bytes] = frozenset()
) -> FastAPI:
    """The application around a started engine.

    ``attack`` adds ``/v1/demo/attack``; ``keys`` are the digests of API keys, without which everybody may call.
    """
    service, settings = Service(engine, attack), engine.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        trimming = asyncio.create_task(return_freed_memory())
        if isinstance(engine, RemoteEngine):
            await engine.connect()
        yield
        trimming.cancel()
        service.decoder.close()
        engine.stop()

    app = FastAPI(
        title="react-clip",
        description="Zero-shot image classification and embedding by CLIP, defended against adversarial images.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.path_format.strip("/").replace("/", "_"),
    )
    app.state.service, app.state.stopping = service, lambda: False
    app.add_middleware(
        RequestGuard,
        settings=settings,
        keys=keys,
        metrics=service.metrics,
        posts={route.path: direct(route) for route in api.routes if isinstance(route, APIRoute)},
    )
    app.add_exception_handler(HTTPException, answer_http_error)
    for router in (api, state, site, *([demo] if attack else [])):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=pages.STATIC))
    return app
