"""Train small detectors from nothing, with a larger detector as the teacher and without one.

  python benchmarks/detector_distillation.py [--folder FOLDER] [--json FILE]   45 minutes

The teacher is scenes/mask_rcnn_vil_nano.yaml on 2,000 scenes. The students have half of its
channels, a block per stage, and a quarter of its scenes. All start from random weights. Students
are trained without a teacher, for as many epochs as with one and for more epochs, and with two
shares of the teacher in the loss: the default and that of PKD (arXiv:2207.02039), whose weights are
1 and 6. No other recipe was tried. Prints box AP of the last checkpoint on 400 other scenes. With
--folder, an interrupted comparison can be resumed.
"""

from pathlib import Path

from shared import compare_seeds, run_vil, train_variants

from vil.report.run_record import metrics

CONFIG = "scenes/mask_rcnn_vil_nano.yaml"
SEEDS = (0, 1)
EPOCHS = {"few": 8, "more": 12}
NARROW = "l1,h1,d16,n1,s1,g1,p4,f4,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0_l3,h4,d64,n1,s1,g1,p2,f3,a0"
FIXED = {
    "MODEL.MODEL_PATH": "",
    "MODEL.VIT.MSVIT.ARCH": NARROW,
    "DATA.KWARGS.train": 500,
    "EVAL.METRIC": "box_ap",
    "RUN.EVAL_EVERY": max(EPOCHS.values()),  # after the last epoch only
    "OPTIM.EPOCHS": EPOCHS["few"],
}


def compare(folder: Path) -> dict:
    """Train the teacher, and each student with each seed. Returns their box AP."""
    data, teacher = f"DATA.PATH={folder / 'data'}", folder / "teacher"
    run_vil("train", CONFIG, teacher, data, "MODEL.MODEL_PATH=", "--resume")
    lines = [line for line in metrics(teacher / "metrics.jsonl") if line["split"].startswith("val")]
    taught = {"DISTILL.TEACHER": str(teacher)}
    students = {
        "alone": {},
        "alone more epochs": {"OPTIM.EPOCHS": EPOCHS["more"]},
        "share 0.5": taught,
        "share 0.857": taught | {"DISTILL.SHARE": 0.857},
    }
    fixed = FIXED | {"DATA.PATH": str(folder / "data")}
    rows = train_variants(CONFIG, folder / "students", fixed, students, SEEDS)
    return {
        "seeds": SEEDS,
        "chosen": "nothing",
        "epochs": EPOCHS,
        "teacher": lines[-1]["box_ap"],
        "box_ap": {name: row.values for name, row in rows.items()},
    }


if __name__ == "__main__":
    compare_seeds(__doc__, "detector-distillation.json", compare, "box_ap")
