"""Faults that other implementations of speculation on this architecture were published with, where no other file has
them: the right answer is always that of plain decoding."""

import pytest
import torch
from decoding import TREE, run
from oracle import assert_greedy, build_model, generator, random_texts, tiny_config
from rounds import append, assert_decodes_on, assert_nodes, assert_same_state, filled_cache, random_tree, run_round
from transformers import LogitsProcessor, LogitsProcessorList

import hf_treespec


def test_the_switch_from_dense_to_selected_compressed_attention(model, drafter):
    """Texts that have as many entries as the indexer selects, a few less and a few more: prefill, plain decoding and
    trees go from seeing all to selecting at the same token."""
    config = model.config
    switch = config.index_topk * config.compress_rates["compressed_sparse_attention"]
    texts = random_texts(generator(0), range(switch - 6, switch + 6))
    for tree in ({"budget": 1}, TREE):
        written = run(model, texts, 12, tree_config=tree, assistant_model=drafter)[1]
        assert_greedy(model, written, [len(text) for text in texts])
    tree = random_tree(generator(1), len(texts), 9, "deep")
    assert_nodes(model, run_round(model, filled_cache(model, texts), tree), texts, tree)


def test_a_rejection_at_every_residue_near_a_boundary_of_128():
    """Rounds that begin before, at and behind the end of an HCA window of the real size, accepting 1 to 8 of 8."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["moe", "moe"]}
    layers["layer_types"] = ["compressed_sparse_attention", "heavily_compressed_attention"]
    model = hf_treespec.enable(build_model(tiny_config(compress_rates=rates, **layers), seed=6))
    texts = random_texts(generator(2), range(119, 135))
    cache = filled_cache(model, texts)
    for _ in range(2):
        tree = random_tree(generator(3), len(texts), 8, "chain")
        lengths = 1 + torch.randint(8, (len(texts),), generator=generator(4))
        path = tree.paths[:, -1]
        assert_nodes(model, run_round(model, cache, tree, path, lengths), texts, tree)
        texts = append(texts, tree, path, lengths)
        assert_same_state(cache, filled_cache(model, texts))
    assert_decodes_on(model, cache, texts)


class Presence(LogitsProcessor):
    """As servers define it: so much less for every token of the text, and so much per time it occurred."""

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones(input_ids.shape))
        counts[:, 0] = 0  # padding
        return scores - 1.5 * (counts > 0) - 0.4 * counts


@pytest.mark.parametrize("declared", [False, True], ids=["lockstep", "declared"])
def test_penalties_never_count_a_rejected_draft(model, drafter, declared, monkeypatch):
    """Each row of a batch is stock decoding of that row alone."""
    monkeypatch.setattr(Presence, "row_independent", declared, raising=False)
    texts = random_texts(generator(5), (11, 7, 16))
    options = {"logits_processor": LogitsProcessorList([Presence()])}
    stock = [run(model, [text], 20, **options)[1][0] for text in texts]
    output, written = run(model, texts, 20, tree_config=TREE, assistant_model=drafter, **options)
    assert torch.equal(torch.cat(written), torch.cat(stock))
    assert len(output.tree_stats["accepted_lengths"]) > 1
    assert not torch.equal(torch.cat(stock), torch.cat(run(model, texts, 20, tree_config={"budget": 1})[1]))
