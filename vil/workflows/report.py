"""Write the HTML report of a run, or a comparison of several runs."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from yacs.config import CfgNode

import vil
from vil.config import diff, get_config
from vil.config.defaults import leaves
from vil.config.dump_yaml import dump_value
from vil.data.workers import worker_errors
from vil.engine.checkpoint.save_load import resolve_link, step_of
from vil.engine.distributed import DistInfo
from vil.report.compare import ComparedMetric, ComparedRun, render_comparison
from vil.report.page import ModelCost, Page, Setting, render
from vil.report.run_record import RunRecord
from vil.tasks import TASKS, noun_of, task_for
from vil.tasks.base import Task, TaskReport
from vil.utils.atomic_write import TEXT
from vil.utils.errors import CheckpointError, ConfigError
from vil.utils.machine import now
from vil.utils.output_paths import replacing
from vil.workflows.analyze import analyze_cost
from vil.workflows.configure import Options, run_config
from vil.workflows.held_out import check_held_out
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
    changed = diff(cfg, get_config())
    page = Page(
        title=folder.resolve().name,
        record=record,
        settings=[
            Setting(key, dump_value(value), dump_value(changed[key][1]) if key in changed else None)
            for key, value in leaves(cfg).items()
        ],
        model=_count_cost(cfg, task),
        epochs=cfg.OPTIM.EPOCHS,
        made=_made(),
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


def compare_runs(folders: Sequence[Path], out: Path) -> None:
    """Write a comparison of the runs in `folders` to the HTML file `out`. It shows what the runs
    have logged; nothing is evaluated. Raises ConfigError if the runs have different tasks."""
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    configs = [get_config(folder / "config.yaml") for folder in folders]
    if len({cfg.TASK for cfg in configs}) > 1:
        tasks = ", ".join(f"{name} is {cfg.TASK}" for name, cfg in zip(names, configs))
        raise ConfigError(f"only runs of the same TASK can be compared, but {tasks}")
    tasks = [task_for(cfg, torch.device("cpu")) for cfg in configs]
    metric = tasks[0].metric
    others = [
        f"{name} selects its best checkpoint by {task.metric.name}"
        for name, task in zip(names, tasks)
        if task.metric.name != metric.name
    ]
    notes = [f"Compared by {metric.name}, but {', '.join(others)}."] if others else []
    for note in notes:
        log.warning("%s", note)
    declared = TASKS.entry(configs[0].TASK).facts.get("metrics", {})
    page = render_comparison(
        [
            ComparedRun(
                name,
                RunRecord.read(folder),
                {key: dump_value(value) for key, value in leaves(cfg).items()},
                _count_cost(cfg, task),
                cfg.OPTIM.EPOCHS,
            )
            for name, folder, cfg, task in zip(names, folders, configs, tasks)
        ],
        ComparedMetric(
            metric.name, metric.label or metric.name, metric.unit, metric.higher_is_better
        ),
        [ComparedMetric(name, *facts) for name, facts in declared.items()],
        notes=notes,
        made=_made(),
    )
    with replacing(out) as aside:
        aside.write_text(page, **TEXT)


def _made() -> str:
    """Return the footer of a page: when it was made, and by which version."""
    return f"Made by vil {vil.__version__}, {now()}."


def _count_cost(cfg: CfgNode, task: Task) -> ModelCost | str:
    """Return the cost of a run's model, or the reason why it is unknown."""
    if task.cost_remark:
        return task.cost_remark
    if not task.supports("cost"):
        return f"TASK {cfg.TASK} does not count the cost of a model."
    try:
        cost = analyze_cost(cfg)
    except ConfigError as error:
        return f"The model cannot be built here: {error}"
    return ModelCost(cost.parameters, cost.macs, [tuple(row) for row in cost.rows])


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
        check_held_out(cfg, inference.task, "val")
        inference.task.test_loaders(DistInfo())
        name = f"{checkpoint} checkpoint, step {step:,}"
        return inference.task.report(inference.model, inference.classes, name)
