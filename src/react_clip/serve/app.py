"""The FastAPI application: routes, API keys, and what they share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.responses import FileResponse, RedirectResponse, Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from react_clip.environment import __version__
from react_clip.serve import openapi, requests, responses
from react_clip.serve.client import ModelClient
from react_clip.serve.errors import RequestError, answer_http_error, busy, quote
from react_clip.serve.limits import RequestLimits
from react_clip.serve.metrics import Metrics
from react_clip.serve.settings import LABEL_LENGTH, Secrets, Settings, allowed_hosts, digest

if TYPE_CHECKING:
    from react_clip.serve.model import Model

_STATIC = Path(__file__).with_name("static")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: scripts and styles of this server only, and none inside the HTML."""


class Service:
    """Shared by all requests of a process."""

    def __init__(self, settings: Settings, secrets: Secrets, client: ModelClient, metrics: Metrics) -> None:
        self.settings, self.secrets, self.client, self.metrics = settings, secrets, client, metrics
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="react-clip-decode")
        self.started = int(time.time())
        self.handling = 0
        """Requests being handled whose body has arrived."""
        self.stopping = False


def read(model: type[requests.Request]) -> Callable[[Request], Coroutine[Any, Any, requests.Asked[requests.Request]]]:
    """The dependency that reads the body of a request, which is JSON or a form, and decodes its photos in a thread."""

    async def read_body(request: Request) -> requests.Asked[requests.Request]:
        service: Service = request.app.state.service
        settings, client = service.settings, service.client
        client.admit(1)  # before its body is read
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            line = f"content-encoding is {quote(encoding)}; send the body as it is"
            raise RequestError(415, line, field="content-encoding")
        content: bytes | dict[str, Any]
        if kind == "application/json":
            content = await request.body()
        elif kind == "multipart/form-data":
            # Four bytes a character at most, and a comma and a space between two labels.
            longest = max(2**20, settings.max_labels * (4 * LABEL_LENGTH + 2))
            form = await request.form(max_files=1000, max_fields=settings.max_labels + 100, max_part_size=longest)
            content = {}
            for name, value in form.multi_items():
                part = await value.read() if isinstance(value, UploadFile) else value
                content.setdefault(name.removesuffix("[]"), []).append(part)
        else:
            line = f"content-type is {quote(request.headers.get('content-type', ''))}; send application/json or "
            raise RequestError(415, line + "multipart/form-data", field="content-type")
        return await asyncio.get_running_loop().run_in_executor(
            service.threads,
            requests.prepare,
            *(model, content, client.info, client.preprocessing, settings, service.secrets.noise),
        )

    return read_body


async def check_caller(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))],
    header: Annotated[str | None, Security(APIKeyHeader(name="x-api-key", auto_error=False))],
) -> None:
    """Refuse callers without a known API key if the service has keys, else pages of other sites."""
    known = request.app.state.service.secrets.keys
    key = (bearer.credentials if bearer else header) or ""
    if known and digest(key.encode("utf-8", "surrogatepass")) not in known:
        line = f"{'the API key is unknown' if key else 'an API key is missing'}; send Authorization: Bearer KEY"
        headers = {"www-authenticate": 'Bearer realm="react-clip"'}
        raise RequestError(401, line, field="authorization", headers=headers)
    # Browsers say this of what a page makes them send.
    if not known and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise RequestError(403, "pages of other sites may not call this service; start it with API keys")


_KEYED = [Security(check_caller)]
api = APIRouter(prefix="/v1", dependencies=_KEYED, responses=openapi.errors(*openapi.BODY_ERRORS))
about = APIRouter(prefix="/v1", dependencies=_KEYED, responses=openapi.errors(400, 401, 503))
state = APIRouter(responses=openapi.errors(400, 503))
site = APIRouter(include_in_schema=False)

ClassifyBody = Annotated[requests.Asked[requests.ClassifyRequest], Depends(read(requests.ClassifyRequest))]
EmbedBody = Annotated[requests.Asked[requests.EmbedRequest], Depends(read(requests.EmbedRequest))]


