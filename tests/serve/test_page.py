"""The page in a real Chromium: two answers side by side, every token with its depth, and nothing of it markup."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
playwright = pytest.importorskip("playwright.sync_api")

from serving import Running, running, tiny_engine, until  # noqa: E402
from tiny_models import LAYERS  # noqa: E402

from depthdecay import Plan  # noqa: E402
from depthdecay.batching.batcher import BatchSettings  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = tiny_engine(tmp_path_factory.mktemp("model"), Plan.decay(LAYERS, "0.98"))
    with running(engine, BatchSettings(max_batch=4, cohort_seconds=0)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    tells(page, "#model", "layers")
    yield page
    page.close()
    assert not wrong
    assert all(url.startswith((server.url, "data:")) for url in asked)  # nothing from anywhere else


def tells(page: Any, selector: str, text: str) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=60_000)


def finished(page: Any) -> None:
    tells(page, "#said", "Finished")


def depths(page: Any, side: str) -> list[int]:
    return [
        int(depth) for depth in page.eval_on_selector_all(f"#{side} .text span", "all => all.map(s => s.dataset.depth)")
    ]


def test_two_answers_with_their_depths(page: Any, server: Running) -> None:
    page.fill("#question", "hello there")
    page.fill("#tokens", "60")
    page.focus("#question")
    page.keyboard.press("Control+Enter")  # no mouse is needed
    finished(page)
    assert set(depths(page, "left")) == {LAYERS}
    right = depths(page, "right")
    assert right == sorted(right, reverse=True)
    assert right[-1] < LAYERS
    full = server.engine.generate([[{"role": "user", "content": "hello there"}]], 60, mode="full", temperature=0)[0]
    assert page.text_content("#left .text") == full.text
    figures = page.text_content("#right dl")
    assert "tokens/s" in figures
    assert "layers saved" in figures
    points = page.get_attribute("#right polyline", "points").split()
    assert len(points) == 60
    assert page.get_attribute("#right", "aria-busy") == "false"


def test_the_slider_decides_the_speed_up_and_lossless_is_full_depth(page: Any) -> None:
    page.focus("#speedup")
    page.keyboard.press("End")
    assert page.text_content("#speedup-told") == f"{float(page.get_attribute('#speedup', 'max')):.2f}×"
    page.fill("#tokens", "30")
    page.select_option("#mode", "lossless")
    page.click("#ask")
    finished(page)
    assert page.text_content("#right .text") == page.text_content("#left .text")
    assert set(depths(page, "right")) == {LAYERS}


def test_stop_ends_both_answers(page: Any, server: Running) -> None:
    page.fill("#tokens", "220")
    page.click("#ask")
    page.wait_for_selector("#left .text span")
    page.click("#stop")
    tells(page, "#said", "stopped")
    until(server.is_clean)


def test_text_is_never_markup(page: Any) -> None:
    """Whatever an answer says is shown, not run."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body='data: {"choices":[{"index":0,"delta":{"content":"<img src=x onerror=alert(1)><b>hi</b>"}}],'
            '"depth_decay":{"depths":[8]}}\n\ndata: [DONE]\n\n',
        ),
    )
    page.click("#ask")
    finished(page)
    assert page.text_content("#left .text") == "<img src=x onerror=alert(1)><b>hi</b>"
    assert page.query_selector("#left .text img, #left .text b") is None


def test_an_error_is_told(page: Any) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body='data: {"error":{"message":"the server was stopped"}}\n\n'
        ),
    )
    page.click("#ask")
    tells(page, "#said.wrong", "the server was stopped")
    assert page.is_enabled("#ask")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, server: Running, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.goto(server.url)
    page.fill("#tokens", "10")
    page.click("#ask")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    back, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = sum(map(int, back[4:-1].split(","))) > sum(map(int, ink[4:-1].split(",")))
    assert light == (scheme == "light")
    page.close()


def test_every_control_has_a_name(page: Any) -> None:
    for control in page.query_selector_all("textarea, input, select, button"):
        name = control.evaluate("c => c.labels && c.labels.length ? c.labels[0].textContent : c.textContent")
        assert name.strip()
