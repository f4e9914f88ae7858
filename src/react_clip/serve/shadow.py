"""Shadow: a defence that runs beside the answers that callers get, and the table of those that it would change."""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from torch import Tensor

from react_clip.defenses.base import Defense
from react_clip.defenses.result import Defended
from react_clip.intervals import wilson
from react_clip.serve.log import logger
from react_clip.serve.metrics import Metrics
from react_clip.storage import tensor_digest
from react_clip.zeroshot import ZeroShotClassifier

_WAITING = 64
"""Photos that wait for the shadow; of more, the oldest are skipped."""
_ROWS = 1000
"""Changed answers that are kept, the newest ones."""


Photo = tuple[Tensor, int, ZeroShotClassifier, int]
"""A photo that was answered: pixels ``[3, S, S]`` in 8 bits, key of the noise, classes, number of the answer."""


class Shadow:
    """Runs for a share of the photos after they were answered, on the model's thread, while no request waits."""

    def __init__(self, defense: Defense, share: float, metrics: Metrics) -> None:
        self.defense, self._share, self._metrics = defense, share, metrics
        self.waiting = deque[Photo](maxlen=_WAITING)
        self._counts, self._passes, self._rows = Counter[str](), 0.0, deque[dict[str, str]](maxlen=_ROWS)

    def add(self, photo: Photo) -> None:
        """Remember a photo if it belongs to the share, which its key decides."""
        if photo[1] % 2**20 < self._share * 2**20:
            self._counts["taken"] += 1
            self.waiting.append(photo)

    def run(self, run: Callable[[Tensor, list[int], list[Any], Defense], Defended], most: int) -> None:
        """Compare the answers for ``most`` of the photos with those that the callers got."""
        photos = [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]
        pixels, keys, classes, answers = map(list, zip(*photos, strict=True))
        try:
            out = run(torch.stack(pixels), keys, classes, self.defense)
        except Exception as error:
            logger.error("the shadow failed: %s", type(error).__name__)
            return
        self._passes += out.passes.sum().item()
        for image, before, after, names in zip(pixels, answers, out.labels.tolist(), out.class_names, strict=True):
            outcome = "same" if before == after else "changed"
            self._counts[outcome] += 1
            self._metrics.shadow.labels(outcome).inc()
            if before != after:
                row = {"time": f"{datetime.now(UTC):%FT%TZ}", "photo": tensor_digest(image)[:16]}
                self._rows.append(row | {"answer": names[before], "shadow": names[after]})

    def table(self) -> dict[str, Any]:
        """Counts, the share of changed answers with its interval, pairs of labels, and the newest changed answers."""
        counts, compared = self._counts, self._counts["same"] + self._counts["changed"]
        pairs = Counter((row["answer"], row["shadow"]) for row in self._rows).most_common()
        return {
            "shadow": self.defense.to_dict(),
            "compared": compared,
            "skipped": counts["taken"] - compared - len(self.waiting),
            "changed": counts["changed"],
            "changed_share": wilson(counts["changed"] / compared, compared)._asdict() if compared else None,
            "passes": self._passes / compared if compared else None,
            "labels": [{"answer": before, "shadow": after, "images": n} for (before, after), n in pairs],
            "rows": list(self._rows),
        }


router = APIRouter(prefix="/v1")


@router.get("/shadow")
async def shadow(request: Request, format: Literal["json", "csv"] = "json") -> Response:
    """What the shadow would have changed, with the newest changed answers; as CSV only these, one a row."""
    service = request.app.state.service
    table = await asyncio.wait_for(service.client.ask(shadow=True), service.settings.deadline)
    if format == "json":
        return JSONResponse(table)
    # Callers choose labels, and a spreadsheet takes some beginnings for formulas.
    rows = [[f"'{cell}" if cell[0] in "=+-@" else cell for cell in row.values()] for row in table["rows"]]
    csv.writer(text := io.StringIO()).writerows([["time", "photo", "answer", "shadow"], *rows])
    return Response(text.getvalue(), media_type="text/csv")
