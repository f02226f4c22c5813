"""Position embeddings on other grids: interpolation as in the 2021 reference, and crop."""

import pytest
import torch

from vil.layers.pos_embed import (
    AbsoluteEmbedding,
    dense_bias,
    resize_line,
    resize_table,
    resize_tables,
)

pytestmark = pytest.mark.smoke


def test_resizing_a_line_is_the_reference():
    line = resize_line(torch.tensor([0.0, 1.0, 4.0, 9.0]).view(1, 4, 1), 6)
    assert line.flatten().tolist() == pytest.approx([0.0, 0.5, 1.5, 3.5, 6.5, 9.0])


def test_resizing_a_table_is_the_reference():
    table = resize_table(torch.arange(9.0)[:, None], (3, 3), (5, 5)).view(5, 5)
    assert table[0].tolist() == pytest.approx([0.0, 0.4, 1.0, 1.6, 2.0])
    assert table[1].tolist() == pytest.approx([1.2, 1.6, 2.2, 2.8, 3.2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tables_of_images_are_resized_as_one_table_is(dtype):
    table, sizes = torch.randn(7 * 5, 2, dtype=dtype), [(3, 7), (6, 1), (11, 9)]
    found = resize_tables(table, (7, 5), (11, 9), torch.tensor(sizes)).unflatten(1, (11, 9))
    for resized, (rows, cols) in zip(found, sizes):
        expected = resize_table(table, (7, 5), (rows, cols)).unflatten(0, (rows, cols))
        error = (resized[:rows, :cols] - expected).abs().max()
        assert error <= 16 * torch.finfo(dtype).eps * table.abs().max()


def test_the_dense_bias_is_by_query_minus_key():
    table = torch.arange(15.0)[:, None]  # a grid of 2 x 3: (2*2-1) * (2*3-1)
    bias = dense_bias(table, (2, 3))[0]
    assert bias[0].tolist() == [7, 6, 5, 2, 1, 0]  # as in the 2021 reference
    assert bias[5].tolist() == [14, 13, 12, 9, 8, 7]


def test_absolute_embedding_on_other_grids():
    module = AbsoluteEmbedding(4, (3, 5), num_global=1)
    same = module((3, 5))
    assert same.shape == (1, 16, 4)
    rows, cols = module.x_pos_embed[0], module.y_pos_embed[0]
    assert torch.equal(same[0, 1 + 2 * 5 + 4], torch.cat([rows[2], cols[4]]))
    assert module((7, 2)).shape == (1, 15, 4)

    module.resize = "crop"
    assert torch.equal(module((2, 2))[0, 1 + 3], torch.cat([rows[1], cols[1]]))
    with pytest.raises(ValueError, match="cannot crop 3 position embeddings to a grid side of 4"):
        module((4, 2))


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="even dim"):
        AbsoluteEmbedding(5, (3, 3), 0)
    with pytest.raises(ValueError, match="interpolate, crop"):
        AbsoluteEmbedding(4, (3, 3), 0, resize="stretch")
