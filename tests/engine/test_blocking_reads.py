"""Between two log lines nothing synchronizes with the device: no value is read back."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import vil
from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import (
    CLASSES,
    CPU,
    ToyLoader,
    held_out,
    metrics,
    toy_model,
    toy_optimizer,
)
from vil.config import get_config
from vil.data.batch import Batch
from vil.engine import nonfinite
from vil.engine.checkpoint.manager import CheckpointPolicy
from vil.engine.checkpoint.save_load import TrainObjects, TrainState
from vil.engine.distributed import DistInfo
from vil.engine.loop import train
from vil.engine.preemption import PreemptionGuard
from vil.engine.run_dir import RunDir
from vil.layers.attention import TrainStep, set_progress
from vil.optim import Ema, Schedule

STEPS, EVERY = 20, 10
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")


def train_toy(folder, device, begin_step, amp_dtype=None):
    """One epoch of 20 steps in float32, that logs every ten; the batches are on the device."""
    loader = ToyLoader(steps_per_epoch=STEPS)
    batches = [as_single(b, device) for b in loader.batches(0, STEPS)]
    loader.batches = lambda start, stop: iter(batches[start:stop])
    tests = {"a": [as_single(b, device) for b in held_out(30)]}
    task = ClassificationTask(
        device=device, test_sets=tests, num_classes=CLASSES, amp_dtype=amp_dtype
    )
    model = toy_model(dropout=0.5).float().to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)
    objects, dist = TrainObjects(model, toy_optimizer(model), scaler, Ema(model, 0.9)), DistInfo()
    with PreemptionGuard(dist) as guard, RunDir(folder, dist, device) as run:
        train(
            task,
            loader,
            objects,
            Schedule("cosine", 0.01, STEPS, 1).lr_at,
            TrainState(seed=0, world=1, batch_size=12, steps_per_epoch=STEPS, optimizer="AdamW"),
            run=run,
            guard=guard,
            epochs=1,
            policy=CheckpointPolicy(),
            set_progress=lambda model, progress: begin_step(progress.step),
            accumulate=2,
            clip_grad=1.0,
            log_freq=EVERY,
        )
    assert [m["step"] for m in metrics(folder)] == [10, 20, 20]


def as_single(batch, device):
    batch = dataclasses.replace(batch, images=batch.images.float())
    return batch.to(device, torch.contiguous_format)


class Finished:
    """A CUDA event, on a machine without one: what was copied is there at the next step."""

    def record(self):
        self.step = len(begun)

    def synchronize(self):
        assert len(begun) > self.step, "the flags of this very step are waited for"


begun: list[int] = []  # the reads of each step that has begun


@pytest.fixture
def counted(monkeypatch):
    """Every read of a tensor is counted, but those of flags that were copied a step before."""
    begun.clear()
    copies = []

    def counting(name, plain):
        def read(self, *args, **kwargs):
            if begun and not any(self is copy for copy in copies):
                begun[-1] += 1
            return plain(self, *args, **kwargs)

        return read

    def pinned(*size, pin_memory=False, **kwargs):
        made = empty(*size, **kwargs)
        if pin_memory:
            copies.append(made)
        return made

    for name in READS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)), raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Finished)
    init = nonfinite.DelayedFlags.__init__

    def on_an_accelerator(self, device):
        init(self, device)
        self.is_delayed = True

    monkeypatch.setattr(nonfinite.DelayedFlags, "__init__", on_an_accelerator)
    return begun


def test_a_step_reads_nothing_back_unless_it_logs(counted, tmp_path):
    """As on an accelerator: the flags that tell of bad steps and signals come a step late."""
    train_toy(tmp_path, CPU, lambda step: counted.append(0))
    logging = [EVERY - 1, STEPS - 1]
    assert [step for step, reads in enumerate(counted) if reads] == logging
    assert counted[EVERY - 1] <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16, torch.float16])
def test_no_step_waits_for_the_gpu_unless_it_logs(tmp_path, amp_dtype):
    """torch raises at every blocking call while told to."""

    def forbid_waiting(step):
        quiet = 2 <= step % EVERY < EVERY - 1
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    train_toy(tmp_path, torch.device("cuda"), forbid_waiting, amp_dtype)


class CopiesFromTheHost(TorchDispatchMode):
    """Records operators with an output on another device than a tensor argument."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        inputs = [x for x in args if isinstance(x, Tensor) and x.ndim]
        if isinstance(out, Tensor) and any(x.device != out.device for x in inputs):
            self.found.append(operator)
        return out


@pytest.mark.parametrize("backend", ["triton", "masked"])
@pytest.mark.parametrize("mode", [0, 1])
def test_a_forward_pass_on_a_gpu_copies_nothing_from_the_host(backend, mode):
    """On fake tensors, which need no GPU. Autocast needs one."""
    options = [f"MODEL.VIT.MSVIT.BACKEND={backend}", f"MODEL.VIT.MSVIT.MODE={mode}"]
    options.append("DATA.NUM_CLASSES=9")
    model = vil.build_model(get_config("imagenet/vil_small_rpb.yaml", options))
    set_progress(model, TrainStep())
    gpu = torch.device("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty(p.shape, device=gpu) for name, p in model.named_parameters()}
        task = ClassificationTask(
            device=gpu, test_sets={}, num_classes=9, class_weights=torch.ones(9)
        )
        images = torch.empty(2, 3, 224, 224, device=gpu)
        batch = Batch(images, torch.empty(2, dtype=torch.int64, device=gpu), torch.arange(2))
        with CopiesFromTheHost() as copies:
            loss = task.loss(lambda x: torch.func.functional_call(model, weights, (x,)), batch)
    assert loss.value.device.type == "cuda"
    assert copies.found == []
