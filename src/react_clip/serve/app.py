"""The FastAPI application around an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from torch import Tensor

from react_clip import noise
from react_clip.environment import __version__
from react_clip.errors import ReactClipError
from react_clip.preprocess import DEFAULT_LIMITS, data_uri, from_8bit, to_image
from react_clip.serve import pages, requests, responses
from react_clip.serve.decoding import Decoder
from react_clip.serve.engine import Answer, Engine, Photo
from react_clip.serve.errors import RequestError, answer_http_error, busy, quote
from react_clip.serve.labels import LabelCache
from react_clip.serve.memory import return_freed_memory
from react_clip.serve.metrics import Metrics
from react_clip.serve.middleware import RequestGuard
from react_clip.zeroshot import ZeroShotClassifier

DemoAttack = Callable[[ZeroShotClassifier, Tensor, int, float, Callable[[int, int], None]], Tensor]
"""``(classifier, pixels [1, 3, S, S], index of the class to leave, eps in [0, 1], progress) -> attacked pixels``, where
``progress(done, steps)`` is called after every step and raises if the caller is gone."""

_DRAWN = 127.0 / 255.0
"""Largest change in the picture of a perturbation, around grey."""


class Service:
    """Shared by the handlers: engine, settings, decoder threads, metrics and, with ``--demo``, an attack."""

    def __init__(self, engine: Engine, attack: DemoAttack | None) -> None:
        self.engine, self.settings, self.attack = engine, engine.settings, attack
        self.model = self.settings.name or public_name(engine.encoder.name)
        self.decoder = Decoder(self.settings, preprocessing=engine.encoder.preprocessing, secret=engine.secret)
        self.metrics = Metrics(shared=self.settings.processes > 1)
        self.labels = LabelCache(engine)
        self.accepts_labels = self.labels.source != "preset" and not self.settings.fixed_labels
        self.started = int(time.time())
        self.attack_progress = responses.AttackProgress()
        engine.on_batch, engine.on_queue = self.metrics.count_batch, self.metrics.waiting.set

    async def inputs(self, body: requests.ImageRequest) -> tuple[ZeroShotClassifier, list[Photo]]:
        """The classes that a request asks for, and its photos."""
        if body.model not in (None, "", self.model):
            raise RequestError(422, f"model is {quote(body.model)}; this service has {self.model!r}", field="model")
        if body.suspicious and not self.settings.tells_suspicious:
            line = "suspicious is asked for, but this service does not tell; leave it out (its operator: --suspicious)"
            raise RequestError(422, line, field="suspicious")
        classes = await self._classes(body)
        with self.engine.expect(len(body.images)):
            return classes, await self.decoder.photos(body.images)

    async def _classes(self, body: requests.ImageRequest) -> ZeroShotClassifier:
        if body.labels is None:
            return self.engine.preset
        if not self.accepts_labels:
            line = "labels are given, but this service answers for its own only; leave them out"
            raise RequestError(422, line, field="labels")
        if body.templates is not None and self.labels.source == "bank":
            line = "templates are given, but this model has no text tower; leave them out"
            raise RequestError(422, line, field="templates")
        try:
            return await self.labels.get(tuple(body.labels), tuple(body.templates or ()))
        except ReactClipError as error:
            # The rest of the library's message is for programmers; a caller can only choose other names.
            line = str(error).partition("; use one of its names")[0] + "; choose other labels"
            raise RequestError(422, line, field="labels") from None

    async def ask(self, photos: list[Photo], classes: ZeroShotClassifier, *, all_views: bool = False) -> list[Answer]:
        """The engine's answers, in the order of the photos; cancelling this cancels the images that still wait."""
        futures = self.engine.submit(photos, classes, all_views=all_views)
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    def findings(self, body: requests.ImageRequest, answer: Answer) -> dict[str, Any]:
        """Fields of an answer about the defence's decision, null where callers may not see it or did not ask."""
        return {
            "diagnostics": responses.Diagnostics.of(answer) if self.settings.sends_diagnostics else None,
            "suspicious": answer.suspicious if body.suspicious else None,
        }


