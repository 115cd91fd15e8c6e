"""Triton kernels against the torch references: in the interpreter, or on the device where there is one (`-m gpu`)."""

import pytest
import torch
from oracle import generator
from rounds import random_tree
from torch import Tensor

from hf_treespec import TokenTree, ops
from hf_treespec.bench import gpu_check
from hf_treespec.bench.layers import Round, Shape


# The interpreter takes some 10 ms per program and tile: shapes are as small as their corners allow.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STYLES = ["line", "wide", "star", "deep"]


def make_tree(style: str, batch: int, count: int, seed: int = 0) -> TokenTree:
    """A ragged batch; `"line"` is a chain without a path table."""
    if style != "line":
        return random_tree(generator(seed), batch, count, style, ragged=True)
    lengths = torch.tensor([max(1, count - 2 * row) for row in range(batch)])
    return TokenTree.chain(torch.randint(1, 97, (batch, count), generator=generator(seed)), lengths)


def both(round_: Round, run) -> tuple[Tensor, Tensor]:
    """`run(geometry)` of the kernel and of the reference."""
    return run(round_.geometry("triton")), run(round_.geometry("torch"))


def assert_close(name: str, actual: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    """Relative RMS error at most `limit`; NaN is wrong too."""
    assert actual.shape == expected.shape, name
    error = (actual.double() - expected.double()).square().mean().sqrt()
    scale = expected.double().square().mean().sqrt()
    assert error <= limit * scale, f"{name}: relative RMS error {error / scale:.1e}"


def assert_attention(round_: Round, **options) -> None:
    kernel, reference = both(round_, lambda geometry: round_.tree_attention(geometry, **options))
    assert kernel.isfinite().all()  # padding nodes too
    assert_close("tree_attention", round_.real_nodes(kernel), round_.real_nodes(reference))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("style", "count", "lengths", "window"),
    [
        ("line", 1, [0, 37, 129], 20),
        ("wide", 2, [3, 128, 0], 20),
        ("star", 7, [127, 0], 20),
        ("line", 13, [38, 5], 20),
        ("deep", 26, [43], 7),  # deeper than the window
        ("wide", 26, [6], 7),
    ],
)
def test_attention_over_window_and_all_entries(style, count, lengths, window, device):
    round_ = Round(Shape(window=window, device=device), lengths, make_tree(style, len(lengths), count), ratio=4)
    assert_attention(round_)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", STYLES)
def test_attention_over_the_window_alone(style, device):
    round_ = Round(Shape(window=9, device=device), [4, 60], make_tree(style, 2, 13), ratio=4)
    assert_attention(round_, compressed=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", STYLES)
def test_attention_over_selected_entries(style, device):
    round_ = Round(Shape(device=device), [90, 9, 61], make_tree(style, 3, 9), ratio=4, rows=[2, 0, 3])
    assert_attention(round_, selected=round_.index_topk(round_.geometry("torch"), topk=11))


@pytest.mark.parametrize("device", DEVICES)
def test_attention_of_many_key_splits(device):
    """Also with more heads than one program takes."""
    round_ = Round(Shape(heads=20, window=5, device=device), [700, 262], make_tree("wide", 2, 3), ratio=2)
    assert_attention(round_)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("ratio", "halves"), [(4, 2), (5, 2), (8, 1), (16, 1)])
def test_compress(style, ratio, halves, device):
    lengths = [0, 3, 30, 37, 39]
    round_ = Round(Shape(device=device), lengths, make_tree(style, 5, 21), ratio, halves, rows=[4, 1, 0, 5, 2])
    kernel, reference = both(round_, round_.compress)
    closing = round_.geometry("torch").new_closers(ratio) >= 0
    assert closing.any()
    assert_close("compress", kernel[closing], reference[closing])
    assert (kernel[~closing] == 0).all()


