"""The application: routes around an engine, and the OpenAPI document that describes them."""

# No postponed annotations here: FastAPI reads the handlers' own, which are local to the function.

import base64
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from react_clip.serve import pages, schemas
from react_clip.serve.credentials import KeyRing
from react_clip.serve.engine import Engine
from react_clip.serve.gatekeeper import Gatekeeper, State
from react_clip.serve.metrics import Metrics
from react_clip.serve.problems import RequestError, busy, json_response
from react_clip.serve.service import DemoAttack, Service
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_ABOUT = "Zero-shot image classification and embedding by CLIP, defended against adversarial images at test time."
_ERRORS = {
    400: "The body cannot be taken apart.",
    401: "The API key is missing or unknown.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body, or an image, is of a kind that is not read.",
    422: "A field or an image is not acceptable.",
    503: "Too busy, or stopping; Retry-After says when to come back.",
}

Handler = Callable[[Request], Awaitable[dict[str, Any]]]


def create_app(
    engine: Engine, settings: Settings, demo: DemoAttack | None = None, *, keys: KeyRing | None = None
) -> "FastAPI":
    """The application around a started engine; ``demo`` is the attack behind ``/v1/demo/attack``, where wanted."""
    from fastapi import FastAPI

    service = Service(engine, settings, demo)
    metrics, state, started = Metrics(lambda: engine.depth), State(), int(time.time())
    engine.observer = metrics.batch

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.decoders.close()
        engine.stop(timeout=settings.grace)

    from react_clip.environment import __version__

    app = FastAPI(
        title="react-clip",
        description=_ABOUT,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service, app.state.gate = service, state
    app.add_middleware(Gatekeeper, settings=settings, keys=keys or KeyRing([]), metrics=metrics, state=state)
    app.add_exception_handler(HTTPException, _unrouted)
    _add_posts(app, service)
    _add_gets(app, service, metrics, started)
    return app


async def _unrouted(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        line = f"{request.method} is not offered here; use {allowed.get('Allow', 'another method')}"
        return RequestError(405, line, headers=allowed).response()
    return RequestError(error.status_code, "there is nothing at this path; see /docs").response()


def _add_posts(app: "FastAPI", service: Service) -> None:
    routes: list[tuple[str, str, Handler, type[schemas.ImageRequest], Any, dict[str, Any]]] = [
        (
            "/v1/classify",
            "Name what is on photos, defended.",
            service.classify,
            schemas.ClassifyRequest,
            schemas.ClassifyResponse,
            {"images": [example_image()], "top_k": 3},
        ),
        (
            "/v1/embed",
            "Defended unit features of photos, in the shape of OpenAI's embeddings.",
            service.embed,
            schemas.EmbedRequest,
            schemas.EmbedResponse,
            {"images": [example_image()], "encoding_format": "float"},
        ),
    ]
    if service.demo is not None:
        routes.append(
            (
                "/v1/demo/attack",
                "Attack a photo and see what plain and defended CLIP say.",
                service.attack,
                schemas.AttackRequest,
                schemas.AttackResponse,
                {"images": [example_image()], "eps": 4},
            )
        )
    for path, summary, handler, asked, answered, example in routes:
        app.add_api_route(
            path,
            _answering(handler),
            methods=["POST"],
            summary=summary,
            operation_id=path.strip("/").replace("/", "_"),
            description=_curl(path),
            response_class=Response,
            responses=_responses(answered),
            openapi_extra=_request_body(asked, example),
        )


def _add_gets(app: "FastAPI", service: Service, metrics: Metrics, started: int) -> None:
    engine = service.engine
    page = pages.load_page()

    async def health(request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(request: Request) -> Response:
        if not engine.alive:
            raise busy("the model is not running", kind="stopping")
        if engine.room < service.settings.max_images:
            raise busy("the queue has no room for a full request")
        return json_response({"status": "ready"})

    async def info(request: Request) -> Response:
        return json_response(service.info())

    async def models(request: Request) -> Response:
        model = {"id": service.name, "object": "model", "created": started, "owned_by": "react-clip"}
        return json_response({"object": "list", "data": [model]})

    async def measured(request: Request) -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    async def docs(request: Request) -> Response:
        made = pages.manual(app.openapi())
        return HTMLResponse(made.html, headers=made.headers)

    async def front(request: Request) -> Response:
        if page is None:
            raise RequestError(404, "this service has no page; see /docs for what it answers")
        return HTMLResponse(page.html, headers=page.headers)

    documented = {
        "/v1/info": (info, schemas.Info, "What this service is: model, labels, limits, defence."),
        "/v1/models": (models, schemas.ModelList, "The served model, in the shape of OpenAI's list."),
        "/healthz": (health, schemas.Status, "Whether the process lives."),
        "/readyz": (ready, schemas.Status, "Whether it takes requests: 503 while saturated or stopping."),
    }
    for path, (handler, answered, summary) in documented.items():
        app.add_api_route(
            path,
            handler,
            methods=["GET"],
            summary=summary,
            operation_id=path.strip("/").replace("/", "_"),
            response_class=Response,
            responses=_responses(answered, 401, 503),
        )
    for path, handler in {"/metrics": measured, "/docs": docs, "/": front}.items():
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False, response_class=Response)


def _answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return json_response(await handler(request))

    return answer


# ---------------------------------------------------------------------- OpenAPI


def _responses(model: Any, *errors: int) -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status in errors or _ERRORS:
        found[status] = {"model": schemas.ErrorBody, "description": _ERRORS[status]}
    return found


def _request_body(model: type[schemas.ImageRequest], example: dict[str, Any]) -> dict[str, Any]:
    """One schema, twice: as JSON with base64, and as a form with files."""
    as_json = model.model_json_schema()
    as_form = model.model_json_schema()
    files = dict(as_form["properties"]["images"]) | {"items": {"type": "string", "format": "binary"}}
    as_form["properties"] = as_form["properties"] | {"images": files}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": as_json, "example": example},
                "multipart/form-data": {"schema": as_form},
            },
        }
    }


def _curl(path: str) -> str:
    return f"curl -F images=@photo.jpg http://127.0.0.1:8000{path}"


def example_image() -> str:
    """A small PNG as base64, so that the examples in the documentation can be sent as they are."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 120, 40)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")
