"""The page at / with a real server process and a real browser: by mouse, by keyboard, on a phone."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serve_client import KEYS, png

HOSTILE = "<img src=x onerror=alert(1)>"
Visit = Callable[..., Any]


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Open a server's page; errors in the console and requests to other origins fail the test at its end.

    ``refusals`` are texts of errors that a test provokes: browsers log every failed request.
    """
    contexts, complaints, requests, origins = [], [], [], set()

    def open_page(url: str, *, path: str = "/", refusals: tuple[str, ...] = (), **options: Any) -> Any:
        def on_message(message: Any) -> None:
            if message.type in ("error", "warning") and not any(text in message.text for text in refusals):
                complaints.append(message.text)

        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(120_000)
        contexts.append(context)
        origins.add(url)
        page = context.new_page()
        page.on("console", on_message)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"alert {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url + path)
        page.locator("#page:visible, #key-field:visible").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    elsewhere = [url for url in requests if not url.startswith(("data:", "blob:", *(f"{each}/" for each in origins)))]
    assert elsewhere == []


def upload(page: Any, *photos: bytes) -> None:
    files = [{"name": f"photo{i}.png", "mimeType": "image/png", "buffer": photo} for i, photo in enumerate(photos)]
    page.set_input_files("#file", files)


def wait_for(page: Any, text: str) -> str:
    """The sentence about the answers, once it holds a text and nothing is under way."""
    page.locator("#verdict", has_text=text).wait_for()
    page.locator("#results:not([aria-busy])").wait_for()
    return str(page.inner_text("#verdict"))


def open_with(visit: Visit, url: str, *photos: bytes, **options: Any) -> Any:
    """The page of a server with a demo, with the clean answers for the first photo."""
    page = visit(url, **options)
    upload(page, *photos)
    wait_for(page, "Not attacked")
    return page


def bars(page: Any, kind: str) -> list[str]:
    return [str(text) for text in page.locator(f"#answers .{kind} li span:first-child").all_inner_texts()]


def points(page: Any) -> list[str]:
    return [str(text) for text in page.locator("#points tbody th").all_text_contents()]


DISPATCH = """([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const options = { bubbles: true, clipboardData: transfer, dataTransfer: transfer };
  const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
  document.getElementById("drop").dispatchEvent(event);
}"""


# ---------------------------------------------------------------------- photos, labels, attacks


