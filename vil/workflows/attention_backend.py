"""Select the backends (implementations) of a model's local attention and linear layers.

Rank 0 selects the backends for all ranks. A resumed run uses the backends that are stored in its
folder, even if `vil tune` has found faster ones.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.integrations.patch_attention import patch_grid
from vil.integrations.timm_attention import PatchedAttention
from vil.layers.attention import Attention
from vil.models.vision_longformer import MsViT
from vil.ops import BACKENDS, Case, choose, explain
from vil.ops.dispatch import CHOICES, DEFAULT, tuned
from vil.ops.linear_case import choose as choose_linear
from vil.ops.native import library
from vil.ops.qkv_attention import NATIVE
from vil.ops.tuning import tuner, tuning_cache
from vil.ops.tuning.linear_tuner import tune_linear
from vil.utils.atomic_write import replace_text
from vil.utils.errors import as_config_error
from vil.workflows.execution import Execution
from vil.workflows.linear_backend import LinearRequest, describe_linears, linear_requests

log = logging.getLogger(__name__)
FILE = "autotune.json"  # in the run's folder
LARGE = 1024  # tokens along a side of a large grid, as in stage 1 for an image of 4096 pixels


class BackendRequest(NamedTuple):
    """A local attention call that a stage of the model makes, and the backend requested for it.

    stage: number of the stage, from 1. case: properties of the call, such as shapes and dtype.
    """

    stage: int
    case: Case
    backend: str  # the name of a pinned backend, or "auto"
    modules: tuple[Attention, ...]  # the modules that make this call

    def __str__(self) -> str:
        return f"{self.call}, {self.phase}"

    @property
    def phase(self) -> str:
        return "training" if self.case.needs_grad else "evaluation"

    @property
    def call(self) -> str:
        """The request as text, without its phase."""
        window = self.case.window
        if self.case.is_layout:
            keys = f"w {window.size}, pattern {window.pattern}, density {window.density:.2f}"
        elif window.covers_grid:
            keys = "attention to all tokens"
        else:
            visible = {1: "the self chunk", 2: "the self chunk and one neighbor"}
            keys = f"w {window.size}, {visible.get(len(window.offsets), 'all nine chunks')}"
        return f"stage {self.stage}: {window.grid[0]} x {window.grid[1]} tokens, {keys}"


def attention_network(model: nn.Module) -> nn.Module:
    """Return the module with the attention layers: `model.attention_body` for a detector, otherwise
    the model itself."""
    return getattr(model, "attention_body", model)


def pads_images(model: nn.Module) -> bool:
    """Return whether a model has images of different sizes in a batch, which are padded: a detector
    or a segmentation model."""
    return getattr(model, "pads_images", attention_network(model) is not model)


def backend_requests(
    model: nn.Module, execution: Execution, *, training: bool = True
) -> list[BackendRequest]:
    """List a model's local attention calls in evaluation and, if `training` is set, in training.
    A
    patched model of timm counts as one stage. The list is empty for other models."""
    network, size = attention_network(model), execution.image_size
    spec = dict(batch=execution.batch_size, dtype=execution.dtype, device=execution.device.type)
    if isinstance(network, MsViT):
        spec["padded"] = pads_images(model)
        stages = [[block.attn for block in stage.blocks] for stage in network.stages]
        grids = network.grids((size, size))
    elif patched := [m for m in network.modules() if isinstance(m, PatchedAttention)]:
        stages, grids = [patched], [patch_grid(network, size)]
    else:
        return []
    requests = []
    for number, (attentions, grid) in enumerate(zip(stages, grids), start=1):
        modules: dict[tuple[Case, str], list[Attention]] = {}
        for attention in attentions:
            for case in attention.backend_cases(grid, training=training, **spec):
                modules.setdefault((case, attention.backend or "auto"), []).append(attention)
        requests += [BackendRequest(number, *call, tuple(users)) for call, users in modules.items()]
    return requests


@as_config_error
def select_attention_backends(
    model: nn.Module,
    execution: Execution,
    dist: DistInfo,
    *,
    training: bool,
    tune: bool = False,
    folder: Path | None = None,
    resuming: bool = False,
    copies: Sequence[nn.Module] = (),
    say: Callable[[str], None] = log.info,
) -> None:
    """Select the backends of attention and linear layers, log them, and write them to `folder`.

    All ranks get the same selection. A resumed run uses the backends stored in `folder`, the run's
    folder. Another run uses those in the user's tuning cache (see `vil tune`) and, for other calls,
    the default backends.

    training: whether to select backends for training too, not only for evaluation. tune: whether to
    time the backends of other calls instead, and to use the fastest (MODEL.VIT.MSVIT.TUNE). copies:
    copies of the model, such as its average, that get the same backends.

    Raises ConfigError if the config names a backend that cannot run.
    """
    requests, device = backend_requests(model, execution, training=training), execution.device
    automatic = [r for r in requests if r.backend == "auto"]
    network = attention_network(model)
    padded = pads_images(model)
    linears = linear_requests(network, execution, training=training, padded=padded)
    if tune and requests and not automatic:
        text = "MODEL.VIT.MSVIT.TUNE has no effect: the config already selects the backend %s"
        log.warning(text, requests[0].backend)
    CHOICES.clear()
    if device.type == "cpu" and (requests or linears):
        _load_native_on_all_ranks()
    selected: dict[str, str] = {}
    if dist.is_main:
        stored = _read_stored(folder) if resuming else None
        if stored is None:
            tuning_cache.load(device.type)
            buckets = {request.case.bucket() for request in (*automatic, *linears)}
            for bucket in CHOICES.keys() - buckets:
                del CHOICES[bucket]
        CHOICES.update({DEFAULT: NATIVE} if stored is None else {DEFAULT: "", **stored})
        if tune:
            _tune_missing(automatic, tuner.tune, say)
            if stored is None:  # a resumed run keeps its linear layers
                _tune_missing([r for r in linears if not r.case.unsupported()], tune_linear, say)
        _report(requests, say, resumed=stored is not None)
        for line in describe_linears(linears):
            say(line)
        defaults = {r.case.bucket(): choose(r.case) for r in automatic}
        defaults |= {r.case.bucket(): choose_linear(r.case) for r in linears}
        selected = defaults | CHOICES
    selected = distributed.broadcast_object(selected)
    CHOICES.clear()
    CHOICES.update(selected)
    if folder and dist.is_main:
        try:
            replace_text(folder / FILE, json.dumps(CHOICES, indent=1) + "\n")
        except OSError as error:
            text = "%s cannot be written (%s): a resumed run may select other attention backends"
            log.warning(text, folder / FILE, error.strerror or error)
    if padded:  # a detector's images have many sizes
        pin_for_all_sizes(requests)
        for copy in copies:
            for attention, own in zip(_attentions(model), _attentions(copy)):
                own.backend = attention.backend


def _attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def pin_for_all_sizes(requests: list[BackendRequest]) -> None:
    """Set a backend that supports all image sizes for each attention module of a detector.

    The backend selected for INPUT.IMAGE_SIZE is kept if it supports large token grids. A backend
    named in the config is always kept.
    """
    for request in requests:
        if request.case.needs_grad != requests[0].case.needs_grad:
            continue  # the training cases come first and decide, if there are any
        case = request.case
        large = replace(case, window=replace(case.window, grid=(LARGE, LARGE)))
        name = choose(case, request.backend)
        if name != request.backend and BACKENDS[name].unsupported(large):
            name = choose(large)
        for attention in request.modules:
            attention.backend = name


def _load_native_on_all_ranks() -> None:
    """Load the native library, or turn it off on all ranks if it cannot be loaded on one."""
    problem = "; ".join(library.prepare())
    if distributed.all_reduce_max(bool(problem)) and not problem:
        library.turn_off("it cannot be used on another rank")


def _report(
    requests: list[BackendRequest], say: Callable[[str], None], *, resumed: bool = False
) -> None:
    """Log the backend that is selected for each attention call, in one line if training and
    evaluation have the same. Also log a warning for each call whose tuned backend cannot run.

    say: function that logs a line. resumed: whether the backends are those of a run's folder.
    """
    for request in requests:
        case, wanted = request.case, CHOICES.get(request.case.bucket())
        if request.backend == "auto" and wanted and tuned(case) is None:
            entry = BACKENDS.get(wanted)
            why = "; ".join(entry.reasons_against(case)) if entry else "no backend has this name"
            log.warning("%s: the tuned backend %s is not used: %s", request, wanted, why)
    calls: dict[tuple[str, str], list[BackendRequest]] = {}  # by call and selected backend
    for request in requests:
        name = choose(request.case, request.backend)
        how = explain(request.case, request.backend)[name].removeprefix("chosen")
        backend = name + (how.replace("tuned", "as before") if resumed else how)
        calls.setdefault((request.call, backend), []).append(request)
    for (call, backend), same in calls.items():
        say(f"{call if len(same) > 1 else same[0]}: {backend}")


def _read_stored(folder: Path) -> dict[str, str] | None:
    """Read the selected backends from the file in a run's folder. Returns {bucket: backend name},
    or None if the file is missing or invalid. A bucket is the key that similar attention calls
    share, see `Case.bucket`."""
    file = folder / FILE
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        text = "%s, which lists the attention backends of this run, is ignored: %s"
        log.warning(text, file, error)
        return None
    if isinstance(kept, dict) and all(isinstance(name, str) for name in kept.values()):
        return kept
    log.warning("%s is ignored: expected a JSON object whose values are backend names", file)
    return None


def _tune_missing(
    requests: Sequence[BackendRequest | LinearRequest],
    tune: Callable[[Any], list[tuner.Trial]],
    say: Callable[[str], None],
) -> None:
    """Time backends for each call without an entry in CHOICES, the selected backends. Store the
    fastest in the user's tuning cache too.

    tune: function that measures the backends for a case, and stores the fastest in CHOICES. say:
    function that logs a line.
    """
    found = {}
    for request in requests:
        bucket = request.case.bucket()
        if bucket not in CHOICES:
            say(f"{request}: timing the backends")
            found[bucket] = trials = tune(request.case)
            for line in tuner.listing(trials):
                say(line)
    if found:
        tuning_cache.save(requests[0].case.device, found)
