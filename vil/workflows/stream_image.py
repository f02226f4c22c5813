"""Predict one image of any size in bounded memory: `vil predict --stream`.

The image is normalized but not resized. With a scratch folder, the next call with the same
arguments resumes an interrupted call, and its result is bit-identical to that of an uninterrupted
call.

Shapes: H W image size, c channels.
"""

import fcntl
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vil.engine.evaluation import autocast
from vil.streaming import prepare
from vil.streaming.checks import check_outputs
from vil.streaming.forward import PreparedStream
from vil.streaming.images import open_pixels
from vil.streaming.journal import FileJournal
from vil.streaming.map_files import (
    CLASS_ENDINGS,
    ENDINGS,
    ConversionError,
    check_map_file,
    convert_map,
    create_map,
)
from vil.streaming.plan import parse_bytes
from vil.streaming.scaling import ScaleAndNormalize
from vil.streaming.store import check_scratch
from vil.tasks.base import ImageMeta
from vil.tasks.streamed_model import StreamedModel
from vil.utils.errors import ConfigError, SaveError, as_config_error, os_error_as
from vil.workflows.inference import InferenceModel
from vil.workflows.predict import NOT_FINITE

CHECK_SIDE = 512  # pixels of the crop that `check_crop` compares, at least
FLOATS = {torch.float64: np.float64, torch.float16: np.float16}  # of saved maps; default: float32
Report = Callable[[float, float], None]  # takes the share that is done, and the seconds that remain


@dataclass(frozen=True)
class StreamSettings:
    """Settings for streaming an image.

    memory: limit on the memory of tensors, in bytes or as text, such as "1GiB".
    scratch: folder for intermediate files. Without it, an interrupted call cannot be resumed.
    save: maps to save, as {name of the output, such as "stages.2": file}.
    """

    memory: int | str = "1GiB"
    scratch: Path | None = None
    save: Mapping[str, Path] = field(default_factory=dict)


