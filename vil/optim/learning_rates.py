"""Scale a learning rate with the batch size."""


def lr_factor(batch_size: int, reference: int, scaling: str) -> float:
    """Return the factor by which to multiply a learning rate for batches of `batch_size` images.

    reference: batch size for which the learning rate was chosen; 0 for a factor of 1. scaling:
    "linear", batch_size / reference (Goyal et al., arXiv:1706.02677), or "sqrt", the square root of
    that (Malladi et al., arXiv:2205.10287).
    """
    ratio = batch_size / reference if reference else 1.0
    return ratio**0.5 if scaling == "sqrt" else ratio


def default_scaling(optimizer: str) -> str:
    """Return the default scaling rule of an optimizer's learning rate, see `lr_factor`.

    optimizer: name of the optimizer. As in timm's train script, the rule is "sqrt" if the name
    contains "ada" or "lamb", and "linear" otherwise.
    """
    return "sqrt" if any(part in optimizer for part in ("ada", "lamb")) else "linear"
