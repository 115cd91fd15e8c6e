"""One slice at the attention dimensions of DeepSeek-V4-Flash: what is tiny elsewhere has its real size here."""

import pytest
import torch
from oracle import assert_logits, build_model, generator, oracle_last_logits, random_texts, tiny_config
from rounds import filled_cache, node_texts, random_tree, run_round

import hf_treespec


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slice_of_flash():
    """One layer of each type; only hidden size, experts and vocabulary are small."""
    config = tiny_config(
        hidden_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=128,
        o_groups=8,
        o_lora_rank=32,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        sliding_window=128,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        partial_rotary_factor=64 / 512,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        mlp_layer_types=["hash_moe", "moe", "moe"],
    )
    return hf_treespec.enable(build_model(config, seed=6))


@pytest.mark.parametrize(
    ("lengths", "count", "paths"),
    [
        ((125, 260), 16, 20),  # around the window, and the first two HCA entries
        ((2070,), 12, 2),  # more CSA entries than are selected
    ],
    ids=["short", "long"],
)
def test_paths(slice_of_flash, lengths, count, paths):
    rng = generator(paths)
    texts = random_texts(rng, lengths)
    cache = filled_cache(slice_of_flash, texts, chunk_size=200)
    tree = random_tree(rng, len(lengths), count, "deep")
    logits = run_round(slice_of_flash, cache, tree)
    nodes, node_paths = node_texts(texts, tree)
    # The deepest ones: they close entries of their own.
    chosen = sorted(range(len(nodes)), key=lambda i: -int(tree.depths[nodes[i]]))[:paths]
    assert (min(lengths) // 4 > 512) == (paths == 2)
    actual = torch.stack([logits[nodes[i]] for i in chosen])
    picked = [node_paths[i] for i in chosen]
    assert_logits(slice_of_flash, actual, oracle_last_logits(slice_of_flash, picked), picked)
