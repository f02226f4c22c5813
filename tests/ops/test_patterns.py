"""Every pattern equals a predicate written out here, and its layout equals its mask."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.common.marks import cases
from vil.ops import patterns
from vil.ops.layout import FULL, Layout
from vil.ops.patterns import PATTERNS, Pattern, parse_pattern, register_pattern, sampled
from vil.ops.patterns.sampled import EXACT_TOKENS
from vil.utils.timing import peak_tensor_bytes

GRIDS = [(1, 1), (5, 7), (16, 16)]
PREDICATES = {  # text: whether the query at (x, y) attends to the key at (i, j)
    "local:3": lambda x, y, i, j: max(abs(x - i), abs(y - j)) <= 3,
    "local:2.5,2": lambda x, y, i, j: math.dist((x, y), (i, j)) <= 2.5,
    "local:distance=3,norm=1": lambda x, y, i, j: abs(x - i) + abs(y - j) <= 3,
    "axial": lambda x, y, i, j: x == i or y == j,
    "dilated:3": lambda x, y, i, j: abs(x - i) % 3 == 0 == abs(y - j) % 3,
    "swin:4": lambda x, y, i, j: (x // 4, y // 4) == (i // 4, j // 4),
    "swin:4,1": lambda x, y, i, j: ((x - 1) // 4, (y - 1) // 4) == ((i - 1) // 4, (j - 1) // 4),
    "window:3": lambda x, y, i, j: abs(x // 3 - i // 3) <= 1 and abs(y // 3 - j // 3) <= 1,
    "window:3,1": lambda x, y, i, j: abs(x - i) <= 3 and abs(y - j) <= 3,
    "window:3,0,-1": lambda x, y, i, j: (x // 3, y // 3) == (i // 3, j // 3),
    "global_tokens:1": lambda x, y, i, j: (x, y) == (0, 0) or (i, j) == (0, 0),
    "axial | local:2 - dilated:2 & local:5": lambda x, y, i, j: (
        (x == i or y == j)
        or max(abs(x - i), abs(y - j)) <= 2
        and not (abs(x - i) % 2 == 0 == abs(y - j) % 2)
    ),
    "(axial | local:2) - local:1": lambda x, y, i, j: (
        (x == i or y == j or max(abs(x - i), abs(y - j)) <= 2) and max(abs(x - i), abs(y - j)) > 1
    ),
}
SAMPLED = ["random:0.2,5", "gaussian:2,0.1,5"]


def brute_force(text, grid):
    tokens = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
    return torch.tensor([[bool(PREDICATES[text](*q, *k)) for k in tokens] for q in tokens])


def mask_of(layout):
    """Return the mask that the lists of a layout describe, (H, L, L)."""
    lists, (rows, cols), w, tile = layout.lists, layout.chunks, layout.size, layout.tile
    masks = torch.cat([lists.masks, lists.masks.new_ones(1, tile, tile)])
    assert FULL == -1, "the last mask"
    full = torch.zeros(layout.heads, rows * cols, tile, rows * cols, tile, dtype=torch.bool)
    full[lists.head, lists.query, :, lists.key] = masks[lists.mask]
    full = full.unflatten(4, (w, w)).unflatten(3, (rows, cols))
    full = full.unflatten(2, (w, w)).unflatten(1, (rows, cols)).permute(0, 1, 3, 2, 4, 5, 7, 6, 8)
    full = full.reshape(-1, rows * w, cols * w, rows * w, cols * w)
    full = full[:, : layout.grid[0], : layout.grid[1], : layout.grid[0], : layout.grid[1]]
    return full.reshape(-1, layout.length, layout.length)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("text", PREDICATES)
def test_pattern_equals_predicate(text, grid):
    assert torch.equal(parse_pattern(text).mask(grid), brute_force(text, grid))


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
@pytest.mark.parametrize("text", SAMPLED)
def test_sampled_pattern_equals_the_first_arrivals(text, grid):
    """The hash, the arrival times and their order are computed with Python's integers."""
    length, arrivals = math.prod(grid), []
    share = 0.2 if text.startswith("random") else 0.1
    for query in range(length):
        for key in range(length):
            number = (splitmix((splitmix((5 + query) % 2**64) + key) % 2**64) >> 11) + 0.5
            (x, y), (i, j) = divmod(query, grid[1]), divmod(key, grid[1])
            near = math.exp(-(math.dist((x, y), (i, j)) ** 2) / 8)
            weight = 1 if text.startswith("random") else near
            arrivals.append((-math.log(number / 2**53) / weight, query, key))
    expected = torch.zeros(length, length, dtype=torch.bool)
    for _, query, key in sorted(arrivals)[: max(1, round(share * length**2))]:
        expected[query, key] = True
    assert torch.equal(parse_pattern(text).mask(grid), expected)


