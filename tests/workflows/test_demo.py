"""The page of `vil demo`: its answers, its limits, and the page itself in a browser."""

import asyncio
import base64
import http.client
import io
import json
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

import vil as package
from tests.common.small_runs import command, vil
from tests.common.small_tasks import SMALL_TASKS
from vil.data.datasets.digits import read_demo_digits
from vil.data.datasets.fake import Fake
from vil.workflows import demo

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def served():
    """The server of the shipped weights."""
    model = package.load_for_inference("vil_nano", {"DEVICE": "cpu"})
    with demo.DemoServer(demo.Demo(model, "<b>digits"), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def digit() -> bytes:
    """A file with a digit, whose class is the first of those shown."""
    return read_demo_digits()[0][0].content


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def ask(server, path, body=None, **headers) -> tuple[int, dict]:
    request = urllib.request.Request(server.url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def image_of(url: str) -> Image.Image:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_page_escapes_its_title(served):
    with urllib.request.urlopen(served.url) as answer:
        page = answer.read().decode()
    assert "<title>&lt;b&gt;digits</title>" in page
    assert "http" not in page.split("<script>")[1]  # nothing is loaded from elsewhere


def test_an_image_gets_the_prediction_that_predict_gives(served, digit):
    status, answer = ask(served, "predict", digit)
    assert status == 200
    (expected,) = package.predict(served.demo.model, Image.open(io.BytesIO(digit)))
    assert [name for name, _ in answer["classes"]] == list(expected.names)
    shares = [share for _, share in answer["classes"]]
    assert shares == pytest.approx([share for _, share in expected.classes])
    assert image_of(answer["input"]).size == (64, 64)
    assert image_of(answer["drawing"]).width >= 64


def test_a_click_draws_the_attention_of_its_token(served, digit):
    drawings = []
    for row, col in ((3, 3), (60, 60)):
        status, answer = ask(served, f"attention?row={row}&col={col}", digit)
        assert status == 200
        drawings.append(image_of(answer["drawing"]).tobytes())
    assert drawings[0] != drawings[1]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("predict", b"no image", 400, "this is no image that can be read"),
        ("predict", b"", 400, "this is no image that can be read"),
        ("attention?row=999&col=1", None, 400, "no token covers pixel 999,1"),
        ("attention?row=a&col=1", None, 400, "invalid literal"),
        ("attention?row=1", None, 400, "invalid literal"),
        ("nothing", None, 404, "there is no /nothing"),
    ],
)
def test_a_wrong_request_is_an_answer_of_one_line(served, digit, path, body, status, message):
    found, answer = ask(served, path, digit if body is None else body)
    assert found == status
    assert message in answer["error"]
    assert "\n" not in answer["error"]
    assert ask(served, "predict", digit)[0] == 200  # the server goes on


