"""The page as people use it: opened from disk in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from react_clip.report.page import write_report
from react_clip.report.ranking import rank

pytestmark = [pytest.mark.browser, pytest.mark.smoke]


def test_pages_sort_and_ask_for_nothing(folder: Path, tmp_path: Path, browser: Any) -> None:
    write_report([folder], tmp_path)
    rank([folder]).write_page(tmp_path / "ranking.html")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    complaints: list[str] = []
    requests: set[str] = set()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.add(request.url.partition(":")[0]))
    for name in ("index.html", "ranking.html"):
        page.goto((tmp_path / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "a phone scrolls tables, not the page"
        )
        assert page.locator("img").evaluate_all("all => all.every((each) => each.naturalWidth > 0)")
    table = page.locator("table.sortable").first
    for column, button in ((1, "clean"), (1, "clean"), (0, "defence")):
        table.get_by_role("button", name=button, exact=True).click()
        state = table.locator("th[aria-sort]").get_attribute("aria-sort")
        texts = table.locator(f"tbody tr > :nth-child({column + 1})").all_inner_texts()
        values = [float(text.split()[0]) for text in texts] if column else texts
        assert values == sorted(values, reverse=state == "descending")
    page.close()
    assert complaints == []
    assert requests <= {"file", "data"}
