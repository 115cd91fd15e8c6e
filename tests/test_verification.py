"""Every node of a forked forward gets the oracle's logits; prompts enter the cache by the same operation."""

import pytest
import torch
from oracle import assert_logits, build_model, generator, oracle_last_logits, random_texts, tiny_config
from rounds import (
    append,
    assert_nodes,
    assert_same_state,
    filled_cache,
    node_texts,
    random_path,
    random_tree,
    run_round,
)
from transformers import DynamicCache

import hf_treespec
from hf_treespec import TokenTree, TreeCache
from hf_treespec.fork import DEFAULT_SPARE
from hf_treespec.oracle import oracle_logits


SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SHAPES = {
    "tiny": {},
    # An indexer narrower than the heads, ratios with no common factor, a window below the compressors' spans.
    "odd": {
        "index_head_dim": 12,
        "layer_types": [CSA, HCA, SLIDING, CSA],
        "compress_rates": {CSA: 3, HCA: 7},
        "sliding_window": 5,
        "index_topk": 3,
        "hc_mult": 3,
        "rope_theta": 100.0,
        "compress_rope_theta": 1000.0,
    },
    # Nothing but the window, and nothing but selected entries: what one layer type gets wrong, no other can hide.
    "sliding": {"layer_types": [SLIDING] * 2, "mlp_layer_types": ["moe"] * 2, "num_hidden_layers": 2},
    "csa": {"layer_types": [CSA] * 2, "mlp_layer_types": ["moe"] * 2, "num_hidden_layers": 2, "index_topk": 2},
    "hca": {"layer_types": [HCA] * 2, "mlp_layer_types": ["hash_moe"] * 2, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module", params=SHAPES)
def target(request):
    return hf_treespec.enable(build_model(tiny_config(**SHAPES[request.param]), seed=1))


def chain_logits(model, cache: TreeCache, texts: list[torch.Tensor], chunk_size: int) -> list[torch.Tensor]:
    """Feeds `texts` in chunks, rows dropping out as they end; returns the logits of all their tokens."""
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for offset in range(0, max(len(text) for text in texts), chunk_size):
        rows = [row for row, text in enumerate(texts) if len(text) > offset]
        chunks = [texts[row][offset : offset + chunk_size] for row in rows]
        counts = torch.tensor([len(chunk) for chunk in chunks])
        tree = TokenTree.chain(torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True), counts)
        path = torch.arange(tree.tokens.shape[1]).expand_as(tree.tokens)
        output = run_round(model, cache, tree, path, counts, torch.tensor(rows))
        for i, row in enumerate(rows):
            logits[row].append(output[i, : counts[i]])
        assert tree.is_chain and "paths" not in vars(tree)  # no table of size chunk x chunk
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize(
    ("count", "style", "lengths"),
    [
        (1, "wide", (33, 8, 0)),
        (2, "wide", (34, 7, 1)),
        (5, "deep", (35, 12, 3)),
        (8, "wide", (62, 41, 20)),
        (17, "deep", (61, 11, 2)),
        (25, "chain", (60, 23, 9)),
        (33, "star", (59, 42, 5)),
        (40, "wide", (90, 22, 0)),
        (40, "deep", (57, 40, 31)),
    ],
)
def test_every_node_has_the_oracles_logits(target, count, style, lengths):
    rng = generator(count)
    texts = random_texts(rng, lengths)
    cache = filled_cache(target, texts)
    tree = random_tree(rng, 3, count, style, ragged=True)
    assert_nodes(target, run_round(target, cache, tree), texts, tree)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 16, 29, 64, 500])
def test_chunked_prefill(target, chunk_size):
    texts = random_texts(generator(2), (73, 50, 21))
    logits = chain_logits(target, TreeCache(target.config, 3), texts, chunk_size)
    for text, actual in zip(texts, logits):
        assert_logits(target, actual, oracle_logits(target, text[None])[0], [text] * len(text))


@pytest.mark.parametrize("chunk_size", [90, 200, 512])
def test_long_chunks_are_attended_in_blocks_and_outgrow_the_rings(model, chunk_size):
    texts = random_texts(generator(3), (301, 150))
    cache = TreeCache(model.config, 2)
    logits = chain_logits(model, cache, texts, chunk_size)
    for text, actual in zip(texts, logits):
        assert_logits(model, actual, oracle_logits(model, text[None])[0], [text] * len(text))
    assert_same_state(cache, filled_cache(model, texts, chunk_size=64))