@api.post("/classify", openapi_extra=openapi.request_body(requests.ClassifyRequest, top_k=3))
async def classify(request: Request, asked: ClassifyBody) -> responses.ClassifyResponse:
    """Classify photos, defended."""
    client: ModelClient = request.app.state.service.client
    body = asked.body
    answers = await client.submit(asked.pixels, asked.keys, asked.label_list)
    results = []
    for index, answer in enumerate(answers):
        best = responses.top(asked.labels, answer.probs, body.top_k)
        results.append(
            responses.Result(
                index=index,
                label=best[0].label,
                probability=best[0].probability,
                answers=best,
                diagnostics=responses.Diagnostics.of(answer.numbers) if client.info.diagnostics else None,
                suspicious=bool(answer.numbers["suspicious"]) if body.suspicious else None,
            )
        )
    return responses.ClassifyResponse(model=client.info.model, results=results)


@api.post("/embed", openapi_extra=openapi.request_body(requests.EmbedRequest, encoding_format="float"))
async def embed(request: Request, asked: EmbedBody) -> responses.EmbedResponse:
    """Defended unit features of photos, in the shape of OpenAI's embeddings; the labels are used by the gate only."""
    client: ModelClient = request.app.state.service.client
    body = asked.body
    answers = await client.submit(asked.pixels, asked.keys, asked.label_list)
    data = [
        responses.Embedding(
            index=index,
            embedding=responses.encode_feature(answer.feature, body.encoding_format),
            diagnostics=responses.Diagnostics.of(answer.numbers) if client.info.diagnostics else None,
            suspicious=bool(answer.numbers["suspicious"]) if body.suspicious else None,
        )
        for index, answer in enumerate(answers)
    ]
    return responses.EmbedResponse(data=data, model=client.info.model, usage=responses.Usage(images=len(data)))


@about.get("/info")
async def info(request: Request) -> responses.Info:
    """Model, labels, limits and defence of this service."""
    known: responses.Info = request.app.state.service.client.info
    return known


@about.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The served model, in the shape of OpenAI's list."""
    service: Service = request.app.state.service
    one = {"id": service.client.info.model, "object": "model", "created": service.started, "owned_by": "react-clip"}
    return {"object": "list", "data": [one]}


@state.head("/healthz", include_in_schema=False)
@state.get("/healthz")
async def healthz() -> responses.Status:
    """200 while the process is alive."""
    return responses.Status(status="alive")


@state.head("/readyz", include_in_schema=False)
@state.get("/readyz")
async def readyz(request: Request) -> responses.Status:
    """200 while the service takes requests; 503 while it stops, its model does not answer, or its queue is full."""
    service: Service = request.app.state.service
    if service.stopping:
        raise busy("the service is stopping", kind="unavailable")
    service.client.admit(1)
    return responses.Status(status="ready")


@site.get("/metrics", dependencies=_KEYED)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service: Service = request.app.state.service
    if not service.secrets.keys and not service.settings.sends_diagnostics:
        line = "metrics tell how often the gate opens; start with API keys or with --diagnostics"
        raise RequestError(403, line)
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@site.get("/docs")
async def docs() -> RedirectResponse:
    """The machine-readable manual."""
    return RedirectResponse("openapi.json")


@site.get("/")
async def page() -> FileResponse:
    """The page to try the service."""
    return FileResponse(_STATIC / "page.html", headers={"content-security-policy": _POLICY})


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
        generate_unique_id_function=lambda route: route.path_format.strip("/").replace("/", "_"),
    )
    app.state.service = service
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(settings, secrets), www_redirect=False)
    app.add_middleware(RequestLimits, service=service)
    app.add_exception_handler(HTTPException, answer_http_error)
    for router in (api, about, state, site):
        app.include_router(router)
    if model is not None and model.attack is not None:
        from react_clip.serve.demo import routes

        app.include_router(routes(model, secrets.noise), dependencies=_KEYED)
    app.mount("/static", StaticFiles(directory=_STATIC))
    return app
