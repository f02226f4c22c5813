"""Write the HTML report of a run: metrics, curves, evaluation, config and machine."""

import logging
from pathlib import Path

import torch

import vil
from vil.config import diff, get_config
from vil.config.defaults import leaves
from vil.config.dump_yaml import dump_value
from vil.data.workers import worker_errors
from vil.engine.checkpoint.save_load import resolve_link, step_of
from vil.engine.distributed import DistInfo
from vil.report.page import ModelCost, Page, Setting, render
from vil.report.run_record import RunRecord
from vil.tasks import noun_of, task_for
from vil.tasks.base import TaskReport
from vil.utils.atomic_write import TEXT
from vil.utils.errors import CheckpointError, ConfigError
from vil.utils.machine import now
from vil.utils.output_paths import replacing
from vil.workflows.analyze import analyze_cost
from vil.workflows.configure import Options, run_config
from vil.workflows.inference import load_model

log = logging.getLogger(__name__)


def write_report(
    folder: Path, out: Path, options: Options | None, *, checkpoint: str = "best"
) -> None:
    """Write the HTML report of the run in `folder` to the file `out`.

    Unless `options` is None, the report includes an evaluation of a checkpoint on the first set in
    DATA.VAL or, if DATA.VAL is empty, in DATA.TEST. options: changes to the config for this
    evaluation. checkpoint: "best" or "last".
    """
    cfg = get_config(folder / "config.yaml")
    task = task_for(cfg, torch.device("cpu"))
    if options and not task.supports("report"):
        log.warning(
            "the report of a %s shows only the metrics that training logged; for more, use "
            "vil evaluate",
            noun_of(cfg.TASK),
        )
        options = None
    own = _evaluate(folder, options, checkpoint) if options else TaskReport()
    record = RunRecord.read(folder)
    if task.cost_remark:
        cost = task.cost_remark
    elif not task.supports("cost"):
        cost = f"TASK {cfg.TASK} does not count the cost of a model."
    else:
        try:
            cost = analyze_cost(cfg)
            cost = ModelCost(cost.parameters, cost.macs, [tuple(row) for row in cost.rows])
        except ConfigError as error:
            cost = f"The model cannot be built here: {error}"
    changed = diff(cfg, get_config())
    page = Page(
        title=folder.resolve().name,
        record=record,
        settings=[
            Setting(key, dump_value(value), dump_value(changed[key][1]) if key in changed else None)
            for key, value in leaves(cfg).items()
        ],
        model=cost,
        epochs=cfg.OPTIM.EPOCHS,
        made=f"Made by vil {vil.__version__}, {now()}.",
        metric=task.metric.name,
        higher_is_better=task.metric.higher_is_better,
        label=task.metric.label,
        unit=task.metric.unit,
        columns=task.columns,
        cards=own.cards,
        sections=own.sections,
    )
    with replacing(out) as aside:
        aside.write_text(render(page), **TEXT)


def _evaluate(folder: Path, options: Options, checkpoint: str) -> TaskReport:
    """Evaluate the "best" or "last" checkpoint of the run. Returns its metrics and plots for the
    report page."""
    try:
        cfg, class_names = run_config(folder, options, checkpoint=checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: use --no-eval for a report without evaluation") from error
    step = step_of(resolve_link(folder / "checkpoints", checkpoint))
    with worker_errors():
        inference = load_model(cfg, class_names)
        log.info("%s", inference.report)
        inference.task.test_loaders(DistInfo())
        name = f"{checkpoint} checkpoint, step {step:,}"
        return inference.task.report(inference.model, inference.classes, name)
