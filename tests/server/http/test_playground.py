"""The page at /: its files and headers, and in a headless Chromium what a reader does with it."""

import dataclasses
import re
import shutil
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playground_page import NARROW, PROMPT, TOKENS, WIDE, Page
from running import RunningServer, Wire
from texts import make_text

from memlm.client import Client
from memlm.index.store.datastore import Datastore
from memlm.server.http import app
from memlm.server.http.app import PLAYGROUND

BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
AXE = Path(__file__).parents[3] / "node_modules/axe-core/axe.min.js"
MAX_BYTES = 100_000
TABS = ("complete", "chat", "trace", "datastores", "about")


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver: install Debian's packages chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    page = Page(driver)
    page.resize(WIDE)
    yield page
    page.assert_quiet()


@pytest.fixture
def own_web(tmp_path: Path, model_folder: Path, own_store: Path) -> Iterator[RunningServer]:
    """A server whose datastore may be changed."""
    options = ("--threads", "1", "--http-port", "0", "--store-dir", str(tmp_path))
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server:
        yield server


# Without a browser


def test_the_files_are_few_and_fetch_nothing_from_elsewhere() -> None:
    files = [path for path in PLAYGROUND.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"\w+://|@import|url\(|(?<!\{)\bimport\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text), (
            path.name
        )
        assert not re.search(r"<style|\sstyle=|\son\w+=", text), path.name
        for module in re.findall(r'from "([^"]+)"', text):
            assert (PLAYGROUND / module).is_file(), module


@pytest.mark.parametrize("path", ["/", *sorted(f"/{path.name}" for path in PLAYGROUND.iterdir())])
def test_every_file_has_the_policy(web: RunningServer, path: str) -> None:
    with urllib.request.urlopen(web.http_url + path) as answer:
        policy = answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert policy == app.PLAYGROUND_HEADERS["content-security-policy"]


# In a browser


