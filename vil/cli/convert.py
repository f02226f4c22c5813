"""Convert a checkpoint to a self-describing safetensors file.

  vil convert model_best.pth vil_small.safetensors             the model is inferred from the weights
  vil convert model_final.pth backbone.safetensors             the backbone of a 2021 detector
  vil convert best.pth out.safetensors --model ViL_Base_Deep_Weights.IMAGENET22K_FT_IMAGENET1K_384_V1
  vil convert runs/nano nano.safetensors                       a run's best checkpoint, with its config
  vil convert runs/nano nano_hub/                              a folder in the Hub's layout
  vil convert best.pth at_384.safetensors --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384 --resize bicubic
  vil convert best.pth full.safetensors --config-file imagenet/vil_small.yaml MODEL.VIT.MSVIT.ATTN_TYPE full

Reads .safetensors and .pt/.pth files of vil, of the 2021 code (classification and detection) and of
timm, as well as runs and their checkpoints. Writes a .safetensors file, or a folder that contains
one. The header of the file has a description of the model, the name and SHA-256 of the source file,
and the SHA-256 of the tensors, which is checked whenever the file is read. With a config or --model,
weights for another image size, window or attention are resized or converted, and these changes are
printed. Weights that do not fit are an error. Load the result with `vil.from_pretrained`, `vil.get_model(NAME, weights=FILE)`, MODEL.MODEL_PATH, or timm.
"""  # noqa: E501

import argparse
from pathlib import Path

from vil.cli.arguments import (
    checkpoint_argument,
    classes_argument,
    config_arguments,
    options_of,
    resolve,
)
from vil.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a weight file, a checkpoint, or the folder of a run")
    add("target", metavar="TARGET", help="the .safetensors file or the folder to write")
    config_arguments(parser)
    checkpoint_argument(parser, "checkpoint of a run to convert (best)")
    classes_argument(parser)
    text = "name of the built-in model, or of the published weights, that SOURCE contains"
    add("--model", metavar="NAME", help=text)
    text = (
        "how to resize position embeddings: linear, as in the 2021 code (default), bicubic, "
        "or extend, which keeps the value of each relative position"
    )
    add("--resize", choices=["linear", "bicubic", "extend"], dest="rule", help=text)


def run(args: argparse.Namespace) -> int:
    if args.model and (args.config_file or args.opts):
        raise ConfigError(
            f"--model {args.model} defines the model: leave out --config-file and KEY VALUE pairs"
        )
    from vil.workflows.configure import find_run_config
    from vil.workflows.convert import convert

    cfg, class_names = None, ()
    if args.config_file and Path(args.source, "config.yaml").is_file():
        raise ConfigError(f"{args.source}: the run's config is used, so leave --config-file out")
    found = None
    if not (args.model or args.config_file):
        found = find_run_config(args.source, options_of(args), checkpoint=args.checkpoint)
    if found:
        cfg, class_names = found
    elif args.config_file or args.opts:
        args.opts = [f"MODEL.MODEL_PATH={args.source}", *(args.opts or ())]
        cfg = resolve(args)
    lines = convert(
        args.source,
        args.target,
        cfg,
        model_name=args.model,
        class_names=class_names,
        class_file=args.classes,
        rule=args.rule,
    )
    print(*lines, f"written to {Path(args.target)}", sep="\n")
    return 0