def test_a_chosen_photo_is_answered_twice(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = visit(server.url)
    assert page.locator("#results").is_hidden()
    upload(page, photos[0])
    sentence = wait_for(page, "Not attacked")
    answered = server.client.post("/v1/demo/attack", data={"eps": "0"}, files={"images": photos[0]}).json()["clean"]
    assert bars(page, "plain") == [answer["label"] for answer in answered["plain"]]
    assert bars(page, "defended") == [answer["label"] for answer in answered["defended"]]
    assert f"plain CLIP says {answered['plain'][0]['label']}" in sentence
    assert f"{100 * answered['defended'][0]['probability']:.1f} %" in page.inner_text("#answers .defended")
    gate = page.inner_text("#gate")
    assert gate.startswith("The gate opened" if answered["diagnostics"]["gated"] else "The gate stayed closed")
    assert f"{answered['diagnostics']['score']:.3f}" in gate
    assert "τ 1.48" in gate
    names = [svg.get_attribute("aria-label") for svg in page.locator("#scales svg").all()]
    assert any(name.startswith("score is") and name.endswith("threshold tau 1.48") for name in names)
    assert page.locator("#strip li").inner_text() == answered["defended"][0]["label"]
    assert "These attacks do not know the defence. An attacker who does can defeat it." in page.inner_text("#attack")


def test_photos_can_be_dropped_and_pasted(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = open_with(visit, server.url, photos[0])
    for count, kind in enumerate(("drop", "paste"), 1):
        page.evaluate(DISPATCH, [kind, base64.b64encode(photos[count]).decode()])
        page.locator("#strip img").nth(count).wait_for()
        wait_for(page, "Not attacked")


def test_a_file_that_is_no_photo_shows_the_servers_line(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = visit(server.url, refusals=("status of 422",))
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no photo"})
    page.locator("#status .error").wait_for()
    assert page.inner_text("#status").startswith("notes.txt is not an image we read; convert it")
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    upload(page, photos[0])
    wait_for(page, "Not attacked")
    assert page.inner_text("#status") == ""


def test_labels_are_chips_and_a_hostile_one_stays_text(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = visit(server.url)
    assert page.text_content("#preset .names") == "cat, dog, teapot"
    upload(page, photos[0])
    field = page.get_by_label("Names to choose from")
    field.press_sequentially("boat,")
    page.locator("#status", has_text="Add another label").wait_for()
    field.press_sequentially(HOSTILE + ", boat, zebra")
    field.press("Enter")
    wait_for(page, "Not attacked")
    assert page.locator("#chips li span").all_inner_texts() == ["boat", HOSTILE, "zebra"]
    assert sorted(bars(page, "plain")) == sorted(["boat", HOSTILE, "zebra"])
    assert page.locator("img[src=x]").count() == 0
    page.click("#clear")
    page.locator("#answers .plain li", has_text="teapot").wait_for()


def test_the_slider_attacks_by_keyboard_and_remembers(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = visit(server.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    upload(page, photos[1])
    wait_for(page, "Not attacked")
    slider = page.get_by_role("slider", name="Largest change of a pixel")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    wait_for(page, "Attacked with 1.5/255")
    assert slider.get_attribute("aria-valuetext") == "1.5 of 255"
    assert len(asked) == 2, "three quick steps are one request"
    pictures = [picture.get_attribute("src") for picture in page.locator("#pictures img").all()]
    assert len(set(pictures)) == 3
    page.keyboard.press("End")
    wait_for(page, "Attacked with 16/255")
    answer = server.client.post("/v1/demo/attack", data={"eps": "16"}, files={"images": photos[1]}).json()
    assert bars(page, "plain") == [each["label"] for each in answer["attacked"]["plain"]]
    page.keyboard.press("Home")
    wait_for(page, "Not attacked")
    assert len(asked) == 3, "what was asked once is remembered"


def test_a_sweep_can_be_cancelled_and_fills_the_chart(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = open_with(visit, server.url, photos[1])
    held: list[Any] = []
    page.route("**/v1/demo/attack", lambda route: held.append(route))
    page.click("#sweep")
    page.locator("#status", has_text="Attacking with 1/255, 2 of 6").wait_for()
    page.get_by_role("button", name="Cancel the sweep").click()
    assert points(page) == ["0/255"]
    held[0].abort()
    page.unroute("**/v1/demo/attack")
    page.get_by_role("button", name="Run the whole sweep").click()
    wait_for(page, "Attacked with 16/255")
    page.locator("#progress").wait_for(state="hidden")
    assert points(page) == [f"{eps}/255" for eps in (0, 1, 2, 4, 8, 16)]
    label = page.get_attribute("#chart svg", "aria-label")
    assert label.startswith("Line chart of 6 strengths; at 16/255 plain CLIP gives")


def test_a_sample_shows_the_point_in_one_click(server: Any, pair: Any, visit: Visit) -> None:
    page = visit(server.url)
    page.get_by_role("button", name="cat").click()
    wait_for(page, "Attacked with 4/255")
    assert page.locator("#empty").is_hidden()
    assert points(page) == ["0/255", "4/255"]
    assert [page.input_value("#eps"), page.locator("#strip img").get_attribute("alt")] == ["4", "cat.jpg"]
    page.click("#remove")
    page.get_by_label("Attack it at once").uncheck()
    page.get_by_role("button", name="rocket").click()
    wait_for(page, "Not attacked")
    plain = visit(pair.url, refusals=("status of 401",))
    plain.get_by_label("API key of this server").fill(KEYS[0])
    plain.get_by_role("button", name="Use this key").click()
    plain.get_by_role("button", name="coffee").click()
    wait_for(plain, "Defended CLIP says")
    assert plain.locator("#switch").is_hidden()


# ---------------------------------------------------------------------- the routes


def test_examples_of_all_routes_run(server: Any, visit: Visit) -> None:
    page = visit(server.url, path="/docs", refusals=("status of 422",))
    page.locator("#routes section").first.wait_for()
    names = [card.get_attribute("aria-label") for card in page.locator("#routes section").all()]
    routes = server.client.get("/openapi.json").json()["paths"]
    assert names == [f"{method.upper()} {path}" for path, methods in routes.items() for method in methods]
    assert {"POST /v1/classify", "POST /v1/embeddings", "POST /v1/demo/attack", "GET /metrics"} <= set(names)
    for name in names:
        page.get_by_role("button", name=f"Run {name}", exact=True).click()
        page.get_by_label(f"Answer of {name}", exact=True).get_by_text("200 OK").wait_for()
    body = page.get_by_label("Body of POST /v1/classify", exact=True)
    body.fill('{"images": []}')
    page.get_by_role("button", name="Run POST /v1/classify", exact=True).click()
    page.get_by_text("at least 1 item").wait_for()


# ---------------------------------------------------------------------- other servers, busy or gone


def test_a_server_that_is_gone_or_busy_is_asked_again(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = visit(server.url, refusals=("ERR_INTERNET_DISCONNECTED", "status of 503"))
    page.context.set_offline(True)
    upload(page, photos[0])
    page.locator("#status", has_text="cannot be reached").wait_for()
    retry = page.get_by_role("button", name="Try again")
    assert retry.is_visible()
    error = json.dumps({"error": {"message": "the queue is full", "type": "overloaded", "field": None}})
    answer = {"status": 503, "headers": {"Retry-After": "1"}, "content_type": "application/json", "body": error}
    page.route("**/v1/demo/attack", lambda route: route.fulfill(**answer), times=2)
    page.context.set_offline(False)
    for attempt in (2, 3):
        line = f"The server is busy (the queue is full). Asking again in 1 s, try {attempt} of 6."
        page.locator("#status", has_text=line).wait_for()
    wait_for(page, "Not attacked")
    assert page.inner_text("#status") == ""
    assert retry.is_hidden()


def test_without_a_demo_the_page_says_what_is_missing(pair: Any, visit: Visit) -> None:
    """Also: an API key that stays in memory, and the gate of SecondLook."""
    page = visit(pair.url, refusals=("status of 401",))
    field = page.get_by_label("API key of this server")
    field.wait_for()
    assert page.evaluate("document.activeElement.id") == "key-field"
    assert page.locator("#page").is_hidden()
    field.fill("not-the-key-but-as-long-as-one")
    field.press("Enter")
    page.locator("#status", has_text="the API key is unknown").wait_for()
    field.fill(KEYS[0])
    page.get_by_role("button", name="Use this key").click()
    page.locator("#page").wait_for()
    assert field.is_hidden()
    assert "defended by second_look" in page.inner_text("#about")
    upload(page, png(0))
    wait_for(page, "Defended CLIP says")
    assert "score = " in page.inner_text("#gate")
    names = [svg.get_attribute("aria-label") for svg in page.locator("#scales svg").all()]
    assert {name.split(" is ")[0] for name in names} >= {"drift", "score", "passes"}
    assert "--demo" in page.inner_text("#comparison")
    for hidden in ("#attack", "#course", "#answers .plain"):
        assert page.locator(hidden).is_hidden()
    assert page.locator("#pictures img").count() == 1
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0


# ---------------------------------------------------------------------- accessibility


def test_a_phone_shows_the_result_and_nothing_overflows(server: Any, visit: Visit) -> None:
    page = visit(server.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.get_by_role("button", name="coffee").tap()
    wait_for(page, "Attacked with 4/255")
    for place in ("#drop", "#attack", "#answers", "#course"):
        page.locator(place).evaluate("(element) => element.scrollIntoView()")
        box = page.locator("#verdict").bounding_box()
        assert box["y"] >= 0, place
        assert box["y"] + box["height"] <= 740, place
    order = [page.locator(each).bounding_box()["y"] for each in ("#drop", "#attack", "#answers", "#labels")]
    assert order == sorted(order), "the answers come before the labels"
    field = page.get_by_label("Names to choose from")
    field.fill("a label with many words in it, Donaudampfschifffahrtselektrizitaetenhauptbetriebswerk" + ", x" * 9)
    field.press("Enter")
    wait_for(page, "Not attacked")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    rights = "[...document.querySelectorAll('main *')].map((each) => each.getBoundingClientRect().right)"
    assert max(page.evaluate(rights)) <= 360


def test_dark_and_light_differ_and_can_be_switched(server: Any, visit: Visit) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(server.url, color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(paper) != dark.evaluate(paper)
    light.get_by_role("button", name="Dark").click()
    assert light.evaluate(paper) == dark.evaluate(paper)
    assert light.locator("#theme").inner_text() == "Light"


UNNAMED = """() => [
  ...[...document.querySelectorAll("input")].filter((each) => !each.labels.length),
  ...[...document.querySelectorAll("button, label, summary")].filter((each) =>
    !(each.ariaLabel || each.textContent.trim())),
  ...[...document.querySelectorAll("img")].filter((each) => !each.alt),
  ...[...document.querySelectorAll("svg")].filter((each) => !each.getAttribute("aria-label")),
  ...[...document.querySelectorAll("[aria-labelledby]")].filter((each) =>
    !document.getElementById(each.getAttribute("aria-labelledby"))),
].map((each) => each.outerHTML)"""


def test_everything_has_a_name(server: Any, visit: Visit, photos: list[bytes]) -> None:
    page = open_with(visit, server.url, photos[0])
    page.get_by_label("Names to choose from").fill("boat, zebra,")
    wait_for(page, "Not attacked")
    assert page.evaluate(UNNAMED) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1
