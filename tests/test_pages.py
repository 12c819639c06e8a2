"""The page of `d2l-bert demo` and the page without a server, in a real browser that can reach this machine alone."""

import contextlib
import functools
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from promises.driving import wait_for
from test_export import INT8, NODE_MODULES, PROMPT, export, run_onnx
from transformers import AutoTokenizer, pipeline

from d2l_bert.inference import page as pages


# ---------------------------------------------------------------------------------------------------------------------
# A headless Chromium that can reach this machine alone, and what it asked for


FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1000,900", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
)
IS_THERE = bool(shutil.which("chromium") and shutil.which("chromedriver"))
needs_browser = pytest.mark.skipif(not IS_THERE, reason="chromium or chromedriver is missing: make browsers")


@contextlib.contextmanager
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def hosts(driver) -> set[str]:
    """The hosts of all requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    addresses = [urlsplit(each["request"]["url"]) for each in requests]
    return {address.hostname for address in addresses if address.scheme not in ("data", "blob")}


MARKUP = "<img src=x onerror=\"document.title='run'\"> [MASK]"
LONG = "word " * 10_000

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def texts_of(driver, selector):
    return driver.execute_script(f"return [...document.querySelectorAll('{selector}')].map(each => each.textContent)")


# ---------------------------------------------------------------------------------------------------------------------
# Without a server


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory):
    """The address of the page, and the folder of the exported model."""
    if not NODE_MODULES.is_dir():
        pytest.skip("transformers.js is missing: make browsers")
    place = tmp_path_factory.mktemp("page")
    folder = export(
        *(trained, place / "stock"),
        *("--page", str(place / "page"), "--runtime", str(NODE_MODULES.parent)),
    )
    with served(place / "page") as address:
        yield address, folder


@contextlib.contextmanager
def served(folder):
    """The address of a folder on this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


# In place of transformers.js: a model that finds the first class of config.json likeliest.
STUB = """
const config = await (await fetch("model/config.json")).json();
const model = async () => ({ logits: { data: [3, 2, 1], dims: [1, 3] } });
export const env = { backends: { onnx: { wasm: {} } } };
export const AutoTokenizer = { from_pretrained: async () => () => ({ input_ids: { data: [1, 2] } }) };
export const AutoModelForSequenceClassification = { from_pretrained: async () => Object.assign(model, { config }) };
export const AutoModelForMaskedLM = AutoModelForSequenceClassification;
"""


@needs_browser
def test_names_of_a_model_and_its_classes_are_text_on_the_page(tmp_path):
    labels = ["<img src=x onerror=\"document.title='run'\">", "</span><script>alert(1)</script>", "\u202e{{ 7 * 7 }}"]
    name = f"{labels[0]} ../a `b` \n {'x' * 300}"
    exported = tmp_path / "exported"
    page = tmp_path / "page"
    for file in ("tokenizer.json", "tokenizer_config.json", INT8):
        (exported / file).parent.mkdir(parents=True, exist_ok=True)
        (exported / file).write_text("{}")
    config = {"id2label": dict(enumerate(labels)), "max_position_embeddings": 9}
    (exported / "config.json").write_text(json.dumps(config))
    (exported / "metrics.json").write_text(json.dumps({"export": {"task": "text-classification"}}))
    shutil.copytree(Path(pages.__file__).with_name("page_files"), page)
    (page / "runtime" / "transformers.min.js").write_text(STUB)
    pages.write_page(exported, name, page)
    with served(page) as address, chromium() as driver:
        driver.get(address)
        wait_for(lambda: driver.find_element("id", "go").is_enabled(), [])
        assert texts_of(driver, "h1") == [name]
        assert driver.title == " ".join(name.split())
        driver.execute_script("document.getElementById('text').value = arguments[0]", labels[0])
        driver.find_element("id", "go").click()
        wait_for(lambda: texts_of(driver, ".token"), [])
        assert texts_of(driver, ".token") == labels and driver.title != "run"
        assert not texts_of(driver, "img") and len(texts_of(driver, "script")) == 1
        assert hosts(driver) == {"127.0.0.1"}
        # a long name is broken, and the page no wider than the window
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