async def _service(request: Request) -> Service:  # FastAPI would call a plain function on a thread of its own
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def _body(model: type[requests.Request]) -> Any:
    """A dependency that reads a body; FastAPI's own body parameters take JSON or a form, but not both."""

    async def read(request: Request, service: ServiceDep) -> requests.Request:
        with service.engine.expect(1):
            return await service.decoder.read(request, model)

    return Depends(read)


api = APIRouter(prefix="/v1", responses=pages.error_responses(*pages.BODY_ERRORS))
demo = APIRouter(prefix="/v1/demo", responses=pages.error_responses(*pages.BODY_ERRORS))
state = APIRouter(responses=pages.error_responses(401, 503))
site = APIRouter(include_in_schema=False)


@api.post(
    "/classify",
    openapi_extra=pages.request_body(requests.ClassifyRequest, top_k=3),
    responses=pages.example_answer(pages.CLASSIFIED),
)
async def classify(
    service: ServiceDep, body: Annotated[requests.ClassifyRequest, _body(requests.ClassifyRequest)]
) -> responses.ClassifyResponse:
    """Classify photos, defended."""
    classes, photos = await service.inputs(body)
    results = []
    for index, answer in enumerate(await service.ask(photos, classes)):
        best = responses.top(classes.names, answer.probs, body.top_k)
        findings = service.findings(body, answer)
        results.append(responses.Result(index=index, **dict(best[0]), answers=best, **findings))
    return responses.ClassifyResponse(model=service.model, results=results)


@api.post(
    "/embed",
    openapi_extra=pages.request_body(requests.EmbedRequest, encoding_format="float"),
    responses=pages.example_answer(pages.EMBEDDED),
)
async def embed(
    service: ServiceDep, body: Annotated[requests.EmbedRequest, _body(requests.EmbedRequest)]
) -> responses.EmbedResponse:
    """Defended unit features of photos, in the shape of OpenAI's embeddings; the labels are used by the gate only."""
    classes, photos = await service.inputs(body)
    data = [
        responses.Embedding(
            index=index,
            embedding=responses.encode_feature(answer.feature, body.encoding_format),
            **service.findings(body, answer),
        )
        for index, answer in enumerate(await service.ask(photos, classes, all_views=True))
    ]
    return responses.EmbedResponse(data=data, model=service.model, usage=responses.Usage(images=len(data)))


@demo.post("/attack", openapi_extra=pages.request_body(requests.AttackRequest, eps=4))
async def attack(
    service: ServiceDep, body: Annotated[requests.AttackRequest, _body(requests.AttackRequest)]
) -> responses.AttackResponse:
    """Attack a photo and compare the answers of plain and defended CLIP; delays all other requests."""
    engine, eps = service.engine, body.eps / 255
    classes, [photo] = await service.inputs(body)
    [clean] = await service.ask([photo], classes)
    pixels = from_8bit(photo.pixels)
    target, attacked, scale = int(clean.plain_probs.argmax()), pixels, 1.0
    if eps > 0:
        scale = _DRAWN / eps
        attacked = await _attacked(service, classes, pixels, target, eps)
    key = noise.stream_keys(attacked[None], engine.secret)[0]
    [after] = await service.ask([Photo(attacked, key)], classes)

    def compare(shown: Tensor, answer: Answer) -> responses.Comparison:
        return responses.Comparison(
            image=data_uri(to_image(shown)),
            plain=responses.top(classes.names, answer.plain_probs, body.top_k),
            defended=responses.top(classes.names, answer.probs, body.top_k),
            diagnostics=responses.Diagnostics.of(answer),
        )

    return responses.AttackResponse(
        model=service.model,
        eps=body.eps,
        attacked_label=classes.names[target],
        clean=compare(pixels, clean),
        attacked=compare(attacked, after),
        perturbation=data_uri(to_image(0.5 + scale * (attacked - pixels))),
        amplification=scale,
    )