@pytest.mark.parametrize(
    ("grid", "chunk"), [((1, 1), 3), ((5, 7), 1), ((5, 7), 3), ((16, 16), 8)], ids=str
)
@pytest.mark.parametrize("text", [*PREDICATES, *SAMPLED])
def test_layout_equals_mask(text, grid, chunk):
    layout = Layout(grid, chunk, parse_pattern(text))
    mask = layout.pattern.mask(grid)
    assert torch.equal(mask_of(layout), mask[None])
    assert layout.count_pairs() == mask.sum()
    assert layout.lists.num_blind == (~mask.any(1)).sum()
    if chunk == 1:
        assert layout.density == mask.double().mean()


@pytest.mark.parametrize("text", SAMPLED)
def test_sample_has_its_size(text):
    pattern = parse_pattern(text)
    for grid in ((5, 7), (24, 30)):
        assert pattern.mask(grid).sum() == round(pattern.fraction * math.prod(grid) ** 2)


@pytest.mark.parametrize(
    "text", cases(["random:0.001", "gaussian:4,0.001"], long=["gaussian:4,0.001"])
)
def test_large_sample_has_the_expected_size(text):
    grid = (96, 96)
    assert math.prod(grid) > EXACT_TOKENS
    pattern = parse_pattern(text)
    wanted = 0.001 * math.prod(grid) ** 2
    queries = torch.arange(0, math.prod(grid), 36)
    pairs = patterns.Pairs.of_tokens(grid, queries[:, None], torch.arange(math.prod(grid)))
    count = pattern.visible(pairs).sum().item() * 36
    assert abs(count - wanted) < 5 * math.sqrt(36 * wanted) + 0.02 * wanted


def test_large_sample_has_its_size_if_weights_differ_much(monkeypatch):
    monkeypatch.setattr(sampled, "SAMPLED_QUERIES", 16)
    pattern, grid = parse_pattern("gaussian:0.5,0.1"), (95, 97)
    length = math.prod(grid)
    queries = torch.arange(0, length, length // 16)  # those from which the size is estimated
    pairs = patterns.Pairs.of_tokens(grid, queries[:, None], torch.arange(length))
    share = pattern.visible(pairs).double().mean().item()
    assert share == pytest.approx(pattern.fraction, rel=0.05)


def test_sample_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="only 1225 have a weight above 0|cannot|to be sampled"):
        patterns.probability(lambda pairs: (pairs.rows == 0).double(), 0.5).mask((8, 8))


