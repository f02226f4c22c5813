"""Compute features of images with a trained model, or measure how good its features are.

  vil embed photos/ --output-file features.npy                         the shipped small weights
  vil embed --run runs/nano photos/ --output-file features.npy         the best checkpoint of a run
  find . -name '*.jpg' | vil embed --run runs/nano --images - --output-file features.npy
  vil embed --run runs/nano --probe                                    on the run's data
  vil embed --config-file digits/vil_nano.yaml MODEL.MODEL_PATH nano.safetensors --probe
  vil embed --data photos DATA.TRAIN folder DATA.TEST folder DATA.NUM_CLASSES 3 --probe \\
      MODEL.ARCH timm/resnet18 MODEL.PRETRAINED True

The features of an image are the pooled output of the model before its head. --output-file is
written in NumPy's .npy format: a float32 array (N, D) with one row per image. A CSV file with the
same name lists the images in the columns row, file and error. The row of an image that cannot be
read is NaN; the exit code is 3 if no image could be read. Images are given as for `vil predict`.

--probe fits simple classifiers on the features of the config's training images, and prints their
accuracy on the test sets. One is nearest neighbors (kNN) by cosine similarity, for k = 20 and for
the k that is best on a held-out fifth of the training images. The other is logistic regression on
standardized features (a linear probe). Its regularization C is chosen on the same held-out images.
The head is not used, and the file may have none.
"""

import argparse
import sys
from pathlib import Path

from vil.cli.arguments import (
    config_arguments,
    files_read,
    image_arguments,
    run_arguments,
    with_weights,
)
from vil.cli.predict import image_words, use_shipped_weights
from vil.utils.errors import ConfigError
from vil.utils.output_paths import output_file
from vil.utils.plural import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    image_arguments(parser)
    add = parser.add_argument
    add("--output-file", metavar="FILE", help=".npy file for the features")
    text = "measure the accuracy of nearest neighbors and a linear probe on the config's data"
    add("--probe", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from vil.workflows import predict

    args.opts, words = image_words(args, predict.IMAGE_SUFFIXES)
    use_shipped_weights(args)
    if args.probe:
        if words or args.sample or args.output_file:
            raise ConfigError(
                "--probe uses the config's data: leave out images, --sample and --output-file"
            )
        return run_probe(args)
    if bool(words) == args.sample:
        raise ConfigError(
            "expected images (files, folders, or - for standard input), --sample or --probe"
        )
    if not args.output_file:
        raise ConfigError("expected a file for the features: add --output-file features.npy")
    return run_embed(args, words)


def run_embed(args: argparse.Namespace, words: list[str]) -> int:
    """Write the features of images to --output-file, and the list of images to a CSV file. Returns
    the exit code.

    words: paths of images or folders, or "-" for standard input.
    """
    from vil.workflows import embed, inference, predict

    cfg, class_names = with_weights(args)
    embed.check_embed(cfg.TASK)
    inference.refuse_random_weights(cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED)
    options = dict(sample=args.sample, channels=cfg.INPUT.CHANNELS)
    images, _ = predict.find_images(words, sys.stdin.buffer.read, **options)
    inputs = [*files_read(args, "output_file"), *(image.name for image in images)]
    table = Path(args.output_file).with_suffix(".csv")
    file = output_file(args.output_file, "--output-file", (".npy",), inputs, beside=[table])
    model = inference.load_model(cfg, class_names, needs_head=False)
    print(model.report, file=sys.stderr)
    (count, width), failed = embed.embed_files(model, images, file)
    images = f"each of {count} images" if count > 1 else "1 image"
    print(f"wrote {width} features of {images} to {file}, image names to {table}")
    if failed:
        print(f"{failed} of {count} images could not be read: their rows are NaN", file=sys.stderr)
    return 0


def run_probe(args: argparse.Namespace) -> int:
    """Fit classifiers on features of the training images, and print their accuracy on the test
    sets. Returns the exit code."""
    from vil.utils.text_table import align
    from vil.workflows import embed

    result = embed.probe(*with_weights(args))
    print(result.report, file=sys.stderr)
    counts = ", ".join(
        f"{name} {plural(count, 'image')}" for name, count in result.num_images.items()
    )
    print(f"{result.num_features} features; {counts}")
    names = list(result.probes[0].top1)
    rows = [("classifier", "setting", *(f"top1 {name}" for name in names))]
    for name, setting, top1 in result.probes:
        rows.append((name, setting, *(f"{top1[test]:.2f}" for test in names)))
    print(align(rows, 2))
    return 0
