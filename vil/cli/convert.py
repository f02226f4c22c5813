"""Make a file of weights that says what it is, of one that does not.

  vil convert model_best.pth vil_small.safetensors             which of our models it is, is found out
  vil convert model_final.pth backbone.safetensors             of the 2021 detection code: the backbone
  vil convert best.pth out.safetensors --model ViL_Base_Deep_Weights.IMAGENET22K_FT_IMAGENET1K_384_V1
  vil convert runs/nano nano.safetensors                       a run's best checkpoint, with its config
  vil convert runs/nano nano_hub/                              a folder in the Hub's layout
  vil convert best.pth at_384.safetensors --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384 --resize bicubic
  vil convert best.pth full.safetensors --config-file imagenet/vil_small.yaml MODEL.VIT.MSVIT.ATTN_TYPE full

Reads .safetensors and .pt/.pth files: ours, the 2021 original's (classification and detection), timm's; runs
and their checkpoints. Writes .safetensors under our names with, in its header, the model, the
source with its SHA-256, and the SHA-256 of the tensors, which every later reading checks. With a
config or --model, weights of another size, window or attention are fitted and each key is reported;
what cannot be fitted is an error. `vil.from_pretrained`, `vil.get_model(NAME, weights=FILE)`,
MODEL.MODEL_PATH and timm take the result.
"""  # noqa: E501

import argparse
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.cli.evaluate import of_run
from vil.cli.predict import class_names
from vil.config import ConfigError

ONLY = "only classifiers are converted; MODEL.MODEL_PATH takes it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a file of weights, a checkpoint, or the folder of a run")
    add("target", metavar="TARGET", help="a .safetensors file, or a folder")
    config_arguments(parser)
    add("--model", metavar="NAME", help="one of our models, or of their published weights, by name")
    add("--checkpoint", default="best", choices=["best", "last"], help="which one of a run")
    add(
        "--resize",
        choices=["linear", "bicubic", "extend"],
        dest="rule",
        help="how positions of another size are fitted: as in 2021 (default), sharper, or, for "
        "another window alone, relative ones kept at their distance",
    )
    add("--classes", metavar="FILE", help="the names of the classes, one per line")


def run(args: argparse.Namespace) -> int:
    args.run = None
    if args.model and (args.config_file or args.opts):
        raise ConfigError(f"--model {args.model}: leave the config out, the model has its own")
    target = Path(args.target)
    if target.suffix in (".pth", ".pt", ".bin", ".onnx"):
        raise ConfigError(f"TARGET {target}: a .safetensors file or a folder")
    from vil.pretrained.hub import save_pretrained
    from vil.pretrained.model_card import make_model_card
    from vil.pretrained.state_dict_io import write_weights

    source, model, facts = load(args)
    if target.suffix == ".safetensors":
        write_weights(target, model.state_dict(), make_model_card(model, **facts, source=source))
    else:
        save_pretrained(model, target, **facts, source=source)
    print(f"written to {target}")
    return 0


def load(args: argparse.Namespace):
    """The weights' file, the model with them, and what goes with them."""
    from vil import build
    from vil.pretrained.load_weights import load_weights, select_classes
    from vil.pretrained.state_dict_io import read_metadata, read_weights

    cfg = configured(args)
    path = build.weight_file(args.source if cfg is None else cfg.MODEL.MODEL_PATH, "")
    path = path / "model.safetensors" if path.is_dir() else path
    known, state = read_metadata(path) or {}, read_weights(path)
    model = build.build_model(cfg, weights_follow=True) if cfg else named(args, known, state)
    if not hasattr(model, "specs"):
        raise ConfigError(f"MODEL.ARCH {cfg.MODEL.ARCH}: only our own models are converted")
    head, rule = (cfg.FINETUNE.HEAD, cfg.FINETUNE.RESIZE) if cfg else ("keep", "linear")
    if head == "new":
        raise ConfigError("FINETUNE.HEAD new would write a random head: keep it, or rows:FILE")
    report = load_weights(model, state, head=head, rule=args.rule or rule, convert=True)
    print(f"weights of {path}: {report}")
    kept = select_classes(head, known.get("classes"))
    given = args.classes or args.run and Path(args.run, "classes.txt").is_file()
    return path, model, {
        "transform": transform(cfg) or known.get("transform"),
        "classes": class_names(args, count(model)) if given else kept,
    }  # fmt: skip


def count(model) -> int:
    """Of its classes."""
    return getattr(model.head, "out_features", 0)


def configured(args: argparse.Namespace) -> CfgNode | None:
    """The config that was given, or the run's; None for neither."""
    if args.model:
        return None
    if Path(args.source, "config.yaml").is_file():
        args.run = args.source
        of_run(args)
    elif args.config_file or args.opts:
        args.opts = [f"MODEL.MODEL_PATH={args.source}", *(args.opts or ())]
    else:
        return None
    return of_classifier(resolve(args), ONLY)


def named(args: argparse.Namespace, known: dict, state: dict):
    """The model of --model; else the one that the file says, or that its tensors fit."""
    from vil.pretrained.catalog import get_weight
    from vil.pretrained.get_model import get_model
    from vil.pretrained.infer_arch import infer_arch
    from vil.pretrained.model_card import build_from_card
    from vil.tasks.detection.models.detectors import BODY

    if any(name.startswith(BODY) for name in state):
        raise ConfigError(f"{args.source} is a detector of ours: {ONLY}")
    if args.model:
        try:
            name, _, member = args.model.partition(".")
            facts = get_weight(args.model).meta["build"] if member else {}
            name = name.removesuffix("_Weights").lower() if member else name
            return get_model(name, **facts)
        except ValueError as error:
            raise ConfigError(f"--model: {error}") from None
    if known:
        return build_from_card(known)
    name, model = infer_arch(state)
    windows = ", ".join(str(spec.attn_size) for spec in model.specs)
    print(f"this is {name}, {model.settings['img_size']} px, windows {windows}")
    if any(spec.absolute for spec in model.specs):
        print("  (windows leave no trace in weights with absolute positions: these are the usual)")
    return model


def transform(cfg: CfgNode | None) -> dict | None:
    """How pictures become the model's input, by timm's names."""
    if cfg is None:
        return None
    from vil.build_data import INTERPOLATIONS

    return {
        "mean": list(cfg.INPUT.MEAN),
        "std": list(cfg.INPUT.STD),
        "crop_pct": cfg.INPUT.CROP_PCT,
        "interpolation": INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    }
