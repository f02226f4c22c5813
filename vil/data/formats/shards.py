"""Datasets in tar shards of the webdataset format, such as shards/train-{000000..000003}.tar.

Members whose names are equal up to the first dot form a sample, such as 0007.jpg and 0007.cls. They
can be read in any order, so shuffling and resuming are exact.
"""

import glob
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vil.data.dataset import Root, Transform
from vil.data.datasets.folder import HELP, extensions
from vil.data.datasets.table_labels import Location, read_lists, read_weights
from vil.data.formats.archive import ArchiveDataset, TarArchive, is_hidden
from vil.data.formats.tsv import read_labelmap
from vil.data.splits import number_keys
from vil.utils.errors import DataError, os_error_as
from vil.utils.plural import plural
from vil.utils.safe_files import join_roots, path_below, regular_file

logger = logging.getLogger(__name__)

LABELS = ("cls", "json", "txt")  # label of all samples: the first extension that any sample has
# target type -> field of a .json label
FIELDS = {"class": "label", "labels": "labels", "numbers": "value"}
RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_SHARDS = 100_000
# With more shards, a shard is opened for each read: a process may be limited to 1024 open files.
MAX_OPEN = 64
MAX_LABEL = 1 << 20  # bytes


class TarShards:
    """A sequence of tars that is read like a single `Archive`."""

    def __init__(self, archives: Sequence[TarArchive]):
        self.archives = list(archives)
        self.ends = np.cumsum([len(archive) for archive in archives])

    def _locate(self, index: int) -> tuple[TarArchive, int]:
        shard = int(np.searchsorted(self.ends, index, side="right"))
        archive = self.archives[shard]
        return archive, int(index) - int(self.ends[shard]) + len(archive)

    def read(self, index: int) -> bytes:
        archive, member = self._locate(index)
        content = archive.read(member)
        if len(self.archives) > MAX_OPEN:
            archive.file.opened = None
        return content

    def name(self, index: int) -> str:
        archive, member = self._locate(index)
        return archive.name(member)


class Samples(NamedTuple):
    """The samples of all shards. Item i of each field belongs to sample i.

    images: reads the image.
    names: name of the sample.
    texts: the label, as a list of one or several class names or numbers.
    records: JSON object that contains the label; {} if the label is not JSON.
    """

    images: TarShards
    names: list[str]
    texts: list[list[str]]
    records: list[dict[str, Any]]


class Shards(ArchiveDataset):
    """A dataset of the samples in tar files below root. In the path `files`, "{split}" is replaced
    by train, val or test. If `files` does not contain "{split}", all samples are training images.
    """

    def __init__(
        self,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        files: str = "{split}-*.tar",
        image_member: str | None = None,
        label_member: str | None = None,
        labelmap: str | None = None,
        text_labels: bool = False,
        all_rows: bool = False,
        target_type: str = "class",
        extra_roots: Sequence[str] = (),
        channels: int = 3,
    ):
        """List the members of all shards, and read the labels.

        Args:
            files: path of one or several tars. {000..003} is a range, and * and ? are wildcards.
            image_member: file extension of the images, required if a sample has several images.
            label_member: file extension of the labels. Default: the first in LABELS that any sample
                has.
            labelmap: file below root with one class per line. Default: classes.txt in the folder of
                the shards. Without this file, the classes are the sorted labels of the training
                samples.
            text_labels: accept any text as a class name, including a mix of numbers and words, and
                do not warn about ambiguous labels.
            all_rows: if `files` does not contain "{split}", use all samples in every split.
            target_type: see `ImageDataset`.
            extra_roots: folders, besides root, to which links may lead.
            channels: see `read_image`.

        Raises DataError for missing or invalid shards, and for a sample without a valid label or
        without exactly one image.
        """
        super().__init__(split, transform)
        self.target_type, self.channels = target_type, channels
        roots, is_split = join_roots(root, extra_roots), "{split}" in files
        if not (is_split or all_rows or split == "train"):
            raise DataError(
                f"{files} has no {split} images, because all its samples are training images: "
                f"set DATA.{split.upper()}_FRACTION to 0.2, or write separate shards for each "
                "split, with a path such as x-{split}-*.tar"
            )
        source = files.replace("{split}", split)
        paths = find_shards(roots, source, HELP.get(split, ""))
        settings = (target_type, (image_member, label_member), channels)
        own = read_samples(Path(root, source), paths, *settings)
        parts = [own]
        classes = read_classes(roots, labelmap, paths[0].with_name("classes.txt"))
        if is_split and split != "train" and not classes and target_type != "numbers":
            source = files.replace("{split}", "train")
            if paths := find_shards(roots, source, required=False):
                parts.append(read_samples(Path(root, source), paths, *settings))
            else:
                text = "there is no %s: the classes are taken from the %s split"
                logger.warning(text, source, split)
        names = [name for part in parts for name in part.names]
        where = Location(Path(root, files), "sample", names, "samples")
        if target_type != "numbers" and not text_labels:
            warn_ambiguous(own, FIELDS[target_type], classes, where.path)
        known = {str(number): name for number, name in enumerate(classes)}
        known = known | {name: name for name in classes} if target_type != "numbers" else {}
        self.classes, targets = read_lists(
            [[known.get(text, text) for text in texts] for part in parts for texts in part.texts],
            target_type,
            where,
            np.arange(len(names)) >= (len(own.names) if len(parts) > 1 else 0),
            text_labels=text_labels,
            name=FIELDS[target_type],
            classes=classes,
        )
        self.archive, self.targets = own.images, targets[: len(own.names)]
        if any("group" in record for record in own.records):
            groups = [record.get("group") for record in own.records]
            self.split_groups = number_keys([None if g in (None, "") else str(g) for g in groups])
        if any("weight" in record for record in own.records):
            weights = [str(record.get("weight", 1)) for record in own.records]
            self.weights = read_weights(weights, where._replace(lines=own.names))