@needs_browser
def test_the_page_without_a_server_predicts_as_python_does(page):
    address, folder = page
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(PROMPT, return_tensors="pt")
    place = encoded["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    best = run_onnx(folder / INT8, encoded)["logits"][0, place].softmax(-1).topk(5)
    with chromium() as driver:

        def predict(text):
            driver.execute_script("document.getElementById('text').value = arguments[0]", text)
            driver.find_element("id", "go").click()
            wait_for(lambda: texts_of(driver, ".token") or texts_of(driver, "#message")[0], [])
            return texts_of(driver, ".token"), texts_of(driver, "#message")[0]

        driver.get(address)
        wait_for(lambda: driver.find_element("id", "go").is_enabled(), [])
        found, message = predict(PROMPT)
        assert found[0] == tokenizer.decode(best.indices[:1]) and not message
        shares = [float(share.rstrip(" %")) / 100 for share in texts_of(driver, ".share")]
        assert shares == pytest.approx(best.values.tolist(), abs=0.02)
        for text, reason in (("Anna walked.", "[MASK]"), (LONG, "tokens"), ("", "[MASK]")):
            found, message = predict(text)
            assert not found and reason in message
        found, message = predict(f"{MARKUP} and [MASK]")
        assert len(found) == 10 and not message and driver.title != "run"
        assert hosts(driver) == {"127.0.0.1"}
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@needs_browser
def test_a_page_whose_model_is_not_there_says_so(page):
    address, folder = page
    (folder.parent / "page/model").rename(folder.parent / "moved")
    with chromium() as driver:
        driver.get(address)
        wait_for(lambda: "cannot be loaded" in texts_of(driver, "#message")[0], [])
        assert not driver.find_element("id", "go").is_enabled()
    (folder.parent / "moved").rename(folder.parent / "page/model")


# ---------------------------------------------------------------------------------------------------------------------
# d2l-bert demo


@pytest.fixture(scope="module")
def demo(trained):
    """The address of a running `d2l-bert demo` of one model."""
    pytest.importorskip("gradio")
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "d2l_bert", "demo", trained, "--port", str(port)])
    address = f"http://127.0.0.1:{port}/"

    def answers():
        try:
            return urllib.request.urlopen(address, timeout=5).status == 200
        except OSError:
            return False

    wait_for(answers, [process])
    yield address
    process.terminate()
    process.wait(30)


@needs_browser
def test_the_page_of_demo_predicts_as_python_does(demo, trained):
    expected = [(entry["token_str"], entry["score"]) for entry in pipeline("fill-mask", model=str(trained))(PROMPT)]
    with chromium() as driver:

        def tab(name, *values):
            [each.click() for each in driver.find_elements("css selector", "[role=tab]") if each.text == name]
            fields = [each for each in driver.find_elements("css selector", "textarea") if each.is_displayed()]
            for field, value in zip(fields, values, strict=False):
                field.clear()
                driver.execute_script(
                    "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", field, value
                )
            (button,) = [each for each in driver.find_elements("tag name", "button") if each.text == "Show"]
            button.click()

        def shown(selector):
            return [each for each in driver.find_elements("css selector", selector) if each.is_displayed()]

        driver.get(demo)
        wait_for(lambda: [each for each in driver.find_elements("tag name", "button") if each.text == "Show"], [])
        tab("Fill masks", PROMPT)
        wait_for(lambda: shown("pre"), [])
        found = [line.split()[:2] for line in shown("pre")[0].text.splitlines()]
        assert [token for _, token in found] == [token for token, _ in expected]
        shares = [float(share.rstrip("%")) / 100 for share, _ in found]
        assert shares == pytest.approx([share for _, share in expected], abs=0.001)
        for text, reason in (("Anna walked.", "[MASK]"), (LONG, "tokens"), ("<b>bold</b>", "<b>bold</b>")):
            tab("Fill masks", text)
            wait_for(
                lambda reason=reason: [each for each in shown("[data-testid=toast-body]") if reason in each.text], []
            )
        tab("Fill masks", MARKUP)
        # five tokens, and that words are unknown
        wait_for(lambda: [each for each in shown("pre") if len(each.text.splitlines()) == 6], [])
        tab("Two texts")
        wait_for(lambda: [each for each in shown("pre") if "IsNext" in each.text and "NotNext" in each.text], [])
        tab("Attention")
        wait_for(lambda: shown(".matplotlib img"), [])
        tab("A word in two contexts", "walked", "Anna walked home.", "Hugo walked to the garden.")
        wait_for(lambda: [each for each in shown("pre") if "layer 1" in each.text], [])
        assert driver.title != "run" and hosts(driver) == {"127.0.0.1"}