def test_a_text_streams_in_shaded_by_the_share_of_memory(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.complete()
    with Client(web.address) as client:
        tokens = list(client.generate(PROMPT, max_tokens=TOKENS, temperature=0, lam=0.5))
    shown = [token for token in tokens if token.text]
    assert page.texts(".token") == [token.text for token in shown]
    shares = page.js(
        "return [...document.querySelectorAll('.token')].map((each) => each.style.getPropertyValue('--share'))"
    )
    assert list(map(float, shares)) == pytest.approx([token.knn_share for token in shown], abs=2e-3)
    assert f"{TOKENS} tokens" in page.texts(".status")[0]
    assert not page.js("return document.querySelector('.chart').hidden")


def test_tokens_come_before_the_end(page: Page, narrow_web: RunningServer) -> None:
    page.open(narrow_web.http_url)
    page.begin(PROMPT, 20_000)
    page.until(lambda: len(page.all(".token")) > 3)
    assert page.texts(".pane .status") == [""]
    page.click("#run")  # which stops it
    page.until_ended()
    assert "stopped" in page.texts(".status")[0]


def test_the_tokens_a_step_are_shown_unless_drafts_are_off(page: Page, web: RunningServer) -> None:
    """Where the page leaves `drafts` open, the server may choose none, so the test sets 4 in place."""
    page.open(web.http_url)
    page.js("""
        const send = window.fetch;
        window.fetch = (path, options) => {
          if (options.body) window.sent = JSON.parse(options.body);
          return send(path, options.body ? {...options, body: JSON.stringify({drafts: 4, ...window.sent})} : options);
        };
    """)
    page.complete()
    assert page.js("return window.sent.drafts") is None
    assert "tokens a step" in page.texts(".status")[0]
    page.click("#drafts")
    page.complete()
    assert page.js("return window.sent.drafts") == 0
    assert "tokens a step" not in page.texts(".status")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shades_are_monotone_in_lightness_and_legible(page: Page, web: RunningServer, scheme: str) -> None:
    page.resize(WIDE, scheme)
    page.open(web.http_url)
    page.complete()
    colors = page.js("""
        const span = document.querySelector(".token");
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const rgb = (color) => {
          canvas.fillStyle = color;
          canvas.fillRect(0, 0, 1, 1);
          return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        const found = [rgb(getComputedStyle(span).color)];
        for (let share = 0; share <= 20; share += 1) {
          span.style.setProperty("--share", share / 20);
          found.push(rgb(getComputedStyle(span).backgroundColor));
        }
        return found;
    """)
    ink, *shades = map(luminance, colors)
    steps = [other - one for one, other in pairwise(shades)]
    assert all(step < 0 for step in steps) or all(step > 0 for step in steps)
    assert min((max(ink, shade) + 0.05) / (min(ink, shade) + 0.05) for shade in shades) >= 4.5


def luminance(color: list[int]) -> float:
    """The relative luminance of WCAG."""
    parts = [each / 255 for each in color[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_card_shows_the_figures_of_a_token(page: Page, web: RunningServer) -> None:
    from selenium.webdriver import ActionChains

    page.open(web.http_url)
    page.complete()
    with Client(web.address) as client:
        token = next(iter(client.generate(PROMPT, max_tokens=1, temperature=0, lam=0.5, top_logprobs=5)))
    assert not page.one("#card").is_displayed()
    ActionChains(page.driver).move_to_element(page.one(".token")).perform()
    page.until(lambda: page.one("#card").is_displayed())
    assert "λ 0.50" in page.one("#card").text
    rows = [row.split()[:2] for row in page.one("#card tbody").text.splitlines()]
    assert [name for name, _ in rows] == ["mixture", "model", "memory"]
    assert float(rows[0][1]) == pytest.approx(token.logprob, abs=0.011)
    assert float(rows[1][1]) == pytest.approx(token.lm_logprob, abs=0.011)
    assert len(page.all("#card li")) == len({each.text for each in token.top_logprobs})
    ActionChains(page.driver).move_to_element(page.one("h1")).perform()
    page.until(lambda: not page.one("#card").is_displayed())


def test_keys_walk_along_the_tokens(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.complete()
    assert page.js("return document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    page.js("document.querySelector('.token').focus()")
    page.driver.switch_to.active_element.send_keys("\ue014\ue014")  # right, right
    assert page.js("return [...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 2
    assert page.one("#card").is_displayed()
    page.driver.switch_to.active_element.send_keys("\ue007")  # Enter
    assert page.driver.switch_to.active_element.get_attribute("aria-pressed") == "true"
    page.driver.switch_to.active_element.send_keys("\ue00c")  # Escape
    assert not page.one("#card").is_displayed()


def pin_a_token_of_memory(page: Page) -> str:
    """Pins the first token with a share of a half or more, and returns its text."""
    page.js("""[...document.querySelectorAll(".token")]
        .find((each) => Number(each.style.getPropertyValue("--share")) >= 0.5 && each.textContent.trim()).click()""")
    return page.one('.token[aria-pressed="true"]').get_attribute("textContent")


def test_a_token_leads_to_its_passages_and_a_document_to_its_tokens(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.complete()
    text = pin_a_token_of_memory(page)
    assert page.texts(".pinned h3") == [text.replace(" ", "␣")]
    assert set(page.texts(".pinned strong")) == {text}
    names = page.texts(".pinned .document")
    assert names
    assert len(names) == len(set(names))  # grouped
    passages = page.texts(".pinned blockquote p")
    assert len(passages) == len(set(passages))  # folded
    # And from a document to its tokens.
    page.click(".documents .document")
    marked = page.all(".token.is-from")
    assert marked
    with Client(web.address) as client:
        options = {"max_tokens": TOKENS, "temperature": 0, "lam": 0.5, "neighbors": 8}
        tokens = list(client.generate(PROMPT, **options))
    document = page.texts('.documents [aria-pressed="true"]')[0]
    wanted = [
        token.text for token in tokens
        if any(n.token_id == token.id and n.document_id == document for n in token.neighbors) and token.knn_share > 0.1
    ]  # fmt: skip
    assert set(wanted) <= set(page.texts(".token.is-from"))
    page.click(".documents .document")
    assert not page.all(".token.is-from")


def test_the_model_alone_stands_beside_the_text(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.click("#side-by-side")
    page.complete(num_panes=2)
    assert page.texts(".pane-title") == ["With memory", "The model alone"]
    with Client(web.address) as client:
        alone = str(client.generate(PROMPT, max_tokens=TOKENS, temperature=0, use_store=False).result())
    assert "".join(page.texts(".pane:nth-child(2) .token")) == alone
    assert "0 % from memory" in page.texts(".status")[1]
    assert page.all(".pane:nth-child(2) .token.is-different")


def test_a_text_without_a_document_stands_beside_it(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.complete()
    before = page.texts(".token")
    page.click(".documents .document")
    name = page.texts('.documents [aria-pressed="true"]')[0]
    page.button("Without this document").click()
    page.until_ended(2)
    assert page.texts(".pane-title") == [f"Without {name}"]
    with Client(web.address) as client:
        options = {"max_tokens": TOKENS, "temperature": 0, "lam": 0.5, "neighbors": 8}
        without = list(client.generate(PROMPT, exclude_documents=[name], **options))
    assert page.texts(".pane:first-child .token") == before
    assert page.texts(".pane:nth-child(2) .token") == [token.text for token in without if token.text]
    assert page.texts(".pane:nth-child(2) .is-different")
    assert page.texts(".pane:first-child .is-different")
    count = len(page.texts(".pane:nth-child(2) .is-different"))
    assert re.search(r"\d+ tokens unlike “Completion”", page.texts(".status")[1])
    assert len({re.findall(r"seed \d+", each)[0] for each in page.texts(".status")[:2]}) == 1
    assert count <= TOKENS
    # From the second text, one more document goes, and the first text stays.
    page.click(".pane:nth-child(2) .token")
    page.until(lambda: name not in page.texts(".documents .document"))
    page.click(".documents .document")
    other = page.texts('.documents [aria-pressed="true"]')[0]
    page.button("Without this document").click()
    page.until(lambda: page.texts(".pane-title") == [f"Without {name} and {other}"])
    page.until_ended(2)
    page.click(".pane:nth-child(2) .token")
    page.until(lambda: page.texts(".documents .document"))
    assert not {name, other} & {*page.texts(".documents .document")}
    # And back.
    page.click(".pane:nth-child(2) .pane-head button")
    assert page.texts(".token") == before
    assert not page.all(".is-different, .is-comparison")
    assert page.driver.switch_to.active_element.get_attribute("id") == "run"
    assert name in page.texts(".documents .document")


def test_a_forgotten_document_is_gone_after_a_confirmation(page: Page, own_web: RunningServer) -> None:
    page.open(own_web.http_url)
    page.complete()
    page.click(".documents .document")
    name = page.texts('.documents [aria-pressed="true"]')[0]
    page.button("Forget…").click()
    page.button("Keep it").click()
    with Client(own_web.address) as client:
        assert client.datastores.get().num_deleted_documents == 0
        page.button("Forget…").click()
        page.button("Delete it").click()
        page.until(lambda: page.texts(".forgotten") or page.texts(".error"))
        page.until_ended(2)
        assert client.datastores.get().num_deleted_documents == 1
    assert page.texts(".pane-title")[-1] == f"After forgetting {name}"
    assert page.js("return document.querySelector('.status:last-child')") is not None


def test_a_lost_connection_is_said_and_the_text_goes_on(page: Page, narrow_web: RunningServer) -> None:
    wire = Wire(narrow_web.http_url.removeprefix("http://"))
    try:
        page.open(f"http://{wire.address}")
        page.begin(PROMPT, 20_000)
        page.until(lambda: len(page.all(".token")) > 3)
        wire.cut()
        page.until(lambda: page.texts(".pane .error"))
        assert page.texts(".pane .error") == ["The connection was lost."]
        count = len(page.all(".token"))
        page.button("Go on").click()
        page.until(lambda: page.texts(".pane .error") == ["The server cannot be reached."])
        wire.mend()
        page.button("Go on").click()
        page.until(lambda: len(page.all(".token")) > count)
        assert not page.texts(".pane .error")
        page.click("#run")
        page.until_ended()
    finally:
        wire.close()


def test_an_error_shows_the_servers_message(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.begin(PROMPT, 5, temperature=-1)
    page.until(lambda: page.texts(".pane .error"))
    assert page.texts(".pane .error") == ["temperature is -1; expected at least 0"]


def test_markup_of_a_text_stays_text(page: Page, web: RunningServer) -> None:
    page.open(web.http_url)
    page.complete("<img src=x onerror=alert(1)><b>the", 4)
    assert page.texts(".prompt") == ["<img src=x onerror=alert(1)><b>the"]
    assert not page.all(".text img, .text b")


def test_a_chat_is_shaded_too(page: Page, web: RunningServer) -> None:
    page.open(web.http_url, "chat")
    for name, value in {"temperature": 0, "max-tokens": 5, "lam": 0.5}.items():
        page.set(f"#{name}", value)
    page.one("#message").send_keys("the memory\ue007")  # Enter
    page.until_ended()
    with Client(web.address) as client:
        reply = client.chat([{"role": "user", "content": "the memory"}], max_tokens=5, temperature=0, lam=0.5).result()
    assert "".join(page.texts("#talk .token")) == reply.text
    assert page.texts(".documents .document")
    page.one("#message").send_keys("again\ue007")
    page.until_ended(2)
    # The first reply without a document stands beside it, and the second one stays as it was.
    before = page.texts("#talk .token")
    page.click("#talk .token")
    page.click(".documents .document")
    name = page.texts('.documents [aria-pressed="true"]')[0]
    page.button("Without this document").click()
    page.until_ended(3)
    assert page.texts(".pane-title") == [f"Without {name}"]
    options = {"max_tokens": 5, "temperature": 0, "lam": 0.5, "neighbors": 8, "exclude_documents": [name]}
    with Client(web.address) as client:
        without = list(client.chat([{"role": "user", "content": "the memory"}], **options))
    second = "#talk .pane:nth-child(2)"
    assert page.texts(f"{second} .token") == [token.text for token in without if token.text]
    assert page.texts("#talk .pane:first-child .token") == before
    assert page.texts(f"{second} .is-different")
    assert "unlike “Reply”" in page.texts(f"{second} .status")[0]
    assert len(page.all("#talk .is-comparison")) == 1
    assert page.texts("#send") == ["Send"]
    page.click(f"{second} .pane-head button")
    assert page.texts("#talk .token") == before
    assert not page.all(".is-different, .is-comparison")
    assert page.driver.switch_to.active_element.get_attribute("id") == "message"
    page.button("New conversation").click()
    assert not page.all("#talk > *")


def test_a_reply_shows_the_passages_that_it_was_asked_from(
    page: Page, tmp_path: Path, model_folder: Path, store_folder: Path
) -> None:
    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44")  # the context has no room for passages
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as web:
        page.open(web.http_url, "chat")
        for name, value in {"temperature": 0, "max-tokens": 5}.items():
            page.set(f"#{name}", value)
        page.one("#message").send_keys("the memory\ue007")  # Enter
        page.until_ended()
        with Client(web.address) as client:
            reply = client.chat("the memory", max_tokens=5, temperature=0).result()
            (passage,) = reply.accepted.prompt.passages
        assert "".join(page.texts("#talk .token")) == reply.text
        assert page.texts("#sources blockquote") == [passage.text]
        assert page.texts("#sources h4 .name") == [passage.title or passage.document_id]
        assert "from 1 passage" in page.texts("#talk .status")[0]
        page.button("Without this document").click()
        page.until_ended(2)
        assert page.texts(".pane-title") == [f"Without {passage.title or passage.document_id}"]
        page.button("New conversation").click()
        page.click("#passages")
        page.one("#message").send_keys("the memory\ue007")
        page.until_ended()
        assert "from memory" in page.texts("#talk .status")[0]


def test_a_reply_from_each_passage_by_itself_tells_the_share_of_each(
    page: Page, tmp_path: Path, model_folder: Path, store_folder: Path
) -> None:
    from selenium.webdriver import ActionChains

    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44")
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as web:
        page.open(web.http_url, "chat")
        for name, value in {"temperature": 0, "max-tokens": 5}.items():
            page.set(f"#{name}", value)
        page.click("#mixture")
        page.one("#message").send_keys("the memory\ue007")  # Enter
        page.until_ended()
        with Client(web.address) as client:
            answer = client.answer("the memory", mixture=True, max_tokens=5, temperature=0)
        assert "".join(page.texts("#talk .token")) == answer.text
        token = next(each for each in answer.completion.tokens if each.text)
        percents = [round(100 * share) for share in sorted(token.passage_shares, reverse=True)]
        percents.append(round(100 * (1 - sum(token.passage_shares))))
        assert sum(percents) == pytest.approx(100, abs=3)
        ActionChains(page.driver).move_to_element(page.one("#talk .token")).perform()
        page.until(lambda: page.one("#card").is_displayed())
        assert (
            figures(page.texts("#card li span:last-child")) == [each for each in percents[:-1] if each] + percents[-1:]
        )
        page.click("#talk .token")
        assert figures(page.texts(".pinned .figure")) == percents
        assert page.texts(".pinned .name")[-1] == "the model alone"
        shown = figures(page.texts("#sources h4 .figure"))
        assert shown == [round(100 * share) for share in sorted(answer.passage_shares, reverse=True)]
        best = answer.passages[answer.passage_shares.index(max(answer.passage_shares))]
        name = best.title or best.document_id
        assert page.texts("#sources h4 .name")[0] == name
        page.button("Without this document").click()
        page.until_ended(2)
        assert page.texts(".pane-title") == [f"Without {name}"]
        with Client(web.address) as client:
            options = {"max_tokens": 5, "temperature": 0, "exclude_documents": [best.document_id]}
            without = client.answer("the memory", mixture=True, **options)
        assert "".join(page.texts("#talk .pane:nth-child(2) .token")) == without.text


def figures(texts: list[str]) -> list[int]:
    """The numbers before the percent signs."""
    return [int(number) for text in texts for number in re.findall(r"(\d+) %", text)]


def test_a_trace_leads_to_documents(page: Page, web: RunningServer) -> None:
    page.open(web.http_url, "trace")
    text = f"🙂🙂 zzz {make_text(3, 40)} zzz"  # places are counted in characters, not in UTF-16
    page.set("#trace-text", text)
    page.one("#trace-text").send_keys("\ue009\ue007")  # Ctrl+Enter
    page.until(lambda: page.texts("#trace-status") != [""])
    with Client(web.address) as client:
        trace = client.trace(text)
    assert page.texts("#trace-output") == [text]
    shown = page.texts("#trace-output .span")  # of spans that overlap, the second begins where the first ends
    assert all(shown)
    assert all(span.text.endswith(part) for span, part in zip(trace.spans, shown, strict=True))
    page.js("document.querySelector('#trace-output .span:last-child').focus()")
    page.driver.switch_to.active_element.send_keys(" ")
    places = trace.spans[-1].places
    assert page.texts("#trace-places .name") == [place.title or place.document_id for place in places]


def test_texts_and_files_are_added_found_and_deleted(page: Page, own_web: RunningServer, tmp_path: Path) -> None:
    page.open(own_web.http_url, "datastores")
    page.one(".remember textarea").send_keys("zebras remember")
    page.one(".remember input").send_keys("note")
    page.one(".remember textarea").send_keys("\ue009\ue007")  # Ctrl+Enter
    page.until(lambda: page.texts(".work") == ["Added. 9 documents now."])
    page.until(lambda: page.texts(".store h2 .figure")[0].startswith("9 documents"))
    assert page.js("return document.activeElement.matches('.remember textarea')")  # whoever writes on loses no key
    file = tmp_path / "zebra.txt"
    file.write_text("zebras again", encoding="utf-8")
    page.one("input[type=file]").send_keys(str(file))
    page.until(lambda: page.texts(".work") == ["Added. 10 documents now."])
    page.one(".search input").send_keys("zebras again\ue007")
    page.until(lambda: page.texts(".found .name") == ["zebra.txt"])
    page.button("Forget…").click()
    page.button("Delete it").click()
    page.until(lambda: "deleted" in page.texts(".work")[0])
    with Client(own_web.address) as client:
        info = client.datastores.get()
    assert (info.num_documents, info.num_deleted_documents) == (9, 1)
    page.until(lambda: page.texts(".store h2 .figure")[0].startswith("9 documents"))
    file.write_bytes(b"\xff")
    page.one("input[type=file]").send_keys(str(file))
    page.until(lambda: page.texts(".store .error") == ["'zebra.txt' is not UTF-8 text; convert it"])


def drop(page: Page, css: str, *files: Path) -> None:
    """Drags files from the desktop over an element, and lets go of them."""
    page.js("arguments[0].scrollIntoView({block: 'center'})", page.one(css))
    rectangle = page.js("return arguments[0].getBoundingClientRect().toJSON()", page.one(css))
    place = {"x": rectangle["x"] + 20, "y": rectangle["y"] + 10}
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver"):
        page.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "data": data, **place})
    assert bool(page.all(".drop.is-over")) == (css == ".drop")
    page.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": "drop", "data": data, **place})


def test_files_are_dropped_into_a_datastore(page: Page, own_web: RunningServer, tmp_path: Path) -> None:
    files = [tmp_path / "dropped.txt", tmp_path / "more.jsonl"]
    files[0].write_text("zebras fell", encoding="utf-8")
    files[1].write_text('{"id": "one", "text": "zebras rise"}\n{"id": "two", "text": "more"}\n', encoding="utf-8")
    page.open(own_web.http_url, "datastores")
    page.one(".drop")
    drop(page, ".search", files[0])  # beside the place for it
    assert page.js("return 'ready' in document.body.dataset")
    assert page.texts(".work") == [""]
    drop(page, ".drop", *files)
    page.until(lambda: page.texts(".work") == ["Added. 11 documents now."])
    assert not page.all(".drop.is-over")
    page.one(".search input").send_keys("zebras\ue007")
    page.until(lambda: page.texts(".found .name") == ["dropped.txt", "one"])


def test_the_figures_of_a_datastore_are_those_of_the_server(
    page: Page, own_web: RunningServer, own_store: Path
) -> None:
    def figures() -> dict[str, str]:
        page.open(own_web.http_url, "datastores")
        page.one(".store dl div")
        return dict(zip(page.texts(".store dt"), page.texts(".store dd"), strict=True))

    before = figures()
    with Client(own_web.address) as client, Datastore.open(own_store) as store:
        info = client.datastores.get()
        assert page.texts(".store h2 .figure") == [f"{info.num_documents} documents, {info.num_entries:,} entries"]
        assert before["on disk"] == f"{info.num_entries * info.bytes_per_entry / 1000:.1f} kB"
        assert (before["recall"], before["loss of the index"], before["λ"]) == ("–", "–", f"{info.lam:.2g}")
        store.save_quality({"recall": 0.9731, "nats_change": 0.00123})
        store.save_defaults(dataclasses.replace(store.manifest.defaults, adaptive={}))
        page.until(lambda: client.datastores.get().lam_adapts)
        info = client.datastores.get()
    assert (info.recall, info.nats_change) == (0.9731, 0.00123)
    after = figures()
    assert (after["recall"], after["loss of the index"], after["λ"]) == ("0.973", "0.0012 nats", "adapts")


def test_a_token_is_asked_for_and_kept_for_the_tab(page: Page, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "me"\nsecret = "secret-of-the-tests-0123456789"\n')
    options = ("--threads", "1", "--http-port", "0", "--auth-file", str(tmp_path / "tokens.toml"))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        page.driver.get(server.http_url)
        page.until(lambda: page.one("#token").is_displayed())
        page.one("#token").send_keys("wrong\ue007")
        page.until(lambda: page.texts("#notice .error"))
        page.one("#token").send_keys("secret-of-the-tests-0123456789\ue007")
        page.until(lambda: page.js("return 'ready' in document.body.dataset"))
        assert page.js("return [localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        page.js("sessionStorage.clear()")


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_nothing_is_wider_than_the_screen(page: Page, web: RunningServer, size: tuple[int, int]) -> None:
    page.resize(size)
    page.open(web.http_url)
    page.complete()
    pin_a_token_of_memory(page)
    page.click(".documents .document")
    page.button("Without this document").click()
    page.until_ended(2)
    for tab in TABS:
        page.click(f"#{tab}-tab")
        assert page.js("return document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, web: RunningServer, scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("no axe-core: run `npm install axe-core` in the repository's root")
    page.resize(WIDE, scheme)
    page.open(web.http_url)
    page.complete()
    pin_a_token_of_memory(page)
    page.click(".documents .document")
    page.button("Without this document").click()
    page.until_ended(2)
    page.js(AXE.read_text(encoding="utf-8"))
    for tab in TABS:
        page.click(f"#{tab}-tab")
        found = page.driver.execute_async_script(
            "const done = arguments[0]; axe.run().then((found) => done(found.violations))"
        )
        shown = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
        assert shown == [], tab
