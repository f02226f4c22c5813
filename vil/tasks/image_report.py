"""Tables, figures and galleries of images in the run report.

Several tasks with one target per image use them. The template image_report.html.j2 renders them.
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

    The first column has names. The other columns have numbers.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Thumbnail(NamedTuple):
    """An image of a gallery. `jpeg` is None if the image can no longer be read."""

    name: str
    lines: Sequence[str]  # text below the image
    jpeg: bytes | None


def render_parts(
    tables: Sequence[ReportTable] = (),
    figures: Sequence[tuple[str, Figure]] = (),
    galleries: Sequence[tuple[str, Sequence[Thumbnail]]] = (),
) -> Html:
    """Render tables, figures (title, figure) and galleries (title, thumbnails) as HTML."""
    drawn = [(title, _to_png(figure)) for title, figure in figures]
    shown = dict(tables=tables, figures=drawn, galleries=galleries)
    return Html(render_template("tasks/image_report.html.j2", **shown))


def make_thumbnail(
    dataset: ImageDataset, index: int, lines: Sequence[str] = (), side: int = SIDE
) -> Thumbnail:
    """Make a thumbnail of the image `index` of a dataset.

    lines: text to show below it. side: maximum size in pixels.
    """
    try:
        jpeg = encode_thumbnail(dataset.image(index), side)
    except OSError:  # deleted since the evaluation
        jpeg = None
    return Thumbnail(dataset.sample_name(index), lines, jpeg)


def encode_thumbnail(image: Image.Image | BandImage, side: int = SIDE) -> bytes:
    """Encode an image as JPEG, reduced to at most `side` pixels per side."""
    small, stream = to_display(image), io.BytesIO()
    small.thumbnail((side, side))
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _to_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
