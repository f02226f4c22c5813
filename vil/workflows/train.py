"""Start or resume a training run from a config."""

import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.config import diff, dump, get_config, override
from vil.config.defaults import leaves
from vil.config.plugins import file_digests
from vil.config.unused_keys import set_by_user
from vil.config.yaml_source import from_mapping
from vil.data.build import check_extras
from vil.data.classes import check_class_names, format_class_names, read_class_names
from vil.data.dataset import fingerprint, image_digests
from vil.data.workers import worker_errors
from vil.engine import distributed
from vil.engine.build import configure_device, process_group
from vil.engine.checkpoint.manager import CheckpointPolicy
from vil.engine.checkpoint.save_load import TrainObjects, TrainState, checkpoints, resolve_link
from vil.engine.checkpoint.save_load import resume as resume_state
from vil.engine.loop import Evaluation
from vil.engine.loop import train as train_loop
from vil.engine.preemption import PreemptionGuard
from vil.engine.run_dir import RunDir
from vil.engine.trackers import check_trackers, open_trackers
from vil.layers.attention import set_progress
from vil.optim.build import (
    build_optimization,
    build_schedule,
    optimizer_name,
    warn_long_average,
)
from vil.optim.optimizers import check_usable
from vil.report.curves import draw, plot_of
from vil.report.run_record import RunRecord, metrics
from vil.tasks import task_for, with_num_classes
from vil.tasks.cost import num_params
from vil.tasks.weight_files import find_weights
from vil.utils.console import echo_error
from vil.utils.errors import (
    CheckpointError,
    ConfigError,
    RunInUseError,
    StoppedError,
    as_config_error,
    in_python_words,
)
from vil.utils.global_state import preserve_global_state
from vil.utils.metric_format import format_pair
from vil.utils.plural import plural
from vil.workflows.attention_backend import select_attention_backends
from vil.workflows.configure import (
    Options,
    Overrides,
    as_options,
    make_config,
    saved_config,
)
from vil.workflows.execution import execution_of
from vil.workflows.final_test import evaluate_best
from vil.workflows.inference import Loaded, load_for_evaluation, open_test_sets
from vil.workflows.log_forwarding import forward_logs
from vil.workflows.prepare import prepare_for_training
from vil.workflows.resume_checks import adopt_saved, config_to_keep, fixed_values
from vil.workflows.source_weights import order_of_head, warn_other_normalization

POSITION = ("step", "epoch", "split", "wall")  # keys in metrics.jsonl that are no metrics

log = logging.getLogger(__name__)
running = threading.RLock()  # held by the thread that trains


