"""A web page to try a model on: drop an image, see the prediction, click on a point to see what its
token attends to.

`DemoServer` answers these requests, each with JSON:

GET /              the page
POST /predict      body: an image file. {"text": ..., "drawing": ...}, and
                   {"classes": [[name, probability], ...], "input": ...} for some models
POST /attention    the same body; ?row=R&col=C of a pixel of "input". {"drawing": ...}

Images in answers are data URLs. If a request fails, the answer is {"error": ...}.
"""

import base64
import io
import json
import logging
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from vil.data.bands import to_display
from vil.data.build import read_options
from vil.data.datasets.image_list import ImageList, ImageSource
from vil.data.image import UnreadableImage, open_image
from vil.engine.evaluation import evaluating
from vil.report.attention_maps import draw_attention
from vil.report.html import render_template
from vil.tasks import noun_of
from vil.utils.errors import ConfigError, DataError, one_line
from vil.workflows.ensemble import make_ensemble
from vil.workflows.inference import InferenceModel
from vil.workflows.predict import iter_predictions
from vil.workflows.visualize import Selection, blocks_of, rows_of

MAX_BYTES = 64 * 2**20  # of an image file
MAX_PIXELS = 25_000_000  # of an image, which is drawn and sent to the page
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of this machine in the address of the page
log = logging.getLogger(__name__)


class Demo:
    """Predictions and attention maps of a model for the page.

    title: of the page. One request at a time uses the model.
    """

    def __init__(self, model: InferenceModel, title: str) -> None:
        self.model, self.title, self.lock = model, title, threading.Lock()
        self.ensemble = make_ensemble([model])
        self.has_attention = model.task.supports("attention_input") and not model.cfg.EVAL.FAST
        if self.has_attention:
            try:
                self.attention(_encode(Image.new("RGB", (64, 64))), 0, 0)
            except (ConfigError, DataError, UnreadableImage, ValueError) as error:
                log.info("the page shows no attention: %s", error)
                self.has_attention = False

    def page(self) -> str:
        """Return the page as HTML."""
        about = noun_of(self.model.cfg.TASK)
        values = dict(title=self.title, about=about, has_attention=self.has_attention)
        values["max_bytes"] = MAX_BYTES
        return render_template("workflows/demo.html.j2", **values)

    def predict(self, content: bytes) -> dict[str, Any]:
        """Return the prediction for an image file as text and as a drawing. Also returns the
        classes with their probabilities, if the model predicts one per image, and the model's
        input, if its attention can be shown."""
        images = self._read(content)
        task = self.model.task
        with self.lock:
            (prediction,) = iter_predictions(self.ensemble, images, 1, 0)
            if prediction.error:
                raise DataError(prediction.error)
            write = next(iter(task.output_formats.values()))
            answer: dict[str, Any] = {"text": "".join(write([prediction], self.model.classes))}
            if hasattr(prediction, "names"):  # of one class per image
                shares = [share for _, share in prediction.classes]
                answer["classes"] = list(zip(prediction.names, shares))
            original = to_display(images.image(0))
            try:
                drawn = task.visualize(original, prediction)
            except ConfigError:  # the task draws nothing
                drawn = original
            answer["drawing"] = _as_url(drawn[""] if isinstance(drawn, Mapping) else drawn)
            if self.has_attention:
                with evaluating(self.model.model) as model:
                    shown = task.attention_input(model, images.image(0)).image
                answer["input"] = _as_url(Image.fromarray(np.uint8(255 * shown + 0.5)))
        return answer

    def attention(self, content: bytes, row: int, col: int) -> dict[str, str]:
        """Draw what the tokens at a pixel of the model's input attend to, in the last block of each
        stage."""
        image, buffer, rows = self._read(content).image(0), io.BytesIO(), []
        with self.lock, evaluating(self.model.model) as model:
            shown = self.model.task.attention_input(model, image)
            for stage, block in blocks_of(shown.network, Selection()):
                rows += rows_of(shown, stage, block, (row, col), "token")
            draw_attention(shown.image, rows, f"pixel {row},{col}: {shown.caption}", buffer)
        return {"drawing": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"}

    def _read(self, content: bytes) -> ImageList:
        """Return the image in a file as a collection. Raises DataError if it is too large."""
        if not content.startswith(b"\x93NUMPY"):  # an array has no more pixels than bytes
            try:
                with open_image(io.BytesIO(content)) as image:
                    width, height = image.size
            except UnreadableImage as error:
                raise DataError(f"this is no image that can be read: {error}") from error
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"the image has {width} x {height} pixels, more than the "
                    f"{MAX_PIXELS // 10**6} million of this page: use vil predict"
                )
        return ImageList([ImageSource("image", content)], **read_options(self.model.cfg))


class DemoServer(ThreadingHTTPServer):
    """HTTP server of the page. Use its methods `serve_forever`, `shutdown` and `server_close`.

    host, port: address to listen on; port 0 selects a free one. Raises ConfigError if it cannot be
    used, for example because another program uses it.
    """

    daemon_threads = True

    def __init__(self, demo: Demo, host: str, port: int) -> None:
        self.demo = demo
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the page cannot be served on {host} port {port} ({reason}): choose another --port"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: DemoServer
    timeout = 60  # seconds without data, after which a connection is closed

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/":
            return self.answer(HTTPStatus.NOT_FOUND, {"error": "there is only the page /"})
        return self.send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.demo.page())

    def do_POST(self) -> None:
        parts, demo = urlsplit(self.path), self.server.demo
        if self.is_foreign():
            return self.answer(HTTPStatus.FORBIDDEN, {"error": "this is the page of another site"})
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self.answer(HTTPStatus.LENGTH_REQUIRED, {"error": "expected an image file"})
        if not 0 <= length <= MAX_BYTES:
            text = f"the file has more than {MAX_BYTES >> 20} MB, too many for this page"
            return self.answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": text})
        content = self.rfile.read(length)
        try:
            if parts.path == "/predict":
                found = demo.predict(content)
            elif parts.path == "/attention" and demo.has_attention:
                place = parse_qs(parts.query)
                row, col = (int(place.get(name, ["no number"])[0]) for name in ("row", "col"))
                found = demo.attention(content, row, col)
            else:
                return self.answer(HTTPStatus.NOT_FOUND, {"error": f"there is no {parts.path}"})
        except (ConfigError, DataError, UnreadableImage, ValueError) as error:
            return self.answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:  # the server must go on
            log.exception("a request failed")
            text = f"unexpected {one_line(error)}"
            return self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": text})
        return self.answer(HTTPStatus.OK, found)

    def is_foreign(self) -> bool:
        """Return whether a page of another site sent the request, through the user's browser."""
        origin, host = self.headers.get("Origin"), self.headers.get("Host", "")
        if origin is not None and urlsplit(origin).netloc != host:
            return True
        is_local = self.server.server_address[0] in ("127.0.0.1", "::1")
        return is_local and host.rsplit(":", 1)[0] not in LOCAL  # a name that another site chose

    def answer(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(content))

    def send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")  # the rest of a refused file is not read
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _as_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(_encode(image)).decode()}"