def test_sample_differs_by_seed():
    assert parse_pattern("random:.2,5") == parse_pattern("random:0.2,5")
    first, second = (parse_pattern(f"random:0.2,{seed}").mask((6, 6)) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_mask_per_head():
    masks = torch.rand(3, 35, 35, generator=torch.Generator().manual_seed(0)) < 0.3
    pattern = patterns.from_mask(masks)
    assert torch.equal(pattern.mask((5, 7)), masks)
    assert torch.equal(mask_of(Layout((5, 7), 3, pattern)), masks)
    joined = pattern - patterns.axial()
    assert torch.equal(joined.mask((5, 7)), masks & ~patterns.axial().mask((5, 7)))
    assert torch.equal(mask_of(Layout((5, 7), 2, joined)), joined.mask((5, 7)))


def test_blocks(tmp_path):
    blocks = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]], dtype=bool)
    np.save(tmp_path / "blocks.npy", blocks)
    pattern = parse_pattern(f"from_blocks:'{tmp_path / 'blocks.npy'}',4")
    mask = pattern.mask((5, 7))
    for query in range(35):
        for key in range(35):
            (x, y), (i, j) = divmod(query, 7), divmod(key, 7)
            assert mask[query, key] == blocks[x // 4 * 2 + y // 4, i // 4 * 2 + j // 4]
    for chunk in (4, 3):
        assert torch.equal(mask_of(Layout((5, 7), chunk, pattern))[0], mask)


def test_chosen_global_tokens():
    pattern = patterns.global_tokens(((0, 0), (4, 6)))
    mask = pattern.mask((5, 7))
    assert mask[0].all()
    assert mask[:, 34].all()
    assert mask.sum() == 4 * 35 - 4
    assert torch.equal(mask_of(Layout((5, 7), 3, pattern))[0], mask)


def test_precedence_is_that_of_python():
    a, b, c, d = patterns.axial(), patterns.local(2), patterns.dilated(2), patterns.swin(4)
    assert parse_pattern("axial | local:2 - dilated:2 & swin:4") == a | b - c & d
    assert parse_pattern("(axial | local:2) & dilated:2 - swin:4") == (a | b) & c - d
    assert parse_pattern("axial - local:2 - dilated:2") == a - b - c


@pytest.mark.parametrize("text", [*PREDICATES, *SAMPLED, "axial - (local:2 - dilated:2)"])
def test_text_of_a_pattern_parses_to_it(text):
    pattern = parse_pattern(text)
    assert parse_pattern(str(pattern)) == pattern


ERRORS = [
    ("axial | lcoal:5", "column 9, .*did you mean 'local'"),
    ("local", "column 1.*missing a required argument: 'distance'"),
    ("local:5 axial", r"column 9.*expected '\|', '&' or '-'"),
    ("(axial", r"at the end: expected \)"),
    ("local:distance=3,nrom=2", "unknown argument of local 'nrom'; did you mean 'norm'"),
    ("local:-1", "the distance must be at least 0, got -1"),
    ("swin:4,7", "the shift must be from 0 to 3, got 7"),
    ("dilated:0", "the step must be a whole number of at least 1, got 0"),
    ("random:2", "the density must be above 0 and at most 1, got 2"),
    ("window:3,-1", "a query may attend to a key twice"),
    ("window:3,1,-1", "the exact window"),
    ("from_mask:nothing.npy", "nothing.npy cannot be read"),
    ("axial | global_tokens:2.5", "column 9.*expected a number of tokens, .* got 2.5"),
    ("random:0.1,1.5", "the seed must be a whole number .* got 1.5"),
    ("local:name=3", "unknown argument of local 'name'"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[text for text, _ in ERRORS])
def test_bad_text_is_one_line_with_its_position(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_pattern(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["empty.npy", "masks.npz"])
def test_a_file_that_is_not_npy_is_named(name, tmp_path):
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "masks.npz", mask=np.ones((9, 9), dtype=bool))
    with pytest.raises(ValueError, match=f"from_mask: .*{name} cannot be read as .npy: "):
        patterns.from_mask(tmp_path / name)


def test_bad_masks_name_the_expected_shape():
    with pytest.raises(ValueError, match=r"bool mask \(L, L\) or .*\(35, 34\)"):
        patterns.from_mask(torch.ones(35, 34, dtype=torch.bool))
    with pytest.raises(ValueError, match="of type torch.float32"):
        patterns.from_mask(torch.ones(35, 35))
    pattern = patterns.from_mask(torch.ones(35, 35, dtype=torch.bool))
    with pytest.raises(ValueError, match="grid of 6 x 6 tokens needs a mask of 36 x 36 .* 35 x 35"):
        pattern.layout((6, 6))
    with pytest.raises(ValueError, match="has 4 chunks of 4 x 4, .* 4 x 4 entries, got 3 x 3"):
        patterns.from_blocks(torch.ones(3, 3, dtype=torch.bool), 4).mask((5, 7))
    with pytest.raises(ValueError, match=r"\(5, 0\) is outside of the grid of 5 x 7"):
        patterns.global_tokens(((5, 0),)).mask((5, 7))
    with pytest.raises(ValueError, match=r"expected a number of tokens, .* got \["):
        patterns.global_tokens([(1, -1)])
    with pytest.raises(ValueError, match="of 2 and of 3 heads cannot be combined"):
        patterns.from_mask(torch.ones(2, 9, 9, dtype=torch.bool)) | patterns.from_mask(
            torch.ones(3, 9, 9, dtype=torch.bool)
        )


def test_tokens_that_see_nothing_are_counted(caplog):
    layout = Layout((5, 7), 3, patterns.dilated(3) - patterns.local(4))
    assert layout.lists.num_blind == (~layout.mask[0].any(1)).sum() > 0
    assert f"{layout.lists.num_blind} of 35 tokens attend to no token" in caplog.text


def test_large_grid_needs_little_memory():
    """The full mask of 65,536 tokens would take 4 GiB."""

    def build():
        layout = Layout((256, 256), 8, patterns.local(5) | patterns.global_tokens(1))
        assert layout.density < 0.02

    assert peak_tensor_bytes(build, torch.device("cpu")) < 300 << 20


@dataclass(frozen=True)
class Knight(Pattern):
    """A user's pattern: the keys a knight's move away, and the query."""

    with_self: bool = True
    invariant: ClassVar[bool] = True
    reach: ClassVar[tuple] = (2, 2)

    def visible(self, pairs):
        moves = pairs.rows.abs() * pairs.cols.abs() == 2
        return moves | ((pairs.rows == 0) & (pairs.cols == 0) & self.with_self)


@pytest.fixture
def knight():
    register_pattern("knight", Knight)
    yield
    PATTERNS.remove("knight")


def test_pattern_of_a_user(knight):
    pattern = parse_pattern("knight | global_tokens:1")
    assert pattern == Knight() | patterns.global_tokens(1)
    assert patterns.knight is Knight
    assert str(Knight()) == "knight:True"
    mask = Knight().mask((8, 8))
    assert mask[27].sum() == 9, "from d4 a knight reaches eight fields"
    assert torch.equal(mask_of(Layout((8, 8), 3, Knight()))[0], mask)


def test_invalid_patterns_are_not_registered():
    with pytest.raises(ValueError, match="must be a subclass of vil.ops.patterns.Pattern"):
        register_pattern("mine", type("Mine", (Pattern,), {}))
    with pytest.raises(ValueError, match="already exists"):
        register_pattern("local", Knight)


def test_plot_has_a_row_of_panels_for_each_head(tmp_path):
    masks = torch.rand(2, 35, 35) < 0.5
    figure = patterns.from_mask(masks).plot((5, 7), query=(1, 2))
    figure.savefig(tmp_path / "plot.png")
    assert len(figure.axes) == 4
    shown = figure.axes[0].images[0].get_array()
    assert (torch.tensor(shown.astype(bool)) == masks[0, 9].view(5, 7)).all()
    assert len((patterns.axial() | patterns.local(1)).plot((5, 7)).axes) == 2