async def _attacked(service: Service, classes: ZeroShotClassifier, pixels: Tensor, target: int, eps: float) -> Tensor:
    """Attacked pixels ``[3, S, S]``. An attack whose caller is gone ends: the page's slider leaves many behind."""
    assert service.attack is not None, "the route exists only with an attack"
    ended = False

    def advance(done: int, steps: int) -> None:
        if ended:
            raise asyncio.CancelledError
        service.attack_progress = responses.AttackProgress(done=done, steps=steps)

    try:
        job = service.engine.run(partial(service.attack, classes, pixels[None], target, eps, advance))
        return (await asyncio.wrap_future(job))[0].cpu()
    finally:
        ended = True
        service.attack_progress = responses.AttackProgress()


@demo.get("/progress")
async def progress(service: ServiceDep) -> responses.AttackProgress:
    """Steps of the attack that runs now."""
    return service.attack_progress


@state.get("/v1/info")
async def info(service: ServiceDep) -> responses.Info:
    """Model, labels, limits and defence of this service."""
    engine, settings, free = service.engine, service.settings, service.accepts_labels
    return responses.Info(
        version=__version__,
        model=service.model,
        image_size=engine.encoder.image_size,
        dim=engine.encoder.dim,
        labels=responses.Labels(
            preset=list(engine.preset.names),
            free=free,
            source=service.labels.source if free else "preset",
            templates=free and service.labels.source == "text",
        ),
        formats=[f"image/{name.lower()}" for name in DEFAULT_LIMITS.formats],
        limits=responses.Limits.model_validate(settings),
        diagnostics=settings.sends_diagnostics,
        demo=None if service.attack is None else responses.DemoRange(),
        defence=responses.Defence.of(engine.guard, engine.encoder),
    )


@state.get("/v1/models")
async def models(service: ServiceDep) -> responses.ModelList:
    """The served model, in the shape of OpenAI's list."""
    return responses.ModelList(data=[responses.ServedModel(id=service.model, created=service.started)])


@state.get("/healthz")
async def healthz() -> responses.Status:
    """200 while the process is alive."""
    return responses.Status(status="alive")


@state.get("/readyz")
async def readyz(service: ServiceDep) -> responses.Status:
    """200 while the service takes requests; 503 while stopping or while the queue has no room for a full request."""
    if not service.engine.alive:
        raise busy("the model is not running", kind="stopping")
    if service.engine.free_slots < service.settings.max_images:
        raise busy("the queue has no room for a full request")
    return responses.Status(status="ready")


@site.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Metrics for Prometheus."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@site.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The manual."""
    page = pages.manual(request.app.openapi(), str(request.base_url).rstrip("/"))
    return HTMLResponse(page, headers={"content-security-policy": pages.POLICY})


@site.get("/")
async def page() -> FileResponse:
    """The page to try the service."""
    return FileResponse(pages.STATIC / "page.html", headers={"content-security-policy": pages.POLICY})


def create_app(engine: Engine, attack: DemoAttack | None = None, *, keys: frozenset[bytes] = frozenset()) -> FastAPI:
    """The application around a started engine.

    ``attack`` adds ``/v1/demo/attack``; ``keys`` are the digests of API keys, without which everybody may call.
    """
    service, settings = Service(engine, attack), engine.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        trimming = asyncio.create_task(return_freed_memory())
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
    app.add_middleware(RequestGuard, settings=settings, keys=keys, metrics=service.metrics)
    app.add_exception_handler(HTTPException, answer_http_error)
    for router in (api, state, site, *([demo] if attack else [])):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=pages.STATIC))
    return app


def public_name(name: str) -> str:
    """A model's name without the folders of this machine.

    >>> public_name("openai/clip-vit-base-patch32"), public_name("clip-vit-b-16+/data/runs/tecoa.safetensors")
    ('openai/clip-vit-base-patch32', 'clip-vit-b-16+tecoa.safetensors')
    """
    base, plus, file = name.partition("+")
    base = Path(base).resolve().name if Path(base).is_dir() else base
    return base + plus + Path(file).name