def find_shards(
    roots: Sequence[Root], pattern: str, hint: str = "", *, required: bool = True
) -> list[Path]:
    """Return, in order, the files that match a pattern with ranges such as {000..003} or wildcards.

    roots: the dataset root, then other folders that may contain the files. Raises DataError if any
    file is missing. But if all are missing and `required` is False, returns [].
    """
    root, expanded = roots[0], [pattern]
    while match := RANGE.search(expanded[0]):
        first, last = match.groups()
        if (count := int(last) - int(first) + 1) < 1 or count * len(expanded) > MAX_SHARDS:
            raise DataError(f"{pattern}: {match[0]} must name 1 to {MAX_SHARDS} shards")
        numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        expanded = [RANGE.sub(n, name, count=1) for name in expanded for n in numbers]
    names = []
    for name in expanded:
        found = glob.glob(name, root_dir=root) if "*" in name or "?" in name else []
        names += sorted(found) or [name]
    paths = [path_below(root, name, "the config", roots) for name in names]
    missing = [path for path in paths if not path.is_file()]
    if len(missing) == len(paths):
        if not required:
            return []
        raise DataError(f"there is no file {Path(root, pattern)}" + (f": {hint}" if hint else ""))
    if missing:
        raise DataError(
            f"{Path(root, pattern)}: {len(missing)} of {len(paths)} shards are missing, such as "
            f"{missing[0]}"
        )
    return paths


def read_classes(roots: Sequence[Root], labelmap: str | None, default: Path) -> list[str]:
    """Read the class names from the file `labelmap` or, if it is None, from the file `default`.
    Returns [] if labelmap is None and `default` does not exist."""
    if labelmap is None and not default.is_file():
        return []
    file = path_below(roots[0], labelmap, "DATA.KWARGS.labelmap", roots) if labelmap else default
    with os_error_as(DataError, f"the labelmap {file} cannot be read"):
        names = {number: name for name, number in read_labelmap(regular_file(file)).items()}
    return [names.get(number, str(number)) for number in range(max(names) + 1)]


def warn_ambiguous(own: Samples, field: str, classes: Sequence[str], files: object) -> None:
    """Log a warning if a label is both the name of one class and the number of another class.

    Such a label is read as a name. There is no warning if it is clearly a name: if it is a string
    in JSON, or if any label of the dataset is not a class number.

    field: the JSON field that contains the label. classes: class names, in order of their numbers.
    """
    by_number = {str(number): name for number, name in enumerate(classes)}
    if {text for texts in own.texts for text in texts} - by_number.keys():
        return
    ambiguous = {name for name in classes if by_number.get(name, name) != name}
    found: list[str] = []
    for texts, record in zip(own.texts, own.records):
        value = record.get(field)
        values = value if isinstance(value, list) else [value]
        if not any(isinstance(one, str) for one in values):
            found += ambiguous.intersection(texts)
    if found:
        logger.warning(
            "%s has %d ambiguous labels, such as %s. Each is the name of one class and the number "
            "of another, and is read as a name. If the labels are numbers, rename the classes to "
            "words. If they are names, set DATA.KWARGS.text_labels to True to turn off this "
            "warning.",
            files,
            len(found),
            found[0],
        )