@pytest.mark.parametrize("chunk_size", [1, 2, 6, 13, 32, 33, 41, 512])
def test_prefill_leaves_the_same_state_for_any_chunk_size(model, chunk_size):
    texts = random_texts(generator(4), (97, 64, 1))
    cache = filled_cache(model, texts, chunk_size=chunk_size)
    assert cache.lengths.tolist() == cache.written.tolist() == [97, 64, 1]
    assert_same_state(cache, filled_cache(model, texts, chunk_size=10))


def test_prefilled_state_is_what_stock_computes(model):
    (text,) = random_texts(generator(5), (61,))
    cache, stock = filled_cache(model, [text]), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=text[None], cache=stock)
    for layer, other in zip(cache.layers, stock.layers):
        kept = layer.sliding_window - 1
        window = layer.window[0, torch.arange(61 - kept, 61) % layer.window.shape[1]]
        torch.testing.assert_close(window, other.keys[0, 0, -kept:], atol=2e-6, rtol=2e-6)
        for name, stream in layer.streams.items():
            entries = other.compressed_kv[name][0]
            assert len(entries) == 61 // stream.ratio > 6
            torch.testing.assert_close(stream.entries[0, : len(entries)], entries, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("style", ["wide", "deep"])
def test_level_by_level_is_one_forward(target, style):
    rng = generator(6)
    texts = random_texts(rng, (45, 22, 3))
    # In the order of levels, as drafting makes them; ragged rows have padding nodes inside.
    tree = random_tree(rng, 3, 20, style, ragged=True)
    order = torch.where(tree.valid, tree.depths, 99).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    levels = [int((tree.valid & (tree.depths == depth)).sum(1).max()) for depth in range(tree.max_depth + 1)]
    levels = [width for width in levels if width]  # the deepest node may have been cut off
    cache = filled_cache(target, texts)
    grown = TokenTree.chain(tree.tokens[:, :1])
    with torch.no_grad(), cache.fork(grown) as fork:
        logits = [target(**fork.model_inputs()).logits]
        number = torch.zeros_like(rank)
        for depth in range(1, len(levels)):
            tokens, parents, valid = (torch.zeros(3, levels[depth], dtype=torch.long) for _ in range(3))
            for row in range(3):
                nodes = [
                    node for node in order[row].tolist() if tree.valid[row, node] and tree.depths[row, node] == depth
                ]
                for column, node in enumerate(nodes):
                    number[row, node] = grown.tokens.shape[1] + column
                    tokens[row, column] = tree.tokens[row, node]
                    parents[row, column] = number[row, tree.parents[row, node]]
                    valid[row, column] = 1
            grown = grown.grow(tokens, parents, valid.bool())
            fork.extend(grown)
            logits.append(target(**fork.model_inputs()).logits)
        logits = torch.cat(logits, 1)
        path, lengths = random_path(rng, tree)
        grown_path = torch.where(path < 0, -1, number.gather(1, path.clamp(min=0)))
        fork.refresh(grown_path, lengths)
    assert_nodes(target, logits, texts, grown)

    at_once = filled_cache(target, texts)
    single = run_round(target, at_once, tree, path, lengths)
    for row, node in tree.valid.nonzero().tolist():
        torch.testing.assert_close(logits[row, number[row, node]], single[row, node], atol=2e-5, rtol=2e-5)
    assert_same_state(cache, at_once)


@pytest.mark.parametrize("rows", [[2], [0, 2], [3, 1, 0, 2], [2, 0, 0], [1, 3, 1, 1]])
def test_subsets_permutations_and_bucket_padding_of_rows(model, rows):
    rng = generator(8)
    texts = random_texts(rng, (37, 18, 50, 4))
    cache = filled_cache(model, texts)
    tree = random_tree(rng, len(rows), 11, "deep")
    path, lengths = random_path(rng, tree)
    repeated = torch.tensor([row in rows[:i] for i, row in enumerate(rows)])
    lengths = torch.where(repeated, 0, lengths)  # a repeated row pads the batch: its path has length 0
    logits = run_round(model, cache, tree, path, lengths, torch.tensor(rows))
    assert_nodes(model, logits, [texts[row] for row in rows], tree)
    expected = list(texts)
    for i, row in enumerate(rows):
        expected[row] = torch.cat([expected[row], tree.tokens[i, path[i, : lengths[i]]]])
    assert_same_state(cache, filled_cache(model, expected))


def test_rows_do_not_see_each_other_or_padding_nodes(model):
    rng = generator(9)
    texts = random_texts(rng, (40, 13, 28))
    tree = random_tree(rng, 3, 12, "wide", ragged=True)
    cache = filled_cache(model, texts)
    first = run_round(model, cache, tree)
    other = filled_cache(model, random_texts(rng, (31, 70)) + texts[1:2])
    moved = TokenTree(*(part[[2, 0, 1]] for part in (tree.tokens, tree.paths, tree.valid)))
    second = run_round(model, other, moved)
    valid = tree.valid[1]
    torch.testing.assert_close(first[1][valid], second[2][valid], atol=1e-5, rtol=1e-5)


def test_later_tokens_do_not_move_earlier_logits(model):
    texts = random_texts(generator(10), (48,))
    changed = texts[0].clone()
    changed[-1] = changed[-1] % 96 + 1
    ours = [chain_logits(model, TreeCache(model.config, 1), [text], 512)[0] for text in (texts[0], changed)]
    torch.testing.assert_close(ours[0][:-1], ours[1][:-1], atol=1e-5, rtol=1e-5)
    assert (ours[0][-1] - ours[1][-1]).abs().max() > 0.1
    # The oracle too, so that one pass over a text may be read at every place, and texts padded behind.
    oracle = [oracle_logits(model, text[None])[0] for text in (texts[0], changed)]
    torch.testing.assert_close(oracle[0][:-1], oracle[1][:-1], atol=1e-5, rtol=1e-5)


def test_one_logit_row_per_prompt(model):
    texts = random_texts(generator(11), (30, 12))
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    cache = TreeCache(model.config, 2)
    with torch.no_grad(), cache.fork(TokenTree.chain(tokens, torch.tensor([30, 12]))) as fork:
        logits = model(**fork.model_inputs(), logits_to_keep=torch.tensor([[29], [11]])).logits
    assert logits.shape == (2, 1, 97)
    assert_logits(model, logits[:, 0], torch.stack([oracle_logits(model, t[None])[0, -1] for t in texts]), texts)


@pytest.mark.parametrize("spare", [1, 7, DEFAULT_SPARE, 100])
def test_any_spare(model, spare):
    rng = generator(12)
    texts = random_texts(rng, (44, 19))
    cache = filled_cache(model, texts, spare=spare, chunk_size=9)
    tree = random_tree(rng, 2, 20, "deep")
    assert_nodes(model, run_round(model, cache, tree), texts, tree)


def test_lengths_may_be_known_as_a_bound_only(target, loose_bounds):
    rng = generator(13)
    texts = random_texts(rng, (44, 19, 0))
    cache = filled_cache(target, texts, chunk_size=20)
    tree = random_tree(rng, 3, 16, "deep", ragged=True)
    path, lengths = random_path(rng, tree)
    assert_nodes(target, run_round(target, cache, tree, path, lengths), texts, tree)
    loose_bounds.undo()
    assert_same_state(cache, filled_cache(target, append(texts, tree, path, lengths)))


def test_bf16_is_as_close_to_fp32_as_stock(model):
    rng = generator(14)
    texts = random_texts(rng, (44, 19, 30))
    tree = random_tree(rng, 3, 12, "deep")
    nodes, paths = node_texts(texts, tree)
    exact = oracle_last_logits(model, paths)
    half = hf_treespec.enable(build_model(tiny_config()).to(torch.bfloat16))
    ours = run_round(half, filled_cache(half, texts), tree)
    assert ours.dtype == torch.bfloat16
    ours = torch.stack([ours[row, node] for row, node in nodes])
    errors = [(logits.float() - exact).norm(dim=-1).median() for logits in (ours, oracle_last_logits(half, paths))]
    assert errors[0] < 1.3 * errors[1]
