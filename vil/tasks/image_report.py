"""Render tables, figures and galleries of images for the run report, as HTML.

Several tasks use these functions. The HTML template is image_report.html.j2.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from PIL import Image

from vil.data.bands import BandImage, to_display
from vil.data.dataset import ImageDataset
from vil.report.html import Html, render_template

SIDE = 128  # pixels of the longer side of a shown image
SHOWN = 12  # images of a gallery


class ReportTable(NamedTuple):
    """A table with a caption, column names, and rows of text.

    The first column of each row is a name. The other columns are numbers, formatted as text.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Thumbnail(NamedTuple):
    """A small image with text for a gallery. `jpeg` is None if the image can no longer be read."""

    name: str
    lines: Sequence[str]  # text below the image
    jpeg: bytes | None


def render_parts(
    tables: Sequence[ReportTable] = (),
    figures: Sequence[tuple[str, Figure]] = (),
    galleries: Sequence[tuple[str, Sequence[Thumbnail]]] = (),
) -> Html:
    """Render tables, figures and galleries of images as HTML.

    figures: list of (title, figure). galleries: list of (title, thumbnails).
    """
    drawn = [(title, _to_png(figure)) for title, figure in figures]
    shown = dict(tables=tables, figures=drawn, galleries=galleries)
    return Html(render_template("tasks/image_report.html.j2", **shown))


def make_thumbnail(
    dataset: ImageDataset, index: int, lines: Sequence[str] = (), side: int = SIDE
) -> Thumbnail:
    """Make a thumbnail of the image `index` of a dataset.

    lines: lines of text to show below the image. side: maximum width and height in pixels.
    """
    try:
        jpeg = encode_thumbnail(dataset.image(index), side)
    except OSError:  # deleted since the evaluation
        jpeg = None
    return Thumbnail(dataset.sample_name(index), lines, jpeg)


def encode_thumbnail(image: Image.Image | BandImage, side: int = SIDE) -> bytes:
    """Encode an image as JPEG, reduced to at most `side` pixels in width and height."""
    small, stream = to_display(image), io.BytesIO()
    small.thumbnail((side, side))
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _to_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
