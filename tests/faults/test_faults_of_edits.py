"""Resume with an edited config: allowed differences are logged, others are refused."""

import re
import shutil

import pytest

from tests.common.faults.real_runs import begin, end_all, saved_step, wait_for_end
from tests.common.faults.records import record
from tests.common.small_runs import TINY, draw_pictures, vil

MSVIT = "MODEL.VIT.MSVIT"
OTHER_ARCH = f"{MSVIT}.ARCH=l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n2,s0,g1,p2,f3,a0"
BASE = (
    *TINY, "OPTIM.OPT=adamw", "OPTIM.LR=1e-3", "OPTIM.EMA=0.9", "RUN.SAVE_STEPS=1",
    "RUN.EVAL_EVERY=2",
)  # fmt: skip
END, KILLED = 8, 7
# Allowed edits. Exactly the edited keys must be logged.
ALLOWED = [
    ["OPTIM.LR=2e-3"],
    ["SEED=1"],
    ["OPTIM.EPOCHS=3"],
    ["OPTIM.EPOCHS=1"],  # fewer than are done
    ["OPTIM.WD=0.1", "OPTIM.CLIP_GRAD=1.0"],
    ["OPTIM.EMA=0.0"],
    ["SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=1"],
    ["AUG.MIXUP_PROB=0.5", "AUG.MIXUP=0.8", "LOSS.LABEL_SMOOTHING=0.1"],
    ["MODEL.VIT.DROP=0.1", "MODEL.VIT.DROP_PATH=0.0", f"{MSVIT}.MODE=1"],
    ["MODEL.GRAD_CHECKPOINT=True", "DATALOADER.WORKERS=1"],
    ["AMP.ENABLED=True", "AMP.DTYPE=float16"],
    ["DATA.TEST=[fake,folder]", "DATA.CLASSES=by_position"],
    ["FINETUNE.FREEZE_STAGES=1"],
    ["DISTRIBUTED.STRATEGY=fsdp", "RUN.SAVE_STEPS=2"],
]
# Refused edits and their messages: the keys with both values, or the value in the checkpoint.
REFUSED = {
    ("DATALOADER.BSZ=8",): "DATALOADER.BSZ 16 (now 8)",
    ("OPTIM.ACCUMULATE=2",): "OPTIM.ACCUMULATE 1 (now 2)",
    ("OPTIM.OPT=sgd",): "OPTIM.OPT 'adamw' (now 'sgd')",
    ("OPTIM.OPT=sgd", "SOLVER.USE_LARC=True"): "SOLVER.USE_LARC False (now True)",
    ("OPTIM.LR=2e-3", "OPTIM.OPT=sgd"): "started with OPTIM.OPT 'adamw' (now 'sgd'): ",
    ("DATA.TRAIN=[folder]",): "DATA.TRAIN ('fake',) (now ('folder',))",
    ("DATA.NUM_CLASSES=5",): "DATA.NUM_CLASSES 4 (now 5)",
    ("DATA.KWARGS.n=80",): "steps_per_epoch 4, this run has 5",
    ("DATA.KWARGS.n=70",): "was trained on 64 samples",  # other images, in as many steps
    ("INPUT.IMAGE_SIZE=64",): "INPUT.IMAGE_SIZE 32 (now 64)",
    ("AUG.REPEATED_AUG=True",): "AUG.REPEATED_AUG False (now True)",
    ("MODEL.ARCH=resnet18",): "MODEL.ARCH 'msvit' (now 'resnet18')",
    ("MODEL.VIT.AVG_POOL=True",): "MODEL.VIT.AVG_POOL False (now True)",
    (OTHER_ARCH,): f"{OTHER_ARCH.partition('=')[2]}')",
    (f"{MSVIT}.ATTN_TYPE=full",): "ATTN_TYPE 'longformer' (now 'full')",
    (f"{MSVIT}.SHARE_W=False",): "SHARE_W True (now False)",
    (f"{MSVIT}.SW_EXACT=1",): "SW_EXACT 0 (now 1)",
    (f"{MSVIT}.LN_EPS=1e-5",): "LN_EPS 1e-06 (now 1e-05)",
}
INSISTS = "RUN.ALLOW_CHANGES=True"
# Edits allowed with RUN.ALLOW_CHANGES, and edits still refused.
ALLOWED_THEN = [
    [f"{MSVIT}.SW_EXACT=1"],
    ["MODEL.VIT.AVG_POOL=True", f"{MSVIT}.LN_EPS=1e-5"],
    ["DATA.TRAIN=[folder]", "DATA.CLASSES=by_position"],
    ["DATALOADER.BSZ=8", "OPTIM.ACCUMULATE=2"],
]
REFUSED_THEN = {
    ("DATALOADER.BSZ=8",): "batch_size 16, this run has 8",
    ("OPTIM.OPT=sgd",): "optimizer adamw, this run has sgd",
    ("INPUT.IMAGE_SIZE=64",): "from another model",
    (OTHER_ARCH,): "from another model",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run that was killed one step before its end, and its arguments."""
    root = tmp_path_factory.mktemp("edits")
    for split in ("train", "val"):
        draw_pictures(root / "pictures" / split, dict.fromkeys("abcd", 16))
    words = (*BASE, f"DATA.PATH={root}/pictures")
    process = begin(root / "run", *words, fault={"what": "kill", "step": KILLED})
    wait_for_end(process)
    end_all(process)
    assert saved_step(root / "run") == KILLED
    (root / "run").rename(root / "base")
    return root / "base", words


def go_on(base, edit):
    """Resume a copy of the run with an edit. Returns (exit code, output, folder)."""
    kept, words = base
    folder = kept.with_name("run")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    ended = vil("train", *words, "--output_dir", folder, "--resume", *edit)
    return ended.code, ended.out + ended.err, folder


def goes_on(base, edit):
    """Return whether it trains to its end and logs the edit, on the terminal and in log.txt."""
    code, text, folder = go_on(base, edit)
    keys = sorted(word.partition("=")[0] for word in edit if word != INSISTS)
    listed = sorted(re.findall(r"(\S+) is .+ from here, was ", text))
    logged = sorted(re.findall(r"(\S+) is .+ from here, was ", (folder / "log.txt").read_text()))
    end = {"OPTIM.EPOCHS=3": 12, "OPTIM.EPOCHS=1": KILLED}.get(edit[0], END)
    return code == 0 and listed == logged == keys and saved_step(folder) == end


def is_refused(base, edit, told):
    """Return whether it exits with 4, reports the reason and the fix, and changes no files."""
    code, text, folder = go_on(base, edit)
    way_out = "MODEL.MODEL_PATH set to " in text
    same = contents(folder) == contents(base[0])
    return code == 4 and told in text and way_out and same and "train epoch" not in text


def contents(folder):
    """Return {file: bytes} of a folder, without the lock and the log."""
    files = (file for file in folder.rglob("*") if file.is_file())
    others = {file.relative_to(folder): file.read_bytes() for file in files}
    return {name: data for name, data in others.items() if name.name not in ("run.lock", "log.txt")}


def test_f29_edits_that_may_be_made(base):
    right = [edit for edit in ALLOWED if goes_on(base, edit)]
    assert right == ALLOWED
    what = f"allowed edits: the run resumes and logs exactly the edited keys (of {len(ALLOWED)})"
    record("F29", what, len(right), len(ALLOWED))


def test_f29_edits_that_are_refused(base):
    right = [edit for edit, told in REFUSED.items() if is_refused(base, edit, told)]
    assert right == list(REFUSED)
    count = len(REFUSED)
    what = f"other edits: refused with both values, run folder unchanged (of {count})"
    record("F29", what, len(right), len(REFUSED))


def test_f29_edits_somebody_insists_on(base):
    edits = [[*edit, INSISTS] for edit in ALLOWED_THEN]
    right = [edit for edit in edits if goes_on(base, edit)]
    assert right == edits
    refused = {(*edit, INSISTS): told for edit, told in REFUSED_THEN.items()}
    stopped = [edit for edit, told in refused.items() if is_refused(base, edit, told)]
    assert stopped == list(refused)
    found = f"{len(right)} and {len(stopped)}"
    what = "with RUN.ALLOW_CHANGES: edits that resume (of 4), and edits still refused (of 4)"
    record("F29", what, found, "4 and 4")


def test_f29_insisting_is_for_once(base):
    """Also where the next start reads the run's own config."""
    assert goes_on(base, [f"{MSVIT}.SW_EXACT=1", INSISTS])
    folder = base[0].with_name("run")
    ended = vil("train", "--output_dir", folder, "--resume", f"{MSVIT}.SW_EXACT=0")
    asked = ended.code == 4 and "SW_EXACT 1 (now 0)" in ended.err
    record("F29", "RUN.ALLOW_CHANGES applies to one start: the next edit is refused", asked, True)