def read_samples(
    source: Path,
    paths: Sequence[Path],
    target_type: str,
    members: tuple[str | None, str | None],
    channels: int,
) -> Samples:
    """List the samples of all shards and read their labels.

    source: path for error messages. members: file extensions of the image and of the label; None
    stands for any known extension. Raises DataError unless each sample has exactly one image and a
    valid label.
    """
    image, endings = members[0], extensions(channels)
    labels, ignored = (members[1],) if members[1] else LABELS, []

    def is_image(extension: str) -> bool:
        return extension == image if image else f".{extension}".lower().endswith(endings)

    def is_wanted(name: str, size: int) -> bool:
        extension = split_name(name)[1]
        if is_hidden(name) or not extension:
            return False
        if not (found := extension in labels or is_image(extension)):
            ignored.append(name)
        return found

    archives = [TarArchive(path, is_wanted) for path in paths]
    shards = [group_members(archive) for archive in archives]
    names = [f"{path.name}@{key}" for path, shard in zip(paths, shards) for key in shard]
    samples = [sample for shard in shards for sample in shard.values()]
    if ignored:
        forms = "member is neither an image nor a label", "members are neither images nor labels"
        logger.warning("%s: %s, such as %s", source, plural(len(ignored), *forms), ignored[0])
    if not samples:
        raise DataError(f"{source} has no images and no labels")
    where = Location(source, "sample", names, "samples")
    shown = [" ".join(sample) for sample in samples]
    counts = [sum(map(is_image, sample)) for sample in samples]
    where.refuse([count == 0 for count in counts], "have no image", shown)
    several = "have several images (set DATA.KWARGS.image_member to an extension)"
    where.refuse([count > 1 for count in counts], several, shown)
    label = next((e for e in labels if any(e in sample for sample in samples)), "")
    problem = f"have no label, a member {label or ' or '.join(labels)}"
    problem += "" if label else " (for a folder per class, set DATA.TRAIN to tar)"
    where.refuse([label not in sample for sample in samples], problem, shown)
    contents = []
    for archive, shard in zip(archives, shards):
        for sample in shard.values():
            offset, size = archive.fields[sample[label]].tolist()
            contents.append(archive.file.read(offset, min(size, MAX_LABEL + 1)))
        archive.file.opened = None  # closes the file, because the number of open files is limited
        kept = [next(m for e, m in sample.items() if is_image(e)) for sample in shard.values()]
        archive.names, archive.fields = archive.names[kept], archive.fields[kept]
    parsed = [parse_label(label, content, target_type) for content in contents]
    field = f" with the field {FIELDS[target_type]!r}" if label.endswith("json") else ""
    shown = [content.decode(errors="replace") for content in contents]
    where.refuse([one is None for one in parsed], f"have no valid {label}{field}", shown)
    return Samples(TarShards(archives), names, *map(list, zip(*parsed)))


def group_members(archive: TarArchive) -> dict[str, dict[str, int]]:
    """Return {key of a sample: {file extension: index of the member}}. The key is the member's path
    up to the first dot of its file name."""
    samples: dict[str, dict[str, int]] = {}
    for member, name in enumerate(archive.names):
        key, extension = split_name(os.fsdecode(name))
        samples.setdefault(key, {})[extension] = member
    return samples


def split_name(name: str) -> tuple[str, str]:
    """Split the path of a member at the first dot of its file name. Returns (key of the sample,
    extension)."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return f"{folder}{slash}{key}", extension


def parse_label(
    extension: str, content: bytes, target_type: str
) -> tuple[list[str], dict[str, Any]] | None:
    """Parse a label file of a shard. Returns (label, JSON object), or None if the file is invalid.

    The returned label is a list of one or several class names or numbers, as text. If the extension
    ends in "json", the file is a JSON object, and the label is in its field FIELDS[target_type].
    Otherwise, the file is the label as text, and the returned JSON object is {}.
    """
    try:
        text = content.decode("utf-8-sig").strip()
        record = json.loads(text) if extension.endswith("json") else {}
    except (ValueError, RecursionError):
        return None
    if len(content) > MAX_LABEL or not isinstance(record, dict):
        return None
    if not extension.endswith("json"):
        if target_type == "class":
            return [text], {}
        if target_type == "numbers":
            return text.split(), {}
        return [line for line in text.splitlines() if line.strip()], {}
    value = record.get(FIELDS[target_type])
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        return None
    return [str(one).strip() for one in values], record
