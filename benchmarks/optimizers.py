"""Compare six optimizers on the scanned digits, each at its own learning rate.

  python benchmarks/optimizers.py [--folder FOLDER] [--json FILE]

The learning rate and weight decay of each optimizer are selected among the CHOICES below, by top-1
after the last epoch on a held-out fifth of the training digits (seed 10). Each optimizer then
trains a model on all training digits with three other seeds. Prints top-1 after the last epoch on
the 360 validation digits. All runs have the same number of epochs. With --folder, an interrupted
comparison can be resumed.
"""

from pathlib import Path

from shared import compare_seeds, train_variants

EPOCHS = 6
SEEDS = (0, 1, 2)
CONFIG = "digits/vil_nano.yaml"
# {optimizer: pairs (learning rate, weight decay) to try}. For Lion, the paper (arXiv:2302.06675)
# recommends a learning rate that is 3 to 10 times lower than AdamW's, and a weight decay that is as
# many times higher. SGD and LAMB have their usual small weight decays.
CHOICES = {
    "adamw": [(rate, 0.05) for rate in (7e-4, 2e-3, 5e-3)],
    "sgd": [(rate, 1e-4) for rate in (0.02, 0.07, 0.2)],
    "timm/lion": [(rate, 0.3) for rate in (1e-4, 3e-4, 9e-4)],
    "timm/nadamw": [(rate, 0.05) for rate in (7e-4, 2e-3, 5e-3)],
    "timm/muon": [(rate, 0.05) for rate in (2e-3, 6e-3, 2e-2)],
    "lamb": [(rate, 0.02) for rate in (3e-3, 8e-3, 2e-2)],
}


def settings(optimizer: str, rate: float, decay: float) -> dict:
    """Return the config keys for an optimizer with a learning rate and a weight decay."""
    keys = {"OPTIM.OPT": optimizer, "OPTIM.LR": rate, "OPTIM.WD": decay}
    return keys | {"SOLVER.MIN_LR": rate / 100}


def compare(folder: Path) -> dict:
    """Select the settings of each optimizer, train with them, and return all results."""
    tried = {
        f"{optimizer} {rate:g}": settings(optimizer, rate, decay)
        for optimizer, choices in CHOICES.items()
        for rate, decay in choices
    }
    fixed = {"OPTIM.EPOCHS": EPOCHS}
    held_out = train_variants(
        CONFIG, folder / "choice", fixed | {"DATA.VAL_FRACTION": 0.2}, tried, (10,)
    )
    chosen = {
        optimizer: max(choices, key=lambda choice: held_out[f"{optimizer} {choice[0]:g}"].metric)
        for optimizer, choices in CHOICES.items()
    }
    final = {optimizer: settings(optimizer, *choice) for optimizer, choice in chosen.items()}
    rows = train_variants(CONFIG, folder / "final", fixed, final, SEEDS)
    return {
        "epochs": EPOCHS,
        "seeds": SEEDS,
        "held_out_top1": {name: row.metric for name, row in held_out.items()},
        "chosen": {name: {"lr": lr, "wd": wd} for name, (lr, wd) in chosen.items()},
        "top1": {name: row.values for name, row in rows.items()},
    }


if __name__ == "__main__":
    compare_seeds(__doc__, "optimizers-digits.json", compare, "top1")