def test_a_large_image_and_a_large_file_are_refused(served, monkeypatch):
    monkeypatch.setattr(demo, "MAX_PIXELS", 10**6)
    status, answer = ask(served, "predict", as_png(Image.new("L", (1001, 1000))))
    assert status == 400
    assert (
        "the image has 1001 x 1000 pixels, more than the 1 million of this page" in answer["error"]
    )
    connection = http.client.HTTPConnection(*served.server_address)
    connection.putrequest("POST", "/predict")
    connection.putheader("Content-Length", str(demo.MAX_BYTES + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert "more than 64 MB" in json.load(response)["error"]


def test_pages_of_other_sites_get_no_answer(served, digit):
    assert ask(served, "predict", digit, Origin="http://example.org")[0] == 403
    assert ask(served, "predict", digit, Host="example.org:80")[0] == 403
    assert ask(served, "predict", digit, Origin=served.url.rstrip("/"))[0] == 200


@pytest.mark.long
@pytest.mark.parametrize("task", list(SMALL_TASKS))
def test_every_task_has_a_page(task, tmp_path):
    words = [*SMALL_TASKS[task], "OPTIM.EPOCHS=1"]
    run = package.train(None, words, output_dir=tmp_path / task, data=tmp_path).run_dir
    page = demo.Demo(package.load_for_inference(run), task)
    image = as_png(Fake(None, "val", n=1, size=32).image(0))
    answer = page.predict(image)
    assert answer["text"]
    image_of(answer["drawing"]).load()
    assert page.has_attention
    assert image_of(page.attention(image, 5, 5)["drawing"]).width > 100
    assert "attends to" in page.page()


def test_a_port_in_use_is_one_line(served):
    ended = vil("demo", "--port", served.server_address[1])
    assert ended.code == 2
    assert "port" in ended.err
    assert "(Address already in use): choose another --port" in ended.err


def test_a_source_that_does_not_exist_is_one_line():
    ended = vil("demo", "no-such-run")
    assert ended.code != 0
    assert ended.err.count("\n") == 1


@pytest.mark.long
def test_the_command_serves_until_ctrl_c(digit, heard_signals):
    process = subprocess.Popen(
        command("demo", "--port", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().split()[0]
        request = urllib.request.Request(url + "predict", digit)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "text" in json.load(answer)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_drops_an_image_and_reads_the_answer(served, digit, tmp_path):
    """By Chromium's debugging protocol: a drop of a file, then a click on the model's input."""
    shown = asyncio.run(drop_and_click(served.url, digit, tmp_path))
    (expected,) = package.predict(served.demo.model, Image.open(io.BytesIO(digit)))
    assert expected.names[0] in shown["text"]
    assert shown["map"].startswith("data:image/png;base64,")
    assert shown["wide"] <= shown["window"]  # no horizontal scrolling


DROP = """
const bytes = Uint8Array.from(atob("%s"), c => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "digit.png", {type: "image/png"}));
document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
"""
CLICK = """
const box = document.getElementById("input").getBoundingClientRect();
document.getElementById("input").dispatchEvent(new MouseEvent("click",
  {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
"""
READ = """JSON.stringify({
  text: document.getElementById("classes").textContent,
  input: document.getElementById("input").naturalWidth,
  map: document.getElementById("map").hidden ? "" : document.getElementById("map").src,
  wide: document.documentElement.scrollWidth, window: innerWidth})"""


async def drop_and_click(url: str, image: bytes, folder: Path) -> dict:
    from tornado.websocket import websocket_connect

    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "about:blank"]
    words += ["--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"]
    browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in browser.stderr if "DevTools listening on" in line)
        port = line.split("127.0.0.1:")[1].split("/")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(each for each in json.load(answer) if each["type"] == "page")
        socket = await websocket_connect(page["webSocketDebuggerUrl"], max_message_size=2**27)
        number = 0

        async def call(method: str, **params) -> dict:
            nonlocal number
            number += 1
            await socket.write_message(json.dumps(dict(id=number, method=method, params=params)))
            while True:
                message = json.loads(await socket.read_message())
                if message.get("id") == number:
                    return message["result"]

        async def read_until(wanted: str) -> dict:
            for _ in range(300):
                found = await call("Runtime.evaluate", expression=READ)
                if (
                    "value" in found["result"]
                    and (shown := json.loads(found["result"]["value"]))[wanted]
                ):
                    return shown
                await asyncio.sleep(0.2)
            raise AssertionError(f"the page never showed {wanted}: {found}")

        await call(
            "Emulation.setDeviceMetricsOverride",
            width=1000,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        await call("Page.navigate", url=url)
        await read_until("window")
        await call("Runtime.evaluate", expression=DROP % base64.b64encode(image).decode())
        await read_until("input")
        await call("Runtime.evaluate", expression="{" + CLICK + "}")
        shown = await read_until("map")
        picture = await call("Page.captureScreenshot", captureBeyondViewport=True)
        (folder / "page.png").write_bytes(base64.b64decode(picture["data"]))
        return shown
    finally:
        browser.kill()
        browser.wait()
