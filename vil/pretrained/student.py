"""Find the weights of the network in those of a distilled network, which has projectors too."""

from collections.abc import Mapping

from torch import Tensor

BODY = "body."  # prefix of the names of the network's parameters
PROJECTORS = ("summary.", "dense.")  # prefixes of the others


def extract_student(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Split the state dict of a distilled network (TASK distillation) into (state dict of the
    network, names of all other keys). Any other state dict is returned unchanged, with an empty
    list."""
    known = (BODY, *PROJECTORS)
    is_student = all(key.startswith(known) for key in state) and any(
        key.startswith(PROJECTORS) for key in state
    )
    if not is_student:
        return dict(state), []
    body = {k.removeprefix(BODY): v for k, v in state.items() if k.startswith(BODY)}
    return body, [key for key in state if not key.startswith(BODY)]
