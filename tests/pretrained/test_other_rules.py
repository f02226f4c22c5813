"""2021 weights warn about attentions whose default rule has changed."""

import pytest

from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import get_2021_names, load_weights

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("attention", "argument", "value"),
    [("performer", "batch_max", True), ("srformer", "ragged", "drop"), ("longformer", None, None)],
)
def test_a_warning_names_the_rule(attention, argument, value, caplog):
    arch = "l1,h1,d8,n2,s1,g1,p4,f2,a1"

    def model(**own) -> MsViT:
        stages = parse_arch(arch, attention)
        return MsViT(stages, img_size=20, num_classes=3, attention_args={attention: own})

    names = get_2021_names(model())
    state = {names[name]: value for name, value in model().state_dict().items()}
    load_weights(model(), state)
    assert len(caplog.records) == (1 if argument else 0)
    assert (argument or "") in caplog.text
    caplog.clear()
    load_weights(model(**({argument: value} if argument else {})), state)
    load_weights(model(), model().state_dict())  # vil's names: no warning
    assert not caplog.records
