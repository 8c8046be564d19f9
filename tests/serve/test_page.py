"""The page in a real Chromium: two answers side by side, correct figures, usable by keyboard, on a phone, in the dark.

Screenshots are saved in the folder DEPTHDECAY_SCREENSHOTS, or else in pytest's temporary one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
playwright = pytest.importorskip("playwright.sync_api")

from serving import Running, running, tiny_engine, until  # noqa: E402
from tiny_models import LAYERS  # noqa: E402

from depthdecay import Engine, Plan  # noqa: E402
from depthdecay.batching.batcher import BatchSettings  # noqa: E402
from depthdecay.model.load import load  # noqa: E402
from depthdecay.plan.file import EMBEDDED_PLAN  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 120_000
BATCH = BatchSettings(max_batch=4, cohort_seconds=0)
SOME_TEXT = (
    "The sky is blue because air scatters short waves of light far more than long ones.\n\n"
    "Sunlight holds all colours. On its way through the air, blue light is scattered in every direction, so it "
    "reaches the eye from all over the sky. Red light passes almost straight through.\n\n"
    "In the evening the way through the air is longer. Most of the blue light is scattered away before it arrives, "
    "and what is left of sunlight is red and orange."
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = tiny_engine(tmp_path_factory.mktemp("model"), Plan.decay(LAYERS, "0.98"))
    with running(engine, BATCH) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport=DESKTOP)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, server.url)
    yield page
    page.close()
    assert not wrong
    assert all(url.startswith((server.url, "data:")) for url in asked)  # no requests to other hosts


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("DEPTHDECAY_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"screenshots of the page: {folder}")
    return folder


def opened(page: Any, url: str) -> None:
    page.goto(url)
    tells(page, "#model", "layers")


def tells(page: Any, selector: str, text: str) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)


def finished(page: Any) -> str:
    """The page's final message."""
    page.wait_for_selector("#said[data-kind=done]", timeout=PATIENCE_MS)
    return str(page.text_content("#said"))


def ask(page: Any) -> str:
    page.click("#ask")
    return finished(page)


def depths(page: Any, side: str) -> list[int]:
    return [
        int(depth) for depth in page.eval_on_selector_all(f"#{side} .text span", "all => all.map(s => s.dataset.depth)")
    ]


def figures(page: Any, side: str) -> dict[str, str]:
    pairs = "all => all.map(pair => [...pair.children].map(cell => cell.textContent))"
    return dict(page.eval_on_selector_all(f"#{side} dl > div", pairs))


def streams_of(page: Any) -> dict[str, list[dict[str, Any]]]:
    """The server's depth figures, by mode, once the answers are complete."""
    streams: dict[str, list[dict[str, Any]]] = {}

    def read(request: Any) -> None:
        if request.method == "POST":
            mode = json.loads(request.post_data)["depth_decay"]["mode"]
            events = request.response().text().strip().split("\n\n")[1:-1]  # from the role to [DONE]
            streams[mode] = [json.loads(event.removeprefix("data: "))["depth_decay"] for event in events]

    page.on("requestfinished", read)
    return streams


# Fake answers instead of the server's.


def event(text: str, depth: int = LAYERS, **told: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], "depth_decay": {"depths": [depth], **told}}


def words(text: str) -> list[str]:
    """Token-like pieces, each with its preceding space."""
    return [piece for piece in text.replace("\n\n", "\n\n\0").replace(" ", "\0 ").split("\0") if piece]


def full_answer(pieces: Sequence[str]) -> list[dict[str, Any]]:
    events = [event(piece) for piece in pieces]
    events[-1]["depth_decay"] |= {"mode": "full", "num_layers": LAYERS}
    return events


