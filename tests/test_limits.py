"""The largest trees, and trees of every size at the last tokens of a text."""

import pytest
import torch
from decoding import run
from oracle import generator, random_texts
from rounds import append, assert_nodes, assert_same_state, filled_cache, random_path, random_tree, run_round

from hf_treespec.config import MAX_BUDGET, MAX_DEPTH


PROMPTS = random_texts(generator(61), (33, 6))
PLAIN = {"budget": 1}


@pytest.fixture(scope="module")
def plain(model):
    return run(model, PROMPTS, MAX_DEPTH + 2, tree_config=PLAIN)[1]


@pytest.mark.parametrize("style", ["wide", "deep"])
def test_every_node_of_256_has_the_oracles_logits(model, style):
    """The deep ones are deeper than the window (10) and close many entries of their own."""
    rng = generator(62)
    (text,) = random_texts(rng, (27,))
    tree = random_tree(rng, 1, MAX_BUDGET, style)
    cache = filled_cache(model, [text], spare=tree.max_depth + 1)
    path, lengths = random_path(rng, tree)
    assert_nodes(model, run_round(model, cache, tree, path, lengths), [text], tree)
    assert tree.max_depth > (MAX_DEPTH if style == "deep" else 5)
    assert_same_state(cache, filled_cache(model, append([text], tree, path, lengths), spare=cache.spare))


DEEPEST = {
    "tree": {"budget": MAX_BUDGET, "depth": MAX_DEPTH, "top_k": 2},
    "chain": {"budget": MAX_DEPTH + 1, "top_k": 1},
}


@pytest.mark.parametrize(
    ("kind", "new_tokens"), [("tree", 65), ("chain", 1), ("chain", 64), ("chain", 65), ("chain", 66)]
)
def test_the_deepest_trees_up_to_the_last_token(model, plain, kind, new_tokens):
    """A perfect draft: the chain's rounds are of 65 tokens, the last one cut where the text ends. `max_length` counts
    columns."""
    options = {"max_length": len(PROMPTS[0]) + new_tokens, "max_new_tokens": None}
    output, texts = run(model, PROMPTS, tree_config=DEEPEST[kind], assistant_model=model, **options)
    assert output.sequences.shape[1] == len(PROMPTS[0]) + new_tokens
    for text, full in zip(texts, plain):
        assert torch.equal(text, full[: len(text)])
    accepted = output.tree_stats["accepted_lengths"]
    whole, rest = divmod(new_tokens, MAX_DEPTH + 1)
    expected = {MAX_DEPTH + 1: 2 * whole, rest: 2 if rest else 0}
    assert kind == "tree" or accepted == {length: count for length, count in expected.items() if count}
    assert max(accepted) >= min(new_tokens, 30)
    assert output.cache.lengths.tolist() == [len(text) - 1 for text in texts]


def test_a_wide_tree_of_an_imperfect_draft(model, drafter, plain):
    """Rows accept different counts, and one ends early: what is left for the other is cut right."""
    tree = {"budget": MAX_BUDGET, "depth": 4, "top_k": 12}
    new_tokens = 17
    output, texts = run(model, PROMPTS, new_tokens, tree_config=tree, assistant_model=drafter)
    for text, full in zip(texts, plain):
        assert torch.equal(text, full[: len(text)])
    assert output.tree_stats["nodes"] > 20 * output.tree_stats["rounds"]
    new = plain[0][len(PROMPTS[0]) :].tolist()
    end = next(token for token in new[3:] if token not in new[:3])
    ended = run(model, PROMPTS, new_tokens, tree_config=tree, assistant_model=drafter, eos_token_id=end)[1]
    expected = run(model, PROMPTS, new_tokens, tree_config=PLAIN, eos_token_id=end)[1]
    assert torch.equal(torch.cat(ended), torch.cat(expected))


@pytest.mark.parametrize("left", (1, 2, 3, 5))
def test_the_last_tokens_before_the_limit(model, drafter, plain, left):
    """A text that has `left` tokens to go, drafted deeper than that."""
    prompts = [text[: len(prompt) + 10] for text, prompt in zip(plain, PROMPTS)]
    for tree in ({"budget": 8, "depth": 5}, {"budget": 6, "top_k": 1}, {"budget": 8, "drafter": "ngram"}):
        assistant = None if "drafter" in tree else drafter
        output, texts = run(model, prompts, left, tree_config=tree, assistant_model=assistant)
        for text, full in zip(texts, plain):
            assert torch.equal(text, full[: len(text)])
        assert output.tree_stats["emitted_tokens"] == 2 * left