@dataclass
class TrainResult:
    """Result of a training run.

    status: "finished", or "interrupted" if Ctrl-C stopped the run and its state was saved.
    step: number of finished training steps.
    best: best value of the task's metric, reached at step `best_step`; None without an evaluation.
    model: the model after the last step, on its device.
    metrics: {test set: {name: value}} of the last evaluation. If this call of `train` ran no
    evaluation, the last logged one is read. The log has only metrics that are numbers.
    reason: why the run stopped early (RUN.PATIENCE), or "".
    test_metrics: metrics of the best checkpoint on DATA.TEST, if DATA.VAL is set and the run is
    finished; otherwise {}.
    """

    status: str
    run_dir: Path
    step: int
    best: float | None
    best_step: int | None
    model: nn.Module
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""
    test_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)

    def history(self, split: str = "train") -> list[dict[str, Any]]:
        """Return the logged metrics of the run, with a dict for each logged step or evaluation.
        split: "train", "val/<set>" or "test/<set>"."""
        points = metrics(self.run_dir / "metrics.jsonl")
        return [point for point in points if point["split"] == split]

    @property
    def best_checkpoint(self) -> Path | None:
        """Folder of the best checkpoint; None if there is none."""
        return resolve_link(self.run_dir / "checkpoints", "best")

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the last checkpoint; None if there is none."""
        return resolve_link(self.run_dir / "checkpoints", "last")


@in_python_words
def train(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    output_dir: str | Path | None = None,
    data: str | Path | None = None,
    resume: bool = False,
    imports: Sequence[str] = (),
    preset: str | None = None,
    on_evaluation: Callable[[Evaluation], Any] | None = None,
) -> TrainResult:
    """Train a model from a config, and return the result.

    config: a file, a packaged config such as "digits/vil_nano.yaml", or a CfgNode.
    overrides: changes to the config: {"OPTIM.EPOCHS": 3} or ["OPTIM.EPOCHS=3"].
    output_dir, data: values for OUTPUT_DIR and DATA.PATH.
    resume: resume from the newest checkpoint in OUTPUT_DIR, if there is one. If `config` is None,
    the config saved in OUTPUT_DIR is used, if there is one.
    imports: Python files that register components.
    preset: "finetune", "small_data" or "scratch". Its values, which the files in
    configs/_presets_ explain, apply only to keys that neither `config` nor `overrides` set.
    on_evaluation: called on rank 0 after each evaluation during training with an `Evaluation`: the
    step, the epoch, the metrics of each test set, the run's folder, and whether it is the best one.
    Its result is ignored. An exception that it raises ends the run, after the checkpoint of this
    evaluation was saved if one is due, and is raised to the caller.

    Under torchrun, every process calls this function. The function restores the global state of the
    process before it returns: seeds, threads, logging and signal handlers.

    On Ctrl-C, the state is saved and the status is "interrupted". On SIGTERM, SIGUSR1 or SIGHUP,
    the state is saved and StoppedError is raised. Also raises ConfigError, DataError,
    CheckpointError and DivergedError of `vil.errors`.
    """
    overrides = as_options(overrides)
    if resume and config is None:
        config = saved_config(Options(overrides, {"OUTPUT_DIR": output_dir}))
        if config is None:
            log.warning("resume=True: no config.yaml is there, so the config is the default")
    cfg = make_config(
        config, overrides, output_dir=output_dir, data=data, imports=imports, preset=preset
    )
    return train_config(cfg, resume=resume, on_evaluation=on_evaluation)


def train_config(
    cfg: CfgNode,
    *,
    resume: bool = False,
    max_steps: int | None = None,
    synthetic: Mapping[str, Dataset] | None = None,
    on_evaluation: Callable[[Evaluation], Any] | None = None,
) -> TrainResult:
    """Train from a frozen config, and resume if OUTPUT_DIR has checkpoints.

    OUTPUT_DIR is created only after all objects are built. resume, on_evaluation: see `train`.
    max_steps: step at which to stop; None for no limit. synthetic: datasets to use instead of the
    config's, as {"train": dataset, "val": dataset}. Raises ConfigError if OUTPUT_DIR holds a run
    and `resume` is not set.
    """
    # what can be checked without building anything
    check_encoding(leaves(cfg))
    folder, bad_file = Path(cfg.OUTPUT_DIR), Path(cfg.OUTPUT_DIR, "bad_samples.txt")
    resuming = check_folder(folder, resume)
    optimizer = optimizer_name(cfg.OPTIM.OPT, use_larc=cfg.SOLVER.USE_LARC)
    as_config_error(check_usable)(optimizer)
    check_trackers(cfg.LOG.TRACKERS)
    cfg, changes = with_num_classes(cfg, trains=True), []
    batch_size = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE  # images per step over all ranks
    if resuming and (folder / "config.yaml").is_file():
        cfg, changes = adopt_saved(cfg, get_config(folder / "config.yaml"))
    with ExitStack() as stack:
        enter = stack.enter_context
        # the process
        if not running.acquire(blocking=False):
            raise ConfigError(
                "another thread of this process trains, and both would draw from the same random "
                "generators: wait for it, or use processes (vil sweep)"
            )
        stack.callback(running.release)
        enter(preserve_global_state())
        device = configure_device(cfg)
        dist = enter(process_group(cfg.DISTRIBUTED_BACKEND, device))
        hang, grace = cfg.RUN.HANG_SECONDS, cfg.RUN.GRACE_SECONDS
        guard = enter(PreemptionGuard(dist, hang_seconds=hang, grace_seconds=grace))
        logs = enter(forward_logs(dist.is_main))

        # the task, its model and its data
        task = task_for(cfg, device)
        if not synthetic:
            check_extras([*cfg.DATA.TRAIN, *cfg.DATA.VAL, *cfg.DATA.TEST])
        model = task.build_model(load_pretrained=not (resuming or cfg.MODEL.MODEL_PATH))
        if resuming:
            task.class_names = read_class_names(folder / "classes.txt")
        train_set = synthetic["train"] if synthetic else None
        loader = task.train_loader(dist, bad_file=bad_file, dataset=train_set)
        check_class_names(loader.classes, ", ".join(cfg.DATA.TRAIN))
        weights = None
        if cfg.MODEL.MODEL_PATH and not resuming:
            weights = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
            warn_other_normalization(cfg, weights)
            if not synthetic and (names := order_of_head(cfg, weights, loader.classes)):
                task.class_names = names  # the training set gets the order of the head
                loader = task.train_loader(dist, bad_file=bad_file)
        task.class_names = loader.classes
        if cfg.DATA.VAL and not synthetic:
            open_test_sets(task, dist)  # used after the last step: fail now if missing
        test_sets = {"synthetic": synthetic["val"]} if synthetic else None
        task.test_loaders(dist, bad_file=bad_file, datasets=test_sets)
        if weights:
            log.info("weights of %s: %s", weights, task.load_weights(model, weights, strict=False))
        elif (cfg.FINETUNE.HEAD != "keep" and not resuming) and (
            "FINETUNE.HEAD" in set_by_user(cfg) or not cfg.MODEL.PRETRAINED
        ):
            log.warning("FINETUNE.HEAD has no effect without weights in MODEL.MODEL_PATH")
        names = ["synthetic images"] if synthetic else cfg.DATA.TRAIN
        for line in describe(names, model, loader, task.test_sets, batch_size):
            log.info("%s", line)
        cfg = override(cfg, list(from_mapping(task.learned_settings)))

        # the optimization
        execution = execution_of(cfg, device, dist.world)
        model, ema = prepare_for_training(
            model,
            execution,
            dist,
            strategy=cfg.DISTRIBUTED.STRATEGY,
            optimizer=optimizer,
            ema_decay=cfg.OPTIM.EMA,
        )
        optim = build_optimization(cfg, model, device)
        schedule = build_schedule(cfg, optim.name, optim.lr, loader.steps_per_epoch)
        if not synthetic:
            warn_long_average(cfg, loader.steps_per_epoch)

        # the folder of the run, and its last checkpoint
        run = enter(RunDir(folder, dist, device))
        enter(worker_errors())
        recheck_folder(run, resuming)
        if run.writes and not resuming:  # what an earlier run left that ended before a checkpoint
            bad_file.unlink(missing_ok=True)
        # say_once: the final test builds the model again, and would repeat log lines, such as the
        # selected backends
        logs.open(run.log.say_once if dist.is_main else echo_error)
        kept_cfg = config_to_keep(cfg, distributed.unwrap(model))
        state = TrainState(
            seed=cfg.SEED,
            world=dist.world,
            batch_size=batch_size,
            steps_per_epoch=loader.steps_per_epoch,
            optimizer=optim.name,
            data=fingerprint(loader.samples.dataset),
            images=image_digests(loader.samples.dataset),
            fixed=fixed_values(kept_cfg),
            imports=file_digests(cfg.IMPORTS),
            metric=cfg.EVAL.METRIC,
            test_set=next(iter(task.test_sets), ""),
        )
        objects = TrainObjects(model, optim.optimizer, optim.scaler, ema)
        state = resume_state(
            run.checkpoints,
            state,
            objects,
            dist=dist,
            say=run.log.say,
            allow_changes=cfg.RUN.ALLOW_CHANGES,
        )
        for line in changes if dist.is_main else ():
            log.warning(line)
        select_attention_backends(
            model,
            execution,
            dist,
            training=True,
            tune=cfg.MODEL.VIT.MSVIT.TUNE,
            folder=folder,
            resuming=resuming,
            copies=[ema.model] if ema else [],
            say=run.log.say_once,
        )
        run.write("config.yaml", dump(kept_cfg))
        shown = {key: now for key, (now, _) in diff(kept_cfg, get_config()).items()}
        run.log.open_trackers = partial(open_trackers, cfg.LOG.TRACKERS, folder, shown)
        run.write("classes.txt", format_class_names(loader.classes))

        def load_best(path: Path) -> Loaded:
            words = [f"MODEL.MODEL_PATH={path}", "FINETUNE.HEAD=keep", "EVAL.FAST=False"]
            return load_for_evaluation(override(kept_cfg, words), device, dist, loader.classes)

        # the steps
        status, tests, metric = "finished", {}, task.metric
        try:
            state = train_loop(
                task,
                loader,
                objects,
                schedule.lr_at,
                state,
                run=run,
                guard=guard,
                epochs=cfg.OPTIM.EPOCHS,
                policy=CheckpointPolicy(
                    eval_every=cfg.RUN.EVAL_EVERY,
                    save_every=cfg.RUN.SAVE_EVERY,
                    save_steps=cfg.RUN.SAVE_STEPS,
                    keep=cfg.RUN.KEEP,
                    keep_every=cfg.RUN.KEEP_EVERY,
                    max_failed_saves=cfg.RUN.MAX_FAILED_SAVES,
                ),
                set_progress=set_progress,
                accumulate=cfg.OPTIM.ACCUMULATE,
                clip_grad=cfg.OPTIM.CLIP_GRAD,
                drop_on_plateau=cfg.OPTIM.DROP_FACTOR if cfg.OPTIM.VAL else 0.0,
                patience=cfg.RUN.PATIENCE,
                min_delta=cfg.RUN.MIN_DELTA,
                max_bad_steps=cfg.RUN.MAX_BAD_STEPS,
                log_freq=cfg.LOG_FREQ,
                max_steps=max_steps,
                draw=partial(draw, metric=plot_of(metric.name, metric.label, metric.unit)),
                on_evaluation=on_evaluation,
            )
            if cfg.DATA.VAL and max_steps is None:
                between = guard.check_all_ranks
                tests = evaluate_best(run, state, cfg.DATA.TEST, load_best, between=between)
            if run.begun and max_steps is None:
                if task.hint:
                    run.log.say(f"hint: {task.hint}")
                run.log.say(describe_end(run, state, metric.name))
                run.log.say(f"next: vil report {shlex.quote(str(run.folder))}")
        except StoppedError as stop:
            if stop.state != "interrupted":
                raise
            status, state = "interrupted", stop.train_state or state
            run.ended_by = stop
        return TrainResult(
            status=status,
            run_dir=folder.absolute(),
            step=state.step,
            best=state.best,
            best_step=state.best_step,
            model=distributed.unwrap(model),
            metrics=run.log.last_evaluation or read_last_evaluation(folder),
            reason=run.reason,
            test_metrics=tests,
        )


def check_folder(folder: Path, resume: bool) -> bool:
    """Return whether the folder of a run has checkpoints to resume from.

    Raises ConfigError if the folder holds a run and `resume` is not set, and CheckpointError if it
    had checkpoints that are gone.
    """
    has_checkpoints = any(folder.glob("checkpoints/step-*"))
    if not has_checkpoints and RunRecord.read(folder).status.get("checkpoint"):
        raise CheckpointError(
            f"{folder} has the log of a run, but its checkpoints are gone: restore "
            f"{folder / 'checkpoints'}, or choose another --output_dir"
        )
    has_log = next(metrics(folder / "metrics.jsonl"), None) is not None
    if not resume and (has_checkpoints or has_log):
        raise ConfigError(
            f"{folder} already holds a run: add --resume to continue it, "
            "or choose another --output_dir"
        )
    return bool(checkpoints(folder / "checkpoints"))


def recheck_folder(run: RunDir, resuming: bool) -> None:
    """Raise RunInUseError on all ranks if another run has written checkpoints to this run's folder
    since this run started. Log a warning if the folder has the log of an earlier run that ended
    without a checkpoint."""
    if distributed.broadcast_object(bool(checkpoints(run.checkpoints)) != resuming):
        raise RunInUseError(
            f"{run.folder} was written by another run in the meantime: choose another "
            "--output_dir, or add --resume to continue the other run"
        )
    if not resuming and next(metrics(run.folder / "metrics.jsonl"), None):
        run.log.say("WARNING an earlier run ended before its first checkpoint: starting at step 0")


def describe(
    names: Sequence[str], model: nn.Module, loader: Any, tests: Mapping[str, Any], batch: int
) -> list[str]:
    """Describe the model's size and the datasets in a few lines. names: names of the training sets.
    loader: the training loader. tests: {name of a test set: its loader}. batch: images per step."""
    images = len(loader.samples.dataset)
    sets = ", ".join(f"{name} {plural(test.num_samples, 'image')}" for name, test in tests.items())
    classes = plural(len(loader.classes), "class", "classes")
    left_out = plural(images % batch, "image is", "images are")
    return [
        f"the model has {num_params(model):,} parameters",
        f"train on {', '.join(names)}: {plural(images, 'image')} of {classes}",
        f"an epoch has {plural(loader.steps_per_epoch, 'step')} of {plural(batch, 'image')}; "
        f"{left_out} left out",
        f"evaluate on {sets}",
    ]


def read_last_evaluation(folder: Path) -> dict[str, dict[str, float]]:
    """Return {test set: metrics} of the last evaluation that a run logged, or {} if there is
    none."""
    sets = RunRecord.read(folder).evaluations()
    last = max((points[-1]["step"] for points in sets.values()), default=None)
    return {
        name: {key: value for key, value in points[-1].items() if key not in POSITION}
        for name, points in sets.items()
        if points[-1]["step"] == last
    }


def describe_end(run: RunDir, state: TrainState, metric: str) -> str:
    """Describe in one line how a run ended: its status and its best checkpoint. metric: name of
    the metric that selects the best checkpoint."""
    per_epoch, best = state.steps_per_epoch, "no best checkpoint"
    if state.best is not None:
        best = f"best {format_pair(metric, state.best)} at epoch {state.best_step / per_epoch:.4g}"
    ended = "stopped early" if run.reason else "finished"
    epochs = "1 epoch" if state.step == per_epoch else f"{state.step / per_epoch:.4g} epochs"
    return f"{ended} after {epochs}: {best}"


def check_encoding(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config value cannot be encoded as UTF-8. The config file that the run
    saves would otherwise be unreadable. settings: {config key: value}."""
    for key, value in settings.items():
        try:
            "".join(map(str, value if isinstance(value, tuple | list) else [value])).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{key}: {value!r} cannot be encoded as UTF-8: set PYTHONUTF8=1 or, if the file or "
                "folder has a name in another encoding, rename it"
            ) from None
