"""The held-out digits as image files, shipped with the package for `vil predict --sample`.

digits_sample.zip has the 360 validation scans of scikit-learn's digits, 8 x 8 gray pixels each, as
<class>/<index in the table>.png. `python -m vil.data.datasets.demo_digits` writes it again.
"""

import io
import zipfile
from pathlib import Path

from PIL import Image

from vil.data.datasets.image_list import ImageSource

ARCHIVE = Path(__file__).parents[2] / "weights/digits_sample.zip"
TIMESTAMP = (2026, 1, 1, 0, 0, 0)  # fixed, so that writing it again gives the same bytes


def read_demo_digits() -> tuple[list[ImageSource], list[str]]:
    """The images, and the class name of each."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        names = sorted(archive.namelist())
        images = [ImageSource(name, archive.read(name)) for name in names]
    return images, [name.split("/")[0] for name in names]


def write_demo_digits() -> None:
    """Write the archive. Needs scikit-learn."""
    from vil.data.datasets.digits import Digits

    held_out = Digits(None, "val")
    with zipfile.ZipFile(ARCHIVE, "w") as archive:
        for number, pixels, target in zip(held_out.indices, held_out.pixels, held_out.targets):
            data = io.BytesIO()
            Image.fromarray(pixels).save(data, "png")
            entry = zipfile.ZipInfo(f"{target}/{number:04}.png", TIMESTAMP)
            archive.writestr(entry, data.getvalue())


if __name__ == "__main__":
    write_demo_digits()
