"""The page as people use it: opened from disk in a real browser, by mouse, by keyboard, on a phone, on paper."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from react_clip.report.page import Report, write_report

Visit = Callable[..., Any]


@pytest.fixture
def page_file(toy_report: tuple[Report, Any]) -> Path:
    """The toy's page with some of its figures."""
    return toy_report[0].page


def without_figures(folder: Path, out: Path, **options: Any) -> Path:
    """A page without figures: they take most of the time to write it and to open it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("react_clip.report.figures.figures_of", lambda run, **options: ([], {}))
        return write_report([folder], out, **options).page


@pytest.fixture(scope="module")
def rows_file(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's page without figures."""
    return without_figures(toy_folder, tmp_path_factory.mktemp("rows"), photos=6)


@pytest.fixture(scope="module")
def many_rows(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's rows again and again, as if there were more photos: 20,160 in all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("many") / "run"
    shutil.copytree(toy_folder, folder, ignore=shutil.ignore_patterns("shards"))
    table = pq.read_table(folder / "per_image.parquet")
    place = table.column_names.index("index")
    copies = [
        table.set_column(place, "index", pa.array(table["index"].to_numpy() + 40 * number, pa.int32()))
        for number in range(42)
    ]
    pq.write_table(pa.concat_tables(copies).unify_dictionaries(), folder / "per_image.parquet")
    return without_figures(folder, folder.parent / "out", rows=30_000)


def column(page: Any, name: str) -> list[str]:
    """The texts of a column of the rows that are in the document."""
    found: list[str] = page.evaluate(
        """(id) => {
          const place = [...document.querySelectorAll('.images th')].findIndex((head) => head.dataset.id === id);
          return [...document.querySelectorAll('.images tr[data-place]')].map((row) => row.cells[place].textContent);
        }""",
        name,
    )
    return found


def sort_by(page: Any, name: str) -> None:
    page.locator(f'.images th[data-id="{name}"] button').click()


def row(page: Any, place: int) -> Any:
    """A row of the table, to wait for. A locator waits without evaluating a string, which the page's policy forbids."""
    return page.locator(f'.images tr[data-place="{place}"]')


def count(page: Any) -> str:
    return str(page.locator(".count").inner_text())


# ---------------------------------------------------------------------- the table of images


def test_numbers_sort_as_numbers_and_the_header_says_so(rows_file: Path, visit: Visit) -> None:
    page = visit(rows_file)
    sort_by(page, "index")
    assert page.locator('.images th[aria-sort="ascending"]').inner_text() == "image"
    sort_by(page, "index")
    assert page.locator('.images th[aria-sort="descending"]').inner_text() == "image"
    values = [int(text) for text in column(page, "index")]
    assert values == sorted(values, reverse=True)
    assert values[0] == 39
    for direction in (1, -1):
        sort_by(page, "r")
        texts = column(page, "r")
        numbers = [direction * float(text) for text in texts]
        assert numbers == sorted(numbers), "what was not measured comes last both times"
    head = page.locator('.images th[data-id="label"] button')
    head.focus()
    page.keyboard.press("Enter")
    assert page.locator('.images th[aria-sort="ascending"]').inner_text() == "true class"


def test_filters_narrow_the_rows_and_the_address_keeps_them(rows_file: Path, visit: Visit) -> None:
    page = visit(rows_file)
    page.select_option("select[name=attack]", label="pgd-10 1/255")
    assert count(page).startswith("160 rows")
    page.select_option("select[name=defence]", label="react")
    assert count(page).startswith("80 rows")
    page.select_option("select[name=outcome]", label="saved by the defence")
    assert set(column(page, "right")) == {"\u2713"}
    assert set(column(page, "outcome")) == {"saved by the defence"}
    sort_by(page, "score")
    shown, order = count(page), column(page, "score")
    again = visit(rows_file, "#" + page.url.partition("#")[2])
    assert count(again) == shown
    assert column(again, "score") == order
    again.locator("button[type=reset]").click()
    again.locator(".count", has_text="480 rows").wait_for()
    page.fill("input[name=text]", "TABBY")
    names = zip(*(column(page, name) for name in ("label", "clean", "plain", "answer")), strict=True)
    assert all("tabby cat" in row for row in names)
    page.fill("input[name=text]", "no such class")
    assert count(page) == "No row matches; clear a filter."


def test_twenty_thousand_rows_are_few_elements(many_rows: Path, visit: Visit) -> None:
    page = visit(many_rows)
    rows = page.locator(".images tr")
    assert count(page).startswith("20,160 rows")
    assert 10 < rows.count() < 200
    for name in ("r", "label", "index"):
        sort_by(page, name)
        assert rows.count() < 200
    sort_by(page, "index")
    assert column(page, "index")[0] == "1679"
    page.locator(".window").evaluate("(view) => { view.scrollTop = view.scrollHeight; }")
    row(page, 20159).wait_for()
    assert column(page, "index")[-1] == "0"
    assert rows.count() < 200
    page.locator(".window").evaluate("(view) => { view.scrollTop = 10000 * 32; }")
    row(page, 10000).wait_for()
    gap = page.evaluate(
        "document.querySelector('.images tr[data-place=\"10000\"]').getBoundingClientRect().top"
        " - document.querySelector('.images thead th').getBoundingClientRect().bottom"
    )
    assert abs(gap) < 40, "rows are as high as the script counts them"
    row(page, 10000).click()
    assert "Photos were not kept in this folder." in page.locator("#image").inner_text()


# ---------------------------------------------------------------------- one image


def test_a_row_opens_by_click_with_its_pictures(rows_file: Path, visit: Visit) -> None:
    page = visit(rows_file)
    page.locator("input[name=photos]").check()
    page.select_option("select[name=attack]", label="pgd-3 4/255")
    page.locator(".images tr[data-place]").first.click()
    dialog = page.locator("#image")
    assert dialog.is_visible()
    assert dialog.locator("tbody tr").count() == 4, "two defences with two draws"
    assert dialog.locator(".tau-label").first.text_content() == "\u03c4 0.3"
    sizes = dialog.locator("img").evaluate_all("(all) => all.map((image) => image.naturalWidth)")
    assert sizes == [32, 32, 32], "the photo, the attacked photo, the perturbation"
    assert "magnified 31.9 times; mid-grey is 0" in dialog.inner_text()
    dialog.locator(".close").click()
    assert not dialog.is_visible()


def test_rows_and_the_dialog_work_by_keyboard(rows_file: Path, visit: Visit) -> None:
    page = visit(rows_file)
    page.locator('.images tr[tabindex="0"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.place") == "2"
    page.keyboard.press("Enter")
    dialog = page.locator("#image")
    assert dialog.is_visible()
    first = dialog.locator("tr.current").inner_text()
    page.keyboard.press("ArrowRight")
    assert dialog.locator("tr.current").inner_text() != first
    page.keyboard.press("ArrowLeft")
    assert dialog.locator("tr.current").inner_text() == first
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.evaluate("document.activeElement.dataset.place") == "2", "focus comes back to the row"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.place") == "479"


# ---------------------------------------------------------------------- tables and figures


def test_tables_of_the_result_sort_by_their_numbers(rows_file: Path, visit: Visit) -> None:
    page = visit(rows_file)
    table = page.locator("#table-attacks table")
    head = table.locator("th", has_text="attacked")
    for direction in (-1, 1):
        head.locator("button").click()
        values = table.locator("td:nth-child(3)").evaluate_all("(all) => all.map((cell) => +cell.dataset.value)")
        assert values == sorted(values, key=lambda value: direction * value)
        assert head.get_attribute("aria-sort") == ("descending" if direction < 0 else "ascending")


def test_a_figure_enlarges_and_closes_by_keyboard(page_file: Path, visit: Visit) -> None:
    page = visit(page_file)
    page.locator("button.drawing").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#enlarged svg").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#enlarged").is_visible()


# ---------------------------------------------------------------------- where it is read

LOOK = """() => ({
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
  drawn: getComputedStyle(document.querySelector('figure svg [stroke="currentColor"]') ?? document.body).stroke,
})"""


def test_dark_and_light_differ_and_can_be_chosen(page_file: Path, visit: Visit) -> None:
    light, dark = (visit(page_file, color_scheme=scheme) for scheme in ("light", "dark"))
    by_day, by_night = light.evaluate(LOOK), dark.evaluate(LOOK)
    assert all(by_day[part] != by_night[part] for part in ("paper", "ink", "drawn"))
    assert brightness(by_day["paper"]) > brightness(by_day["ink"])
    assert brightness(by_night["paper"]) < brightness(by_night["ink"])
    light.locator("#theme").click()
    assert light.evaluate(LOOK) == by_night
    light.locator("#theme").click()
    assert light.evaluate(LOOK) == by_day


def brightness(colour: str) -> float:
    return float(np.mean([float(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]))


def test_paper_gets_tables_and_figures_in_light_colours(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    for hidden in ("#browser", "nav", "#theme", ".filters"):
        assert not page.locator(hidden).is_visible()
    assert page.locator("#table-accuracy table").is_visible()
    assert page.locator("figure svg").first.is_visible()
    look = page.evaluate(LOOK)
    assert brightness(look["paper"]) > 250
    assert brightness(look["ink"]) < 80


def test_phones_have_no_sideways_scrolling(page_file: Path, visit: Visit) -> None:
    page = visit(page_file)
    for width in (320, 390, 768):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator(".images tr[data-place]").first.click()
        assert page.locator("#image").evaluate("(dialog) => dialog.scrollWidth <= dialog.clientWidth + 1")
        page.locator("#image .close").click()


def test_the_policy_blocks_what_it_should(page_file: Path, browser: Any, tmp_path: Path) -> None:
    """The other tests see no request; this one sees that a request could not be made."""
    text = page_file.read_text(encoding="utf-8")
    evil = '<img src="figures/accuracy.png"><script>document.title = "owned"</script><p id="p" style="color: red"></p>'
    (tmp_path / "index.html").write_text(text.replace("<footer>", evil + "<footer>"), encoding="utf-8")
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto((tmp_path / "index.html").as_uri())
    assert page.title() != "owned"
    assert page.evaluate("getComputedStyle(document.getElementById('p')).color") != "rgb(255, 0, 0)"
    assert len([line for line in complaints if "Content Security Policy" in line]) == 3
    page.close()