def use_integers(round_: Round) -> None:
    """Scores become exact, and tie often."""
    for name in ("index_query", "index_weights", "index_entries", "own_index_entries"):
        setattr(round_, name, getattr(round_, name).round().clamp(-1, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("style", "topk"), [("line", 5), ("wide", 1), ("wide", 32), ("star", 5), ("deep", 9)])
def test_index_topk_is_equal_bit_for_bit_on_integers(style, topk, device):
    round_ = Round(Shape(device=device), [150, 9, 61, 0], make_tree(style, 4, 9), ratio=2, rows=[2, 0, 3, 1])
    use_integers(round_)
    kernel, reference = both(round_, lambda geometry: round_.index_topk(geometry, topk))
    assert torch.equal(round_.real_nodes(kernel), round_.real_nodes(reference))
    assert kernel.dtype == torch.int64


@pytest.mark.parametrize("device", DEVICES)
def test_index_topk_of_long_rows(device):
    """Scores of every magnitude and sign, blocks of equal ones, -0.0, over several tiles of both kernels."""
    round_ = Round(Shape(device=device), [2900, 37], make_tree("wide", 2, 2), ratio=2)
    entries = round_.index_entries
    entries[:, 64:512] = 0
    magnitudes = torch.arange(entries.shape[1], device=device).div(150, rounding_mode="floor") - 6
    entries *= (10.0**magnitudes)[:, None]
    round_.index_weights[:, 1] = -round_.index_weights[:, 1].abs()
    for topk in (32, 1200):
        kernel, reference = both(round_, lambda geometry, topk=topk: round_.index_topk(geometry, topk))
        assert torch.equal(round_.real_nodes(kernel), round_.real_nodes(reference))


@pytest.mark.parametrize("device", DEVICES)
def test_later_levels_of_a_round(device):
    """Queries are the last nodes only; entries closed by earlier levels are there."""
    round_ = Round(Shape(device=device), [45, 14, 30], make_tree("deep", 3, 16), 4, 2, rows=[1, 2, 0], start=9)
    kernel, reference = both(round_, round_.compress)
    closing = round_.geometry("torch").new_closers(4) >= 0
    assert_close("compress", kernel[closing], reference[closing])
    assert_attention(round_)
    use_integers(round_)
    kernel, reference = both(round_, lambda geometry: round_.index_topk(geometry, 6))
    assert torch.equal(round_.real_nodes(kernel), round_.real_nodes(reference))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    """Within the rounding of inputs and results of the fp32 reference on the same numbers."""
    half = Round(Shape(device=device, dtype=dtype), [45, 14], make_tree("deep", 2, 9), 4, 2)
    exact = gpu_check.in_fp32(half)
    ulp = torch.finfo(dtype).eps
    kernel, reference = half.compress(half.geometry("triton")), exact.compress(exact.geometry("torch"))
    closing = half.geometry("torch").new_closers(4) >= 0
    assert kernel.dtype == dtype
    assert_close("compress", kernel[closing], reference[closing], ulp / 2)
    kernel = half.tree_attention(half.geometry("triton"))
    reference = exact.tree_attention(exact.geometry("torch"))
    assert kernel.dtype == dtype
    assert_close("tree_attention", half.real_nodes(kernel), exact.real_nodes(reference), ulp)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_of_the_real_model(dtype, device):
    """64 heads over one 512-wide KV head, 64 indexer heads x 128, window 128, top-k 512."""
    widths = {"heads": 64, "head_dim": 512, "rotated": 64, "window": 128, "index_heads": 64, "index_dim": 128}
    for lengths, ratio, halves, topk in (([126], 128, 1, None), ([2301, 130], 4, 2, 512)):
        half = Round(
            Shape(device=device, dtype=dtype, **widths), lengths, make_tree("deep", len(lengths), 3), ratio, halves
        )
        exact = gpu_check.in_fp32(half)
        selected = None if topk is None else exact.index_topk(exact.geometry("torch"), topk)
        kernel = half.tree_attention(half.geometry("triton"), selected)
        reference = exact.tree_attention(exact.geometry("torch"), selected)
        limit = gpu_check.LIMITS[dtype]
        assert_close("tree_attention", half.real_nodes(kernel), half.real_nodes(reference), limit)
        closing = half.geometry("torch").new_closers(ratio) >= 0
        assert closing.any()
        kernel, reference = half.compress(half.geometry("triton")), exact.compress(exact.geometry("torch"))
        assert_close("compress", kernel[closing], reference[closing], limit)
        if topk is not None:
            use_integers(half)
            kernel, reference = both(half, lambda geometry: half.index_topk(geometry, topk))
            assert torch.equal(half.real_nodes(kernel), half.real_nodes(reference))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("style", "count"), [("line", 1), ("line", 40), ("wide", 7), ("star", 40), ("deep", 40)])
def test_accept(style, count, device):
    rng = generator(count)
    tree = make_tree(style, 6, count)
    tokens, predicted = (torch.randint(0, 2, (6, count), generator=rng).to(device) for _ in range(2))
    arguments = (tokens, tree.paths.to(device), tree.valid.to(device), predicted)
    results = [ops.accept(*arguments, backend=backend) for backend in ("triton", "torch")]
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
def test_scatter_paths(device):
    """Several states of different widths and numbers of places in one launch, -1 skipped."""
    rng = generator(0)
    writes, expected = [], []
    for width, places, slots in ((3, 5, 7), (64, 2, 4), (1, 9, 11), (5, 1, 2)):
        state, scratch = torch.randn(2, slots, width, generator=rng), torch.randn(2, 9, width, generator=rng)
        target = torch.randperm(2 * slots, generator=rng)[:places]
        source = torch.randint(0, 18, (places,), generator=rng)
        target[3:4] = -1
        want = state.clone()
        ops.scatter_path(want, scratch, target[target >= 0], source[target >= 0])
        expected.append(want)
        writes.append(tuple(tensor.to(device) for tensor in (state, scratch, target, source)))
    ids = torch.zeros(2, 6, dtype=torch.long, device=device)
    tokens = torch.randint(1, 97, (2, 4), generator=rng).to(device)
    writes.append((ids, tokens, torch.tensor([1, 9], device=device), torch.tensor([0, 7], device=device)))
    ops.kernel("scatter_paths")(writes)
    assert all(torch.equal(state.cpu(), want) for (state, *_), want in zip(writes, expected))
    assert ids[0, 1] == tokens[0, 0] and ids[1, 3] == tokens[1, 3] and (ids > 0).sum() == 2
