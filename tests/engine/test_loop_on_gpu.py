"""What only a GPU can show: the loop does not wait for the device between two log lines."""

import pytest
import torch
from engine_toy import CLASSES, ToyLoader, metrics, toy_model, toy_optimizer

from vil.engine.distributed import Ranks
from vil.engine.run import Run
from vil.engine.state import State
from vil.engine.task import ClassificationTask
from vil.engine.train import train
from vil.optim import Ema, Schedule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16, torch.float16])
def test_no_step_waits_for_the_device_unless_it_logs(tmp_path, amp_dtype):
    """The batches are on the GPU already. torch raises at every blocking call while told to."""
    device = torch.device("cuda")
    loader = ToyLoader(steps_per_epoch=20)
    batches = [b.to(device, torch.contiguous_format) for b in loader.batches(0, 20)]
    loader.batches = lambda start, stop: batches[start:stop]
    task = ClassificationTask(
        device=device, test_loaders={"a": batches}, classes=CLASSES, amp_dtype=amp_dtype
    )
    model = toy_model(dropout=0.5).to(device)

    def forbid_waiting(model, progress):
        quiet = 2 <= progress.step % 10 < 9  # steps 9 and 19 log
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    with Run(tmp_path, Ranks(), device) as run:
        train(
            task,
            model,
            loader,
            toy_optimizer(model),
            Schedule("cosine", 0.01, 20, 1),
            torch.amp.GradScaler("cuda", enabled=amp_dtype is torch.float16),
            State(seed=0, world=1, batch_size=12, steps_per_epoch=20, optimizer="AdamW"),
            run=run,
            ranks=Ranks(),
            device=device,
            epochs=1,
            set_progress=forbid_waiting,
            accumulate=2,
            clip_grad=1.0,
            ema=Ema(model, 0.9),
        )
    assert [m["step"] for m in metrics(tmp_path)] == [10, 20, 20]
