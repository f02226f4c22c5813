"""Find the weights of the network in those of a pretraining task, which has other layers too."""

from collections.abc import Mapping

from torch import Tensor

BODY = "body."  # prefix of the names of the network's parameters
LAYERS = ("summary.", "dense.")  # prefixes of the others


def extract_student(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Split the state dict of TASK distillation or simmim into (state dict of the network, names of
    all other keys). Any other state dict is returned unchanged, with an empty list."""
    known = (BODY, *LAYERS)
    is_student = all(key.startswith(known) for key in state) and any(
        key.startswith(LAYERS) for key in state
    )
    if not is_student:
        return dict(state), []
    body = {k.removeprefix(BODY): v for k, v in state.items() if k.startswith(BODY)}
    return body, [key for key in state if not key.startswith(BODY)]
