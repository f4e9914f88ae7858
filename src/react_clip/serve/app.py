"""The FastAPI application: routes, and what they share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from react_clip.environment import __version__
from react_clip.serve import responses
from react_clip.serve.callers import Rates, check_caller
from react_clip.serve.client import ModelClient
from react_clip.serve.errors import RequestError, answer_http_error, busy
from react_clip.serve.log import RequestLog
from react_clip.serve.metrics import Metrics
from react_clip.serve.reading import read
from react_clip.serve.requests import Asked, ClassifyRequest, EmbeddingsRequest, described
from react_clip.serve.settings import Secrets, Settings, allowed_hosts

if TYPE_CHECKING:
    from react_clip.serve.model import Model

_STATIC = Path(__file__).with_name("static")


class Service:
    """Shared by all requests of a process."""

    def __init__(self, settings: Settings, secrets: Secrets, client: ModelClient, metrics: Metrics) -> None:
        self.settings, self.secrets, self.client, self.metrics = settings, secrets, client, metrics
        self.rates = Rates(settings.rate_limit) if settings.rate_limit else None
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="react-clip-decode")
        self.buffered = 0
        """Bytes of all bodies that have arrived and are not answered yet."""
        self.stopping = False


_KEYED = [Security(check_caller)]
api = APIRouter(prefix="/v1", dependencies=_KEYED, responses=responses.ERRORS)
state = APIRouter(responses=responses.ERRORS)
site = APIRouter(include_in_schema=False)


@api.post("/classify", openapi_extra=described(ClassifyRequest, top_k=3))
async def classify(
    request: Request, asked: Annotated[Asked[ClassifyRequest], read(ClassifyRequest)]
) -> responses.ClassifyResponse:
    """Classify photos, defended. A photo that cannot be read has an error of its own, unless all are like that."""
    client: ModelClient = request.app.state.service.client
    body = asked.body
    answers = await client.ask(asked.pixels, keys=asked.keys, labels=asked.body.labels)
    request.scope["answers"] = answers
    rows, results = iter(answers), list[responses.Result]()
    for index in range(len(body.images)):
        if index in asked.errors:
            results.append(responses.Result(index=index, error=asked.errors[index]))
            continue
        answer = next(rows)
        best = responses.top(asked.labels, answer.probs, body.top_k)
        results.append(
            responses.Result(
                index=index,
                label=best[0].label,
                probability=best[0].probability,
                answers=best,
                diagnostics=responses.Diagnostics.of(answer.numbers) if client.info.diagnostics else None,
            )
        )
    return responses.ClassifyResponse(model=client.info.model, results=results)


@api.post("/embeddings", openapi_extra=described(EmbeddingsRequest, encoding_format="float"))
async def embeddings(
    request: Request, asked: Annotated[Asked[EmbeddingsRequest], read(EmbeddingsRequest)]
) -> responses.EmbeddingsResponse:
    """Defended unit features of images, and features of texts, in the shape of OpenAI's; the gate uses the labels."""
    client: ModelClient = request.app.state.service.client
    body, texts = asked.body, [*asked.texts.values()]
    answers = await client.ask(asked.pixels, keys=asked.keys, labels=body.labels) if asked.keys else []
    of_texts = await client.ask(texts=texts) if texts else []
    request.scope["answers"] = answers
    of_image, of_text = iter(answers), iter(of_texts)
    data = list[responses.Embedding]()
    for index in range(len(body.images)):
        answer = next(of_text if index in asked.texts else of_image)
        numbers = answer.numbers  # none of a text
        data.append(
            responses.Embedding(
                index=index,
                embedding=responses.encode_feature(answer.feature, body.encoding_format),
                diagnostics=responses.Diagnostics.of(numbers) if numbers and client.info.diagnostics else None,
            )
        )
    usage = {"prompt_tokens": 0, "total_tokens": 0, "images": len(answers)}
    return responses.EmbeddingsResponse(data=data, model=client.info.model, usage=usage)


@api.get("/info")
async def info(request: Request) -> responses.Info:
    """Model, labels, limits and defence of this service."""
    known: responses.Info = request.app.state.service.client.info
    return known


@api.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The served model, in the shape of OpenAI's list."""
    service: Service = request.app.state.service
    one = {"id": service.client.info.model, "object": "model", "created": 0, "owned_by": "react-clip"}
    return {"object": "list", "data": [one]}


@state.get("/healthz")
async def healthz() -> responses.Status:
    """200 while the process is alive."""
    return responses.Status(status="alive")


@state.get("/readyz")
async def readyz(request: Request) -> responses.Status:
    """200 while the service takes requests; 503 while it stops, its model does not answer, or its queue is full."""
    service: Service = request.app.state.service
    if service.stopping:
        raise busy("the service is stopping", kind="unavailable")
    service.client.admit(1)
    return responses.Status(status="ready")


async def check_observer(request: Request) -> None:
    """Refuse callers who may not know how often the gate opens."""
    service: Service = request.app.state.service
    if not service.secrets.keys and not service.client.info.diagnostics:
        line = "this tells how often the gate opens; start with API keys or with --diagnostics"
        raise RequestError(403, line)


_OBSERVED = [*_KEYED, Depends(check_observer)]


@state.get("/metrics", dependencies=_OBSERVED, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@site.get("/docs")
async def docs() -> FileResponse:
    """Every route with an example to run."""
    return FileResponse(_STATIC / "docs.html")


@site.get("/")
async def page() -> FileResponse:
    """The page to try the service."""
    return FileResponse(_STATIC / "page.html")


def create_app(settings: Settings, secrets: Secrets, *, model: Model | None = None, address: str = "") -> FastAPI:
    """The application with a model on a thread of its own, or with one behind the ``address`` of another process."""
    address = address or f"inproc://model-{uuid.uuid4()}"
    client = ModelClient(address, settings)
    service = Service(settings, secrets, client, model.metrics if model else Metrics(shared=True))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with model.running(address) if model else nullcontext():
            await client.connect()
            yield
            service.threads.shutdown(wait=False, cancel_futures=True)
            client.close()

    app = FastAPI(
        title="react-clip",
        description="Zero-shot image classification and embedding by CLIP, defended against adversarial images.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(settings, secrets), www_redirect=False)
    if settings.cors_origin:
        shared: Any = {"allow_methods": ["GET", "POST"], "expose_headers": ["retry-after", "x-request-id"]}
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origin, allow_headers=["*"], **shared)
    app.add_middleware(RequestLog, service=service)
    app.add_exception_handler(HTTPException, answer_http_error)
    for router in (api, state, site):
        app.include_router(router)
    if model is not None and model.attack is not None:
        from react_clip.serve.demo import routes

        app.include_router(routes(model, secrets.noise), dependencies=_KEYED)
    if settings.shadow is not None:
        from react_clip.serve import shadow

        app.include_router(shadow.router, dependencies=_OBSERVED, responses=responses.ERRORS)
    app.mount("/static", StaticFiles(directory=_STATIC))
    return app
