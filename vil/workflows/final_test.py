"""Evaluate the best checkpoint of a finished run on its test sets.

The checkpoint was selected on the validation sets, so its metrics on these sets are too optimistic.
The test sets had no influence on the run.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vil.engine.checkpoint.save_load import TrainState, resolve_link, step_of
from vil.engine.distributed import broadcast_object
from vil.engine.run_dir import RunDir
from vil.utils.json_text import read_dict, to_json
from vil.workflows.inference import Loaded, open_test_sets

RESULTS = "test_results.json"


def evaluate_best(
    run: RunDir,
    state: TrainState,
    names: Sequence[str],
    load: Callable[[Path], Loaded],
    *,
    between: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """Evaluate the best checkpoint of a run on its test sets, and return {test set: metrics}.

    If the run averages its weights, the averaged weights are evaluated. The metrics are logged and
    written to test_results.json. If this file already has results of the same checkpoint and sets,
    these are returned instead. Returns {} if the run has no best checkpoint. All ranks must call
    this function, and all get the same metrics.

    state: the run's final state. names: names of the test sets. load: function that loads a
    checkpoint. between: function that is called before each batch.
    """
    best = broadcast_object(resolve_link(run.checkpoints, "best") if run.dist.is_main else None)
    if best is None:
        return {}
    known = broadcast_object(read_results(run, best.name, names) if run.dist.is_main else None)
    if known is not None:
        return known
    loaded = load(best)
    task, model = loaded.task, loaded.model
    open_test_sets(task, run.dist, bad_file=run.folder / "bad_samples.txt")
    results = task.evaluate(model, between)
    if not run.begun:  # the run was stopped after its last step
        sizes = dict(steps_per_epoch=state.steps_per_epoch, batch_size=state.batch_size)
        run.log.begin(state.step, state.step, **sizes)
    run.log.results(step_of(best), "test", results, task.metric.name)
    run.write(RESULTS, to_json({"checkpoint": best.name, "metrics": results}, indent=1) + "\n")
    return results


def _restore_nan(value: Any) -> Any:
    """Replace None by NaN in nested dicts and lists, because `to_json` stores NaN as null."""
    if isinstance(value, dict):
        return {name: _restore_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_restore_nan(inner) for inner in value]
    return math.nan if value is None else value


def read_results(
    run: RunDir, checkpoint: str, names: Sequence[str]
) -> dict[str, dict[str, Any]] | None:
    """Return the metrics in test_results.json. Returns None if the file cannot be read, or if its
    metrics are those of another checkpoint or of other test sets.

    checkpoint: name of the evaluated checkpoint. names: names of the test sets.
    """
    saved = read_dict(run.folder / RESULTS)
    metrics = saved.get("metrics")
    if saved.get("checkpoint") != checkpoint or not isinstance(metrics, dict):
        return None
    return _restore_nan(metrics) if metrics.keys() == set(names) else None