def decay_answer(pieces: Sequence[str]) -> list[dict[str, Any]]:
    events = [event(piece, max(LAYERS // 2, LAYERS - place // 12)) for place, piece in enumerate(pieces)]
    events[-1]["depth_decay"] |= {"mode": "decay", "num_layers": LAYERS}
    return events


def lossless_answer(pieces: Sequence[str], drafts_a_pass: int = 3) -> list[dict[str, Any]]:
    """After the first token, every pass gives some drafts, by lookup or shallow layers, and a token of its own."""
    events = [event(pieces[0], draft_depths=[None], layer_passes=LAYERS)]
    passes, accepted, layers = 0, 0, LAYERS
    for first in range(1, len(pieces), drafts_a_pass + 1):
        tokens = pieces[first : first + drafts_a_pass + 1]
        drafted_by = 0 if passes % 2 else LAYERS // 2
        layers += LAYERS + drafted_by * (len(tokens) - 1)
        sources = [drafted_by] * (len(tokens) - 1) + [None]
        events += [
            event(token, draft_depths=[source], layer_passes=layers)
            for token, source in zip(tokens, sources, strict=True)
        ]
        passes, accepted = passes + 1, accepted + len(tokens) - 1
    account = {"mode": "lossless", "num_layers": LAYERS, "layers_executed": layers, "verifications": passes}
    events[-1]["depth_decay"] |= {**account, "drafted": accepted + 5, "accepted": accepted}
    return events


def fake(page: Any, answers: dict[str, list[dict[str, Any]]], a_frame: int = 1000, held: bool = False) -> None:
    """Fake answers by mode, `a_frame` events per frame; if `held`, the last event waits until the page releases it."""
    page.evaluate(
        """([answers, aFrame, held]) => {
        const real = window.fetch, frame = () => new Promise(requestAnimationFrame);
        window.asked = [];
        window.release = null;
        window.released = new Promise(done => { window.release = done; });
        window.fetch = async (url, options) => {
            if (!String(url).includes("completions")) return real(url, options);
            const asked = JSON.parse(options.body), events = answers[asked.depth_decay.mode], bytes = new TextEncoder();
            window.asked.push(asked);
            return new Response(new ReadableStream({async start(into) {
                options.signal.addEventListener("abort", () => into.error(new DOMException("aborted", "AbortError")));
                const line = event => `data: ${JSON.stringify(event)}\\n\\n`;
                const put = some => into.enqueue(bytes.encode(some.map(line).join("")));
                for (let from = 0; from < events.length - 1; from += aFrame) {
                    put(events.slice(from, Math.min(from + aFrame, events.length - 1)));
                    await frame();
                }
                if (held) await window.released;
                put(events.slice(-1));
                into.enqueue(bytes.encode("data: [DONE]\\n\\n"));
                into.close();
            }}));
        };
    }""",
        [answers, a_frame, held],
    )


def some_answers() -> dict[str, list[dict[str, Any]]]:
    pieces = words(SOME_TEXT)
    return {"full": full_answer(pieces), "decay": decay_answer(pieces), "lossless": lossless_answer(pieces)}


# What is shown.


def test_lossless_is_the_default_and_tells_what_it_gives(page: Any, server: Running) -> None:
    assert page.is_checked("#lossless")
    page.fill("#question", "hello there")
    page.fill("#tokens", "60")
    streams = streams_of(page)
    page.focus("#question")
    page.keyboard.press("Control+Enter")  # no mouse needed
    said = finished(page)
    full = server.engine.generate([[{"role": "user", "content": "hello there"}]], 60, mode="full", temperature=0)[0]
    assert page.text_content("#left .text") == page.text_content("#right .text") == full.text
    account = streams["lossless"][-1]
    assert account["drafted"] > 0  # a random model repeats itself
    told = figures(page, "right")
    assert told["drafts accepted"] == f"{account['accepted']} of {account['drafted']}"
    assert told["tokens/verification"] == f"{59 / account['verifications']:.2f}"
    rates = [float(figures(page, side)["tokens/s"]) for side in ("left", "right")]
    assert float(told["speed vs. full"].removesuffix("×")) == pytest.approx(rates[1] / rates[0], rel=0.02)
    assert f"The same answer at {told['speed vs. full']} the speed of full depth" in said
    assert f"{account['accepted']} of {account['drafted']} draft" in said
    assert "saved" not in page.text_content("body")
    assert page.get_attribute("#right", "aria-busy") == "false"


def test_decay_tells_what_was_asked_and_what_this_answer_got(page: Any, server: Running) -> None:
    page.click("label[for=decay]")
    page.fill("#question", "hello there")
    page.fill("#tokens", "60")
    assert page.text_content("#speedup-told") == "1.20× on average over 60 tokens"
    streams = streams_of(page)
    with page.expect_request(lambda request: '"decay"' in (request.post_data or "")) as sent:
        said = ask(page)
    asked = json.loads(sent.value.post_data)
    assert asked["depth_decay"] == {"mode": "decay", "speedup": 1.2, "over_tokens": 60, "depths": True}
    assert set(depths(page, "left")) == {LAYERS}
    shown = depths(page, "right")
    assert shown == sorted(shown, reverse=True)
    assert shown[-1] < LAYERS
    told = [depth for chunk in streams["decay"] for depth in chunk["depths"]]
    assert len(told) == 60
    got = f"{LAYERS * 60 / sum(told):.2f}×"
    assert figures(page, "right")["layer speed-up"] == got
    assert said == f"Requested a layer speed-up of 1.20× on average over 60 tokens; this answer of 60 reached {got}."


def test_an_answer_that_ends_early_is_told_as_such(page: Any) -> None:
    pieces = words(SOME_TEXT)[:30]
    decay = decay_answer(pieces)
    fake(page, {"full": full_answer(pieces), "decay": decay})
    page.click("label[for=decay]")
    said = ask(page)
    got = LAYERS * 30 / sum(event["depth_decay"]["depths"][0] for event in decay)
    assert "on average over 128 tokens" in page.text_content("#speedup-told")
    assert said.endswith(f"on average over 128 tokens; this answer that ended after 30 reached {got:.2f}×.")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"drafted": 0, "accepted": 0}, "nothing was drafted, so it ran as full depth"),
        ({}, "of 5 drafts accepted"),
    ],
)
def test_lossless_without_a_gain_says_so(page: Any, changed: dict[str, Any], said: str) -> None:
    lossless = lossless_answer(words(SOME_TEXT), 0)
    lossless[-1]["depth_decay"] |= changed
    fake(page, {"full": full_answer(words(SOME_TEXT)), "lossless": lossless})
    assert said in ask(page)
    assert figures(page, "right")["tokens/verification"] == "1.00"