class ImageStream:
    """Prediction of one image in bounded memory. Call `predict` to run the model.

    The image passes through the model in parts. image: path of the image, or an array (H, W, c).
    The constructor raises ConfigError or DataError if the task, the model, the image or a setting
    is not supported.
    """

    @as_config_error
    def __init__(self, source: InferenceModel, image: Any, settings: StreamSettings) -> None:
        self.source, self.image, self.settings = source, image, settings
        if settings.scratch is not None and not isinstance(image, str | Path):
            raise ConfigError(
                "an array cannot be streamed with a scratch folder: give the path of an image "
                "file, or set no scratch folder"
            )
        if not source.task.supports("stream_model"):
            raise ConfigError(
                f"TASK {source.cfg.TASK} cannot be streamed: call vil.stream on the backbone to "
                "compute its feature maps"
            )
        limit = parse_bytes(settings.memory)
        self.streamed: StreamedModel = source.task.stream_model(source.model)
        own = self.streamed.own_maps
        with self.autocast():
            self.prepared = self._prepare()
            for name, path in settings.save.items():
                if name not in self.prepared.shapes and name not in own:
                    raise ConfigError(
                        f"--save {name}: expected a feature map, but this output is a vector"
                    )
                check_map_file(path, CLASS_ENDINGS if name in own else ENDINGS)
                is_png = path.suffix.lower() == ".png"  # is encoded in memory
                if is_png and math.prod(self.size) * own[name].itemsize > limit:
                    raise ConfigError(
                        f"--save {name}={path}: a .png file of {self.size[0]} x {self.size[1]} "
                        f"pixels does not fit into --memory {settings.memory}: save a .tif file"
                    )
            self.prepared.planner.output_bytes = 0  # they are memory-mapped files
            resumable = settings.scratch is not None
            self.plan = self.prepared.planner.choose(limit, on_disk=resumable)
            self.description = str(self.plan)
            if after := self.streamed.plan(self.size, limit):
                self.description += f"\n{after}"
        if self.plan.scratch_bytes and settings.scratch is None:
            raise ConfigError(
                f"--memory {settings.memory} is too little to keep {self.plan.scratch_bytes} bytes "
                "of tokens: add --scratch DIR to keep them on disk, or raise --memory"
            )

    def _prepare(self) -> PreparedStream:
        cfg, network = self.source.cfg, self.streamed.network
        names = (*self.streamed.outputs, *self.settings.save)
        names = check_outputs(network, names, tuple(self.streamed.own_maps))
        pixels = open_pixels(self.image, "HWC", network.in_chans, cfg.INPUT.BACKGROUND)
        transform = ScaleAndNormalize(pixels, cfg.INPUT.MEAN, cfg.INPUT.STD, cfg.DATA.VALUE_RANGE)
        return PreparedStream(network, pixels, names, None, transform, pad=self.streamed.pad)

    def autocast(self) -> torch.autocast:
        """Return the autocast context manager of the task."""
        return autocast(self.source.task.device, self.source.task.amp_dtype)

    def predict(self, report: Report = lambda share, seconds: None) -> Any:
        """Stream the image and save the requested maps. Returns the task's prediction for the
        image, which has an `error` if the model's output is not finite. report: function that is
        called with (fraction of the work that is done, estimated remaining seconds)."""
        name = str(self.image) if isinstance(self.image, str | Path) else "array"
        meta = ImageMeta(name, self.size)
        task, save = self.source.task, self.settings.save
        with self._folder() as (folder, is_kept):
            journal = self._journal(folder) if is_kept else None
            files = {output: folder / f"{output}.npy" for output in self._maps}
            arrays = {o: create_map(file, *self._maps[o]) for o, file in files.items()}
            self.prepared.into = {o: arrays[o] for o in self.prepared.shapes}
            clock, first = Clock(report), self.streamed.network_share
            with os_error_as(SaveError, f"{folder}"), self.autocast():
                result = self.prepared.execute(
                    self.plan,
                    folder=folder,
                    journal=journal,
                    progress=lambda share: clock(first * share),
                )
                prediction = self.streamed.predict(
                    result, meta, arrays, lambda share: clock(first + (1 - first) * share)
                )
            for array in arrays.values():
                array.flush()
            self.prepared.into = {}
            del result, arrays
            for output, file in save.items():
                if prediction is not None or output in self.prepared.shapes:
                    convert_map(files[output], file, self.streamed.palette)
        return task.failed(name, NOT_FINITE) if prediction is None else prediction

    def _journal(self, folder: Path) -> FileJournal:
        return FileJournal(folder / "journal.pt", self.fingerprint)

    @property
    def is_resumed(self) -> bool:
        """Whether the scratch folder has results of an earlier process, from which `predict`
        resumes."""
        scratch = self.settings.scratch
        return scratch is not None and self._journal(Path(scratch, self._name)).is_resumed

    @property
    def _name(self) -> str:
        """Name of the subfolder in the scratch folder for the intermediate files of this image."""
        return f"vil-stream-{self.fingerprint[:16]}"

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the image."""
        return self.prepared.size

    @property
    def _maps(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{name: (shape, dtype)} of all maps: those of the network, and those to save that the task
        computes from them."""
        planner, own = self.prepared.planner, self.streamed.own_maps
        return {
            name: (shape, np.dtype(FLOATS.get(planner.dtype_of(name), np.float32)))
            for name, shape in self.prepared.shapes.items()
        } | {name: (self.size, own[name]) for name in self.settings.save if name in own}

    def check_crop(self) -> float:
        """Compare streaming with a normal forward pass, on a crop from the center of the image.

        The crop is streamed in horizontal strips of the smallest possible height. Returns the
        largest difference of the logits, relative to the largest absolute logit.
        """
        model, network = self.source.model, self.streamed.network
        height, width = self.size
        side = max(CHECK_SIDE, 2 * network.strides[-1])
        top, left = max(0, (height - side) // 2), max(0, (width - side) // 2)
        rows = self.prepared.image.read_map(top, min(top + side, height))
        crop = rows[..., left : min(left + side, width)]
        with torch.no_grad(), self.autocast():
            whole = model(crop)[0].double()
            run = prepare(network, crop[0], outputs=self.streamed.outputs, pad=self.streamed.pad)
            result = run.execute(run.planner.with_strips(1))
            strips = self.streamed.logits(result, tuple(crop.shape[-2:])).double()
        return ((whole - strips).abs().max() / whole.abs().max()).item()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 hash, as hex digits, of all that determines the intermediate files.

        This is the path, size and modification time of the image file, the weights and settings of
        the model, the transform, the plan, the autocast dtype, and the torch version.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.prepared.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        facts: list[Any] = [
            *(self.source.cfg.MODEL.dump(), self.prepared.model),
            *(repr(self.plan), self.prepared.image.transform),
            *(self.source.task.amp_dtype, torch.__version__),
        ]
        if isinstance(self.image, str | Path):
            path = Path(self.image)
            files = [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]
            states = (file.stat() for file in files)
            facts += [path.resolve(), *((state.st_size, state.st_mtime_ns) for state in states)]
        digest.update("\n".join(map(str, facts)).encode())
        return digest.hexdigest()

    @contextmanager
    def _folder(self) -> Iterator[tuple[Path, bool]]:
        """Context manager that creates a folder for intermediate files. Yields (folder, is_kept).

        The folder is in the scratch folder if one is set (is_kept is True), else it is temporary
        (is_kept is False). It is removed at the end of the block. After an error, a folder in the
        scratch folder is kept, so that the next call can resume. A temporary folder is kept only
        after a ConversionError, because it has a feature map that could not be converted.
        """
        scratch, save = self.settings.scratch, list(self.settings.save.values())
        if scratch is None:
            beside = save[0].resolve().parent if save else None
            path = Path(tempfile.mkdtemp(prefix=".vil-stream-", dir=beside))
            try:
                yield path, False
            except ConversionError:
                raise
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            shutil.rmtree(path, ignore_errors=True)
            return
        size = self.plan.scratch_bytes + sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self._maps.values()
        )
        path = check_scratch(scratch, size, self._name) / self._name
        with os_error_as(ConfigError, f"--scratch {scratch}"):
            path.mkdir(exist_ok=True)
            lock = (path / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"--scratch {scratch}: another process streams the same image to this folder: "
                    "wait until that process ends, or choose another folder"
                ) from None
            yield path, True
            shutil.rmtree(path, ignore_errors=True)


class Clock:
    """Clock that reports progress, with the remaining seconds estimated from the work done so far.

    report: called with (fraction of the work that is done, estimated remaining seconds).
    """

    def __init__(self, report: Report) -> None:
        self.report, self.began, self.first = report, time.monotonic(), 0.0

    def __call__(self, share: float) -> None:
        if not self.first:  # ignore the work of an earlier process
            self.began, self.first = time.monotonic(), share
            return
        seconds = time.monotonic() - self.began
        self.report(share, seconds * (1 - share) / max(share - self.first, 1e-9))


def describe_save(words: Sequence[str]) -> dict[str, Path]:
    """Parse words OUTPUT=FILE into {output: file}. Raises ConfigError for words of another form,
    and if an output or a file occurs twice."""
    save: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--save {word}: expected OUTPUT=FILE, such as stages.2=map.npy")
        if name in save:
            raise ConfigError(f"--save {name}: this output is given twice: give it only one file")
        if Path(file).resolve() in (each.resolve() for each in save.values()):
            raise ConfigError(
                f"--save {word}: another output is saved to the same file: choose another file"
            )
        save[name] = Path(file)
    return save
