"""Resume with an edited config: allowed differences are logged, others are refused."""

import re
import shutil

import pytest

from tests.common.faults.real_runs import finish, saved_step
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
    [
        "OPTIM.EPOCHS=3", "OPTIM.LR=2e-3", "OPTIM.WD=0.1", "OPTIM.CLIP_GRAD=1.0", "SEED=1",
        "SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=1",
    ],
    ["OPTIM.EPOCHS=1"],  # fewer than are done
    [
        "AUG.MIXUP_PROB=0.5", "AUG.MIXUP=0.8", "LOSS.LABEL_SMOOTHING=0.1", "MODEL.VIT.DROP=0.1",
        "MODEL.VIT.DROP_PATH=0.0", f"{MSVIT}.MODE=1",
    ],
    [
        "OPTIM.EMA=0.0", "MODEL.GRAD_CHECKPOINT=True", "DATALOADER.WORKERS=1",
        "DATA.TEST=[fake,folder]", "DATA.CLASSES=by_position",
    ],
    ["AMP.ENABLED=True", "AMP.DTYPE=float16", "FINETUNE.FREEZE_STAGES=1"],
    ["DISTRIBUTED.STRATEGY=fsdp", "RUN.SAVE_STEPS=2"],
]  # fmt: skip
# Refused edits, and parts of their messages: keys with both values, or values in the checkpoint.
REFUSED = [
    (
        ["DATALOADER.BSZ=8", "OPTIM.ACCUMULATE=2", "OPTIM.OPT=sgd", "SOLVER.USE_LARC=True"],
        ["DATALOADER.BSZ 16 (now 8)", "OPTIM.ACCUMULATE 1 (now 2)",
         "OPTIM.OPT 'adamw' (now 'sgd')", "SOLVER.USE_LARC False (now True)"],
    ),
    (["OPTIM.LR=2e-3", "OPTIM.OPT=sgd"], ["started with OPTIM.OPT 'adamw' (now 'sgd'): "]),
    (
        ["DATA.TRAIN=[folder]", "DATA.NUM_CLASSES=5", "INPUT.IMAGE_SIZE=64",
         "AUG.REPEATED_AUG=True", "MODEL.ARCH=resnet18"],
        ["DATA.TRAIN ('fake',) (now ('folder',))", "DATA.NUM_CLASSES 4 (now 5)",
         "INPUT.IMAGE_SIZE 32 (now 64)", "AUG.REPEATED_AUG False (now True)",
         "MODEL.ARCH 'msvit' (now 'resnet18')"],
    ),
    (["DATA.KWARGS.n=80"], ["steps_per_epoch 4, this run has 5"]),
    (["DATA.KWARGS.n=70"], ["was trained on 64 samples"]),  # other images, in as many steps
    (
        ["MODEL.VIT.AVG_POOL=True", OTHER_ARCH, f"{MSVIT}.ATTN_TYPE=full",
         f"{MSVIT}.SHARE_W=False", f"{MSVIT}.SW_EXACT=1", f"{MSVIT}.LN_EPS=1e-5"],
        ["MODEL.VIT.AVG_POOL False (now True)", f"{OTHER_ARCH.partition('=')[2]}')",
         "ATTN_TYPE 'longformer' (now 'full')", "SHARE_W True (now False)",
         "SW_EXACT 0 (now 1)", "LN_EPS 1e-06 (now 1e-05)"],
    ),
]  # fmt: skip
INSISTS = "RUN.ALLOW_CHANGES=True"
# Edits allowed with RUN.ALLOW_CHANGES, and edits still refused.
ALLOWED_THEN = [
    ["MODEL.VIT.AVG_POOL=True", f"{MSVIT}.LN_EPS=1e-5", f"{MSVIT}.SW_EXACT=1"],
    [
        "DATA.TRAIN=[folder]", "DATA.CLASSES=by_position", "DATALOADER.BSZ=8",
        "OPTIM.ACCUMULATE=2",
    ],
]  # fmt: skip
REFUSED_THEN = [
    (["DATALOADER.BSZ=8"], ["batch_size 16, this run has 8"]),
    (["OPTIM.OPT=sgd"], ["optimizer adamw, this run has sgd"]),
    (["INPUT.IMAGE_SIZE=64"], ["from another model"]),
    ([OTHER_ARCH], ["from another model"]),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run that was killed one step before its end, and its arguments."""
    root = tmp_path_factory.mktemp("edits")
    for split in ("train", "val"):
        draw_pictures(root / "pictures" / split, dict.fromkeys("abcd", 16))
    words = (*BASE, f"DATA.PATH={root}/pictures")
    finish(root / "run", *words, code=-9, fault={"what": "kill", "step": KILLED})
    assert saved_step(root / "run") == KILLED
    (root / "run").rename(root / "base")
    return root / "base", words


def resume(base, edit):
    """Resume a copy of the run with an edit. Returns (exit code, output, folder)."""
    kept, words = base
    folder = kept.with_name("run")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    ended = vil("train", *words, "--output_dir", folder, "--resume", *edit)
    return ended.code, ended.out + ended.err, folder


def contents(folder):
    """Return {file: bytes} of a folder, without the lock and the log."""
    files = (file for file in folder.rglob("*") if file.is_file())
    others = {file.relative_to(folder): file.read_bytes() for file in files}
    return {name: data for name, data in others.items() if name.name not in ("run.lock", "log.txt")}


@pytest.mark.parametrize("edit", ALLOWED + [[*edit, INSISTS] for edit in ALLOWED_THEN], ids=str)
def test_an_edit_that_is_allowed(base, edit):
    """The run trains to its end, and names exactly the edited keys, also in log.txt."""
    code, text, folder = resume(base, edit)
    assert code == 0, text
    keys = sorted(word.partition("=")[0] for word in edit if word != INSISTS)
    for each in (text, (folder / "log.txt").read_text()):
        assert sorted(re.findall(r"(\S+) is .+ from here, was ", each)) == keys
    end = {"OPTIM.EPOCHS=3": 12, "OPTIM.EPOCHS=1": KILLED}.get(edit[0], END)
    assert saved_step(folder) == end


@pytest.mark.parametrize(
    ("edit", "told"),
    REFUSED + [([*edit, INSISTS], told) for edit, told in REFUSED_THEN],
    ids=str,
)
def test_an_edit_that_is_refused(base, edit, told):
    """With both values and the fix; the folder does not change."""
    code, text, folder = resume(base, edit)
    assert code == 4
    assert all(part in text for part in told), text
    assert "MODEL.MODEL_PATH set to " in text
    assert "train epoch" not in text
    assert contents(folder) == contents(base[0])


def test_insisting_is_for_once(base):
    """Also where the next start reads the run's own config."""
    code, _, folder = resume(base, [f"{MSVIT}.SW_EXACT=1", INSISTS])
    assert code == 0
    ended = vil("train", "--output_dir", folder, "--resume", f"{MSVIT}.SW_EXACT=0")
    assert ended.code == 4
    assert "SW_EXACT 1 (now 0)" in ended.err