def test_answers_that_differ_are_not_called_the_same(page: Any) -> None:
    fake(page, {"full": full_answer(["one", " two"]), "lossless": lossless_answer(["one", " too"])})
    assert "The answers differ" in ask(page)


def test_drafted_tokens_are_marked_in_the_text(page: Any) -> None:
    pieces = words(SOME_TEXT)
    fake(page, some_answers())
    ask(page)
    assert page.text_content("#right .text") == SOME_TEXT
    kinds = page.eval_on_selector_all("#right .text span", "all => all.map(s => [s.dataset.kind ?? '', s.title])")
    expected = [event["depth_decay"]["draft_depths"][0] for event in lossless_answer(pieces)]
    names = {None: "", 0: "lookup", LAYERS // 2: "layers"}
    by_piece = [
        names[source] for source, piece in zip(expected, pieces, strict=True) for _ in range(piece.count("\n") or 1)
    ]
    assert [kind for kind, _ in kinds] == by_piece
    assert f"drafted by {LAYERS // 2} of {LAYERS} layers, verified at full depth" in [title for _, title in kinds]
    assert not page.query_selector("#left .text [data-kind]")
    assert page.locator("#right .legend").inner_text().split("\n") == ["prompt lookup", "shallow layers"]
    lines = page.eval_on_selector_all(
        "#right .text [data-kind]:not(.blank)", "all => all.map(s => getComputedStyle(s).textDecorationStyle)"
    )
    assert set(lines) == {"solid", "dotted"}


def test_text_is_copied_as_it_was_said(page: Any) -> None:
    fake(page, some_answers())
    ask(page)
    copied = page.evaluate("""() => {
        const text = document.querySelector("#right .text"), clipboardData = new DataTransfer();
        getSelection().selectAllChildren(text);
        text.dispatchEvent(new ClipboardEvent("copy", {clipboardData, bubbles: true, cancelable: true}));
        return clipboardData.getData("text/plain");
    }""")
    assert copied == SOME_TEXT


# Settings, and when a question may be asked.


def test_the_slider_goes_as_far_as_the_server_does_for_so_many_tokens(page: Any) -> None:
    page.route(
        "**/v1/models",
        lambda route: route.fulfill(
            json={
                "data": [
                    {
                        "id": "tiny",
                        "depth_decay": {
                            "num_layers": LAYERS,
                            "chat": True,
                            "max_tokens": 500,
                            "max_speedup_over": {"16": 1.0, "64": 1.1, "256": 1.3},
                        },
                    }
                ]
            }
        ),
    )
    page.reload()
    tells(page, "#model", "layers")
    assert page.is_disabled("#speedup")  # lossless mode has no decay
    page.click("label[for=decay]")
    assert page.is_enabled("#speedup")
    assert page.text_content("#speedup-told") == "1.10× on average over 128 tokens"
    page.fill("#tokens", "300")
    assert page.text_content("#speedup-told") == "1.20× on average over 300 tokens"  # the value first chosen
    page.focus("#speedup")
    page.keyboard.press("End")
    assert page.text_content("#speedup-told") == "1.30× on average over 300 tokens"
    assert page.get_attribute("#speedup", "aria-valuetext") == page.text_content("#speedup-told")
    page.fill("#tokens", "20")
    assert page.is_disabled("#speedup")
    assert page.text_content("#speedup-told") == "no speed-up possible over 20 tokens"
    page.fill("#tokens", "501")
    assert "from 1 to 500" in page.text_content("#said")
    page.click("label[for=lossless]")
    page.fill("#tokens", "300")
    assert page.is_disabled("#speedup")


def test_the_most_that_the_card_promises_can_be_asked_for(page: Any, server: Running) -> None:
    page.click("label[for=decay]")
    for tokens in ("16", "40"):
        page.fill("#tokens", tokens)
        page.focus("#speedup")
        page.keyboard.press("End")
        assert f"on average over {tokens} tokens" in page.text_content("#speedup-told")
        assert "Requested a layer speed-up" in ask(page)


@pytest.mark.parametrize(
    ("selector", "value", "why"),
    [("#question", "   ", "question"), ("#tokens", "0", "Max tokens"), ("#tokens", "1.5", "Max tokens")],
)
def test_the_key_does_no_more_than_the_button(page: Any, selector: str, value: str, why: str) -> None:
    fake(page, some_answers())
    before = page.input_value(selector)
    page.fill(selector, value)
    assert page.is_disabled("#ask")
    tells(page, "#said", why)
    page.focus("#question")
    page.keyboard.press("Control+Enter")
    page.focus("#tokens")
    page.keyboard.press("Enter")
    assert page.evaluate("asked.length") == 0
    page.fill(selector, before)
    assert page.text_content("#said") == ""
    ask(page)
    assert page.evaluate("asked.length") == 2


def test_nothing_is_asked_while_answers_run(page: Any) -> None:
    fake(page, some_answers(), held=True)
    page.click("#ask")
    page.wait_for_selector("#left .text span")
    assert page.is_disabled("#ask")
    page.focus("#question")
    page.keyboard.press("Control+Enter")
    assert [asked["depth_decay"]["mode"] for asked in page.evaluate("asked")] == ["full"]  # the other one waits
    page.evaluate("release()")
    finished(page)
    assert [asked["depth_decay"]["mode"] for asked in page.evaluate("asked")] == ["full", "lossless"]
    assert page.is_enabled("#ask")


def test_both_answers_in_one_batch(page: Any) -> None:
    fake(page, some_answers(), held=True)
    page.select_option("#order", "together")
    page.click("#ask")
    page.wait_for_selector("#left .text span")
    page.wait_for_selector("#right .text span")
    page.evaluate("release()")
    assert "Both ran in one batch" in finished(page)


def test_stop_ends_both_answers(page: Any, server: Running) -> None:
    page.select_option("#order", "together")
    page.fill("#tokens", "220")
    page.click("#ask")
    page.wait_for_selector("#left .text span")
    page.click("#stop")
    tells(page, "#said", "Stopped")
    until(server.is_clean)


def test_the_key_is_asked_for_and_its_error_goes_with_the_right_one(server: Running, browser: Any) -> None:
    with running(server.engine, BATCH, api_key="open sesame") as locked:
        page = browser.new_page(viewport=DESKTOP)
        page.goto(locked.url)
        tells(page, "#said[data-kind=wrong]", "the API key is missing or wrong")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        tells(page, "#said[data-kind=wrong]", "the API key is missing or wrong")
        page.fill("#key", "open sesame")
        page.press("#key", "Tab")
        tells(page, "#model", "tiny")
        assert page.text_content("#said") == ""
        page.reload()
        tells(page, "#said[data-kind=wrong]", "the API key is missing or wrong")
        page.fill("#key", "open sesame")
        page.fill("#tokens", "5")
        page.click("#ask")  # at once
        assert "The same answer" in finished(page)
        page.close()


def test_text_is_never_markup(page: Any) -> None:
    """An answer's text is shown, never run as markup."""
    said = "<img src=x onerror=alert(1)><b>hi</b>"
    fake(page, {"full": full_answer([said]), "lossless": lossless_answer([said])})
    ask(page)
    assert page.text_content("#left .text") == said
    assert page.query_selector("#left .text img, #left .text b") is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('data: {"error":{"message":"the server was stopped"}}\n\n', "the server was stopped"),
        ('data: {"choices":[]}\n\n', "the stream ended early"),
    ],
)
def test_an_error_is_told(page: Any, body: str, told: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.click("#ask")
    tells(page, "#said[data-kind=wrong]", told)
    assert page.is_enabled("#ask")


# Work per token.

COUNT_WORK = """() => {
    window.work = {nodes: 0, removed: 0, draws: 0};
    window.marks = [];
    new MutationObserver(changes => {
        for (const change of changes) {
            window.work.nodes += change.addedNodes.length || 1;
            if (change.target.closest?.(".text")) window.work.removed += change.removedNodes.length;
        }
        const tokens = document.querySelectorAll("#right .text span").length;
        if (tokens >= 1000 * (window.marks.length + 1)) window.marks.push({...window.work, ms: performance.now()});
    }).observe($("right"), {childList: true, subtree: true, attributes: true, characterData: true});
    const fill = CanvasRenderingContext2D.prototype.fillRect, right = document.querySelector("#right canvas");
    CanvasRenderingContext2D.prototype.fillRect = function (...box) {
        window.work.draws += this.canvas === right;
        fill.apply(this, box);
    };
}"""


def test_a_token_is_as_much_work_late_as_early(page: Any) -> None:
    tokens = 4000
    pieces = [f" word{place % 97}" + (".\n" if place % 50 == 49 else "") for place in range(tokens)]
    fake(page, {"full": full_answer(["short"]), "lossless": lossless_answer(pieces)}, a_frame=25)
    page.evaluate(COUNT_WORK)
    ask(page)
    marks = [{"nodes": 0, "removed": 0, "draws": 0}, *page.evaluate("marks")]
    assert len(marks) == 5
    assert page.locator("#right .text span").count() == tokens
    nodes = [after["nodes"] - before["nodes"] for before, after in pairwise(marks)]
    print("nodes touched per thousand tokens:", nodes)
    ms = [round(after["ms"] - before["ms"]) for before, after in pairwise(marks[1:])]
    print("ms per thousand tokens, 25 per frame:", ms)
    assert marks[-1]["removed"] == 0  # nothing already shown is rebuilt
    assert max(nodes[1:]) <= 1.2 * nodes[0] < 3 * 1000
    print("rectangles drawn:", [mark["draws"] for mark in marks])
    # A column is at most three rectangles. Scales double, so all redraws together are less than twice the tokens.
    assert marks[-1]["draws"] < 3 * (tokens + 2 * tokens) + 100


# Layout.


def box(page: Any, selector: str) -> dict[str, float]:
    found = page.locator(selector).bounding_box()
    assert found is not None, selector
    return dict(found)


def test_nothing_moves_while_text_comes_and_all_is_in_line(page: Any) -> None:
    fake(page, some_answers(), a_frame=3)
    tops = {box(page, f"#settings > :nth-child({place}) > :first-child")["y"] for place in (2, 3, 4)}
    tops.add(box(page, "#settings legend")["y"])
    assert len(tops) == 1
    controls = {box(page, selector)["y"] for selector in (".choices", "#speedup", "#tokens", "#order")}
    assert len(controls) == 1
    places = ["#left canvas", "#right canvas", "#left dl", "#right dl", "#right .positions"]
    before = [box(page, place) for place in places]
    ask(page)
    assert [box(page, place) for place in places] == before
    assert before[0]["y"] == before[1]["y"]
    cells = page.eval_on_selector_all("#right dl > div", "all => all.map(c => [c.offsetLeft, c.offsetTop])")
    assert len(cells) == 6
    assert [len(set(axis)) for axis in zip(*cells, strict=True)] == [3, 2]
    assert page.evaluate("document.documentElement.scrollHeight") <= DESKTOP["height"]


def axis(page: Any, side: str, name: str) -> list[str]:
    return list(page.eval_on_selector_all(f"#{side} .{name} span", "all => all.map(s => s.textContent)"))


def test_the_curve_has_fixed_axes_that_grow_in_steps_for_both(page: Any) -> None:
    assert axis(page, "left", "depths") == [str(LAYERS), str(LAYERS // 2), "0"]
    assert axis(page, "left", "positions") == ["0", "32", "token 64"]
    short, long = words(SOME_TEXT)[:20], words(SOME_TEXT)[:65]
    fake(page, {"full": full_answer(short), "lossless": lossless_answer(long)})
    ask(page)
    assert axis(page, "left", "positions") == axis(page, "right", "positions") == ["0", "64", "token 128"]
    assert axis(page, "right", "depths") == [str(LAYERS), str(LAYERS // 2), "0"]
    label = page.get_attribute("#right canvas", "aria-label")
    layers = lossless_answer(long)[-1]["depth_decay"]["layer_passes"]
    assert label == f"Layers run for each of 65 tokens: {layers / 65:.1f} of {LAYERS} on average"


PIXEL = """([x, y]) => {
    const canvas = document.querySelector("#right canvas");
    return [...canvas.getContext("2d").getImageData(x * canvas.width, y * canvas.height, 1, 1).data].join();
}"""


def test_the_curve_is_drawn_to_scale_and_anew_in_the_dark(page: Any) -> None:
    pieces = words(SOME_TEXT)[:64]
    fake(page, {"full": full_answer(pieces), "decay": decay_answer(pieces)})
    page.click("label[for=decay]")
    ask(page)
    # Tokens 48 to 59 run half of the layers; the full height is 1.2 times all layers.
    above, below = [0.85, 1 - 0.54 / 1.2], [0.85, 1 - 0.46 / 1.2]
    assert page.evaluate(PIXEL, above) == "0,0,0,0"
    light = page.evaluate(PIXEL, below)
    assert light != "0,0,0,0"
    page.emulate_media(color_scheme="dark")
    until(lambda: page.evaluate(PIXEL, below) not in (light, "0,0,0,0"))
    assert page.evaluate(PIXEL, above) == "0,0,0,0"


@pytest.mark.parametrize("mode", ["lossless", "decay"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_pictures(browser: Any, server: Running, pictures: Path, size: str, scheme: str, mode: str) -> None:
    viewport = PHONE if size == "phone" else DESKTOP
    page = browser.new_page(viewport=viewport, color_scheme=scheme, device_scale_factor=2 if size == "phone" else 1)
    opened(page, server.url)
    fake(page, some_answers())
    page.click(f"label[for={mode}]")
    ask(page)
    until(lambda: page.evaluate("document.querySelector('#right dl').getBoundingClientRect().bottom <= innerHeight"))
    page.screenshot(path=pictures / f"{size}-{scheme}-{mode}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    back, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = sum(map(int, back[4:-1].split(","))) > sum(map(int, ink[4:-1].split(",")))
    assert light == (scheme == "light")
    page.close()


def test_a_phone_shows_both_answers_on_one_screen(browser: Any, server: Running) -> None:
    page = browser.new_page(viewport=PHONE)
    opened(page, server.url)
    fake(page, some_answers(), held=True)
    page.select_option("#order", "together", force=True)
    assert not page.is_visible("#tokens")
    page.click("#more")
    assert page.get_attribute("#more", "aria-expanded") == "true"
    assert page.is_visible("#tokens")
    page.click("#ask")
    page.wait_for_selector("#right .text span")
    for selector in ("#stop", "#left .text", "#left canvas", "#left dl", "#right .text", "#right canvas", "#right dl"):
        place = box(page, selector)
        assert place["y"] >= 0, selector
        assert place["y"] + place["height"] <= PHONE["height"], selector
    assert page.evaluate("document.activeElement !== document.querySelector('#question')")  # the keyboard closes
    page.evaluate("release()")
    finished(page)
    page.close()


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_a_small_phone_goes_to_the_answers(browser: Any, server: Running, motion: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640}, reduced_motion=motion)
    opened(page, server.url)
    fake(page, some_answers())
    page.evaluate("""() => {
        const go = Element.prototype.scrollIntoView;
        Element.prototype.scrollIntoView = function (how) { window.went = how.behavior; go.call(this, how); };
    }""")
    ask(page)
    assert page.evaluate("went") == ("instant" if motion == "reduce" else "smooth")
    until(lambda: page.evaluate("document.querySelector('#right .text').getBoundingClientRect().bottom <= innerHeight"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()


CONTRASTS = """([of, ...selectors]) => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const paint = colours => {
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => rgb.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    return selectors.map(selector => {
        const element = document.querySelector(selector), behind = [];
        for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
        const [a, b] = [light(paint(behind)), light(paint([...behind, getComputedStyle(element)[of]]))];
        return [selector, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)];
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(page: Any, scheme: str) -> None:
    """WCAG contrast: 4.5 for text, 3 for the outlines of controls."""
    page.emulate_media(color_scheme=scheme)
    fake(page, some_answers())
    page.click("label[for=decay]")
    ask(page)
    texts = [
        "h1", "#model", "a", ".title", "#said", "#ask", "label[for=decay]", "label[for=lossless]", "#speedup-told",
        "dt", "dd", ".legend", "figcaption", ".positions", "#right [data-kind=decay]:last-child",
    ]  # fmt: skip
    assert min(page.evaluate(CONTRASTS, ["color", *texts]), key=lambda found: found[1])[1] >= 4.5
    edges = page.evaluate(CONTRASTS, ["borderTopColor", "#question", ".choices", "#tokens", "#order"])
    assert min(edges, key=lambda found: found[1])[1] >= 3


def test_every_control_has_a_name_and_the_keyboard_reaches_it(page: Any) -> None:
    page.click("label[for=decay]")
    for control in page.query_selector_all("textarea, input, select, button"):
        name = control.evaluate("c => c.labels && c.labels.length ? c.labels[0].textContent : c.textContent")
        assert name.strip()
    page.focus("#question")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached == ["decay", "speedup", "tokens", "order", "ask", ""]  # then the first answer
    page.focus("#decay")
    page.keyboard.press("ArrowLeft")
    assert page.is_checked("#lossless")


# With the real model.


@pytest.fixture(scope="module")
def embedded(converted_cache: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPTHDECAY_CACHE", str(converted_cache))
        loaded = load(device="cpu")
        engine = Engine(loaded.model, loaded.tokenizer, Plan.load(EMBEDDED_PLAN))
        with running(engine, BATCH, model_name=loaded.shown_name) as server:
            yield server


def test_the_embedded_model_gives_the_same_answer(embedded: Running, browser: Any, pictures: Path) -> None:
    page = browser.new_page(viewport=DESKTOP)
    opened(page, embedded.url)
    page.fill("#question", "Repeat five times: the quick brown fox jumps over the lazy dog.")
    page.fill("#tokens", "40")
    assert "The same answer" in ask(page)
    kept, drafted = map(int, figures(page, "right")["drafts accepted"].split(" of "))
    assert 0 < kept <= drafted
    assert page.locator("#right .text [data-kind=lookup]").count() > 0
    page.screenshot(path=pictures / "embedded.png")
    page.close()
