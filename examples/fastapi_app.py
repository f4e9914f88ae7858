"""A FastAPI app that labels uploaded photos. The five numbered lines are react-clip; the rest is FastAPI.

    react-clip pull clip-vit-b-16
    uvicorn --app-dir examples fastapi_app:app
    curl -F photo=@cat.jpg http://127.0.0.1:8000/label

`react-clip serve` is the service for strangers: it also limits an upload while it arrives, answers several requests
in one batch, and has API keys, metrics and a bounded queue.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request, UploadFile

import react_clip as rc  # 1

LABELS = ["cat", "dog", "coffee", "rocket", "motorcycle", "flower"]
MAX_BYTES = 8 * 2**20
SECRET = secrets.token_bytes(32)  # of the defence's random numbers, which attackers must not know


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model once, before the first request."""
    clip = rc.load("clip-vit-b-16")  # 2
    app.state.classifier = rc.ZeroShotClassifier(clip, LABELS)  # 3
    app.state.guard = rc.SecondLook.for_encoder(clip)  # 4
    yield


app = FastAPI(title="Photo labels", lifespan=lifespan)


@app.post("/label")
def label(photo: UploadFile, request: Request) -> dict[str, str | float]:
    """The defended answer for one photo. FastAPI runs a plain `def` in a thread, so others can connect meanwhile."""
    data = photo.file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise HTTPException(413, f"the photo has more than {MAX_BYTES:,} bytes; scale it down")
    state = request.app.state
    try:
        # The file is untrusted: its format and number of pixels are checked before it is decoded.
        out = state.guard(state.classifier, data, secret=SECRET)  # 5
    except rc.ReactClipError as error:
        raise HTTPException(422, str(error)) from None
    return {"label": out.names[0], "probability": out.probs.max().item()}
