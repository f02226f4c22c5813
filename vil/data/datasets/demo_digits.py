"""The held-out digits as pictures, shipped with the package: what `vil predict --sample` shows.

digits_sample.zip has the 360 scans of scikit-learn's table that no training of ours sees, 8 x 8
grey pixels each, as <class>/<number in the table>.png. `python -m vil.data.datasets.demo_digits`
writes it again.
"""

import io
import zipfile
from pathlib import Path

from PIL import Image

from vil.data.datasets.image_list import ImageSource

SAMPLE = Path(__file__).parents[2] / "weights/digits_sample.zip"
MADE = (2026, 1, 1, 0, 0, 0)  # the same bytes whenever it is made


def read_demo_digits() -> tuple[list[ImageSource], list[str]]:
    """The pictures, and the class of each."""
    with zipfile.ZipFile(SAMPLE) as archive:
        names = sorted(archive.namelist())
        return [ImageSource(name, archive.read(name)) for name in names], [
            n.split("/")[0] for n in names
        ]


def write_demo_digits() -> None:
    """Needs scikit-learn."""
    from vil.data.datasets.digits import Digits

    held_out = Digits(None, "val")
    with zipfile.ZipFile(SAMPLE, "w") as archive:
        for number, pixels, target in zip(held_out.indices, held_out.pixels, held_out.targets):
            data = io.BytesIO()
            Image.fromarray(pixels).save(data, "png")
            entry = zipfile.ZipInfo(f"{target}/{number:04}.png", MADE)
            archive.writestr(entry, data.getvalue())


if __name__ == "__main__":
    write_demo_digits()
