"""Commands and options that the command line no longer has. They are usage errors."""

import itertools
from collections.abc import Sequence

REMOVED = {  # {command, or command and option: what to do instead}
    "analyze --batch": "it belonged to --layout",
    "analyze --layout": "vil benchmark model --profile lists the layout copies",
    "benchmark attention --max-bytes": "backends that do not fit in memory are left out",
    "benchmark attention --plot": "plot the numbers in attention.csv, which is in the folder --out",
    "benchmark deploy": "use python benchmarks/deploy.py, which has the same options",
    "detect evaluate": "use vil evaluate --run DIR",
    "detect predict": "use vil predict --run DIR",
    "detect train": "use vil train --config-file coco/mask_rcnn_vil_tiny_1x.yaml",
    "predict --oof": "use --out-of-fold",
    "sweep --list": "use --table for the states and results, or --dry-run to check the configs too",
    "sweep --task": "submit the unfinished runs again with --slurm",
    "visualize pattern --sw_exact": "use --sw-exact",
}


def describe_removed(command: str, words: Sequence[str]) -> str | None:
    """Return a sentence that says what to do instead of a removed command or option; None if the
    command line has none. words: the arguments of the command."""
    options = itertools.takewhile(lambda word: word != "--", words)
    for name in (command, *(f"{command} {option.partition('=')[0]}" for option in options)):
        if name in REMOVED:
            return f"vil {name} was removed: {REMOVED[name]}"
    return None
