"""Prompt lookup: the tree is what a plain Python trie gives, and the text is that of plain decoding."""

import heapq
import logging
import math
import warnings

import pytest
import torch
from decoding import run
from heads import shrink_layers
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_greedy, build_model, generator, left_pad, random_texts, tiny_config
from test_validation import refuse, with_generation_config
from transformers import GenerationConfig

import hf_treespec
from hf_treespec import TreeCache, TreeConfig
from hf_treespec.drafting.ngram import NgramTreeGenerator, longest_matches


CHAIN = {"budget": 5, "top_k": 1, "drafter": "ngram"}
TREE = {"budget": 8, "depth": 4, "top_k": 3, "drafter": "ngram"}
SHAPES = [CHAIN, TREE, {"budget": 2, "drafter": "ngram"}, {"budget": 64, "drafter": "ngram"}]
SHAPES += [
    {"budget": 256, "depth": 64, "top_k": 8, "drafter": "ngram"},
    {"budget": 65, "depth": 64, "drafter": "ngram"},
]


# What is proposed


def drafter_of(texts: list[list[int]], config: TreeConfig, *args, rows: int | None = None) -> NgramTreeGenerator:
    """A drafter whose cache has committed all but the last token of each text."""
    cache = TreeCache(tiny_config(), rows or len(texts))
    cache.length_bound = max(map(len, texts)) - 1
    cache.reserve(cache.length_bound + 70)
    # What lies behind a row's length is left over from rejected drafts and longer chunks.
    cache.token_ids.fill_(3)
    for row, text in enumerate(texts):
        cache.token_ids[row, : len(text) - 1] = torch.tensor(text[:-1])
        cache.lengths[row] = len(text) - 1
    return NgramTreeGenerator(cache, config, *args)


def paths_of(tree, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node of a row."""
    return [
        tuple(int(tree.tokens[row, ancestor]) for ancestor in path[1:] if ancestor >= 0)
        for path, valid in zip(tree.paths[row].tolist(), tree.valid[row].tolist())
        if valid and path[0] >= 0
    ][1:]


def plain_matches(text: list[int], longest: int) -> list[tuple[int, int]]:
    """`(size, position)`, the best first."""
    matches = []
    for position in range(len(text) - 1):
        size = 0
        while size < min(longest, position + 1) and text[position - size] == text[-1 - size]:
            size += 1
        if size:
            matches.append((size, position))
    return sorted(matches, reverse=True)[:16]


def plain_tree(text: list[int], config: TreeConfig, longest: int, end=()) -> dict[tuple[int, ...], float]:
    """Path -> estimated probability of the best nodes, popped one by one."""
    matches = plain_matches(text, longest)
    mass: dict[tuple[int, ...], float] = {}
    for order, (size, position) in enumerate(matches):
        weight = 0.25 ** (matches[0][0] - size) * (1 - order / 1024)
        mass[()] = mass.get((), 0) + weight
        path = ()
        for i in range(config.resolved_depth):
            token = text[position + 1 + i % (len(text) - 1 - position)]
            if token in end:
                break
            path += (token,)
            mass[path] = mass.get(path, 0) + weight
    best, queue = {}, [(-1.0, ())]
    while queue and len(best) < config.budget:
        score, path = heapq.heappop(queue)
        best[path] = -score
        # Stable: of equal ones the one of the better match.
        children = sorted((other for other in mass if other[:-1] == path and other), key=mass.get, reverse=True)
        for child in children[: config.resolved_top_k]:
            heapq.heappush(queue, (score * mass[child] / (mass[path] + 0.5), child))
    return {path: score for path, score in best.items() if path}


@given(
    texts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=40), min_size=1, max_size=3),
    budget=st.integers(2, 20),
    depth=st.integers(1, 9),
    top_k=st.integers(1, 4),
    longest=st.integers(1, 5),
    end=st.sampled_from([(), (4,), (2, 4)]),
)
def test_trees_are_those_of_a_plain_trie(texts, budget, depth, top_k, longest, end):
    config = TreeConfig(budget=budget, depth=depth, top_k=top_k)
    ends = torch.tensor(end) if end else None
    drafter = drafter_of(texts, config, longest, ends)
    tree = drafter.propose(None, torch.tensor([text[-1] for text in texts]), config.resolved_depth)
    assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]
    for row, text in enumerate(texts):
        # Where two nodes are equally good up to rounding, either may be taken.
        expected = plain_tree(text, config, longest, end)
        every = plain_tree(text, TreeConfig(budget=256, depth=config.resolved_depth, top_k=top_k), longest, end)
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths) == len(expected)
        assert set(paths) <= set(every)
        actual = sorted(every[path] for path in paths)
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(actual, sorted(expected.values())))
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)
        assert top_k > 1 or sorted(map(len, paths)) == list(range(1, len(paths) + 1))


def test_longer_matches_then_counts_then_recency_decide():
    def first_path(text, **options):
        config = TreeConfig(budget=2, **options)
        return paths_of(drafter_of([text], config, 3).propose(None, torch.tensor(text[-1:]), 1))

    # Behind [7, 8] came 1 once, behind 8 alone 2 twice and later.
    assert first_path([7, 8, 1, 5, 8, 2, 6, 8, 2, 7, 8]) == [(1,)]
    # 1 twice, then 2 once: the count; once each: the later one.
    assert first_path([8, 1, 8, 1, 8, 2, 8]) == [(1,)]
    assert first_path([8, 1, 8, 2, 8]) == [(2,)]
    # As often, and as late on average: the latest one.
    assert first_path([3, 8, 1, 4, 8, 2, 5, 8, 2, 6, 8, 1, 7, 8], top_k=1) == [(1,)]


def test_a_short_period_fills_the_whole_depth():
    for text, period in (([5, 9, 9], [9]), ([1, 2, 3, 1, 2, 3], [1, 2, 3])):
        config = TreeConfig(budget=9, top_k=1)
        tree = drafter_of([text], config).propose(None, torch.tensor(text[-1:]), 8)
        assert tree.tokens[0, 1:].tolist() == (period * 8)[:8]


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_longest_match_that_counts(size):
    text = torch.tensor([[1, 2, 3, 4, 5, 9, 5, 8, 4, 5, 7, 1, 2, 3, 4, 5]])
    positions, sizes = longest_matches(text, torch.tensor([16]), size, 3)
    expected = {1: [(9, 1), (6, 1), (4, 1)], 2: [(9, 2), (4, 2), (6, 1)], 5: [(4, 5), (9, 2), (6, 1)]}
    assert list(zip(positions[0].tolist(), sizes[0].tolist())) == expected[min(size, 5)]


@pytest.mark.parametrize("token", [0, 1, 3, 96])
def test_nothing_matches_before_the_first_token(token):
    texts = torch.tensor([[5, 9, token, 5, 7, 7]])
    positions, sizes = longest_matches(texts, torch.tensor([4]), 5, 2)
    assert (positions[0, 0], sizes[0].tolist()) == (0, [1, 0])


def test_rows_do_not_depend_on_their_batch():
    rng = generator(3)
    texts = [torch.randint(1, 6, (n,), generator=rng).tolist() for n in (50, 7, 1, 23)]
    config = TreeConfig(budget=12, depth=5, top_k=3)
    together = drafter_of(texts, config)
    roots = torch.tensor([text[-1] for text in texts])
    limits = torch.tensor([5, 2, 5, 0])
    tree = together.propose(None, roots, 5, limits)
    some = together.propose(torch.tensor([3, 1]), roots[[3, 1]], 5, limits[[3, 1]])
    for row, text in enumerate(texts):
        alone = drafter_of([text], config).propose(None, roots[[row]], 5, limits[[row]])
        assert paths_of(alone) == paths_of(tree, row)
        assert max(map(len, paths_of(tree, row)), default=0) <= limits[row]
    assert paths_of(some, 0) == paths_of(tree, 3) and paths_of(some, 1) == paths_of(tree, 1)
    assert paths_of(tree, 0) and paths_of(tree, 1) and not paths_of(tree, 2) and not paths_of(tree, 3)


def test_nothing_matches():
    config = TreeConfig(budget=8)
    for text in ([1, 2, 3, 4, 5], [6]):
        tree = drafter_of([text], config).propose(None, torch.tensor(text[-1:]), 7)
        assert tree.tokens.tolist() == [text[-1:]] and tree.valid.all()


def test_unlikely_nodes_get_no_children():
    text = [8, 1, 3, 8, 1, 3, 8, 2, 4, 8]
    tree = drafter_of([text], TreeConfig(budget=9, depth=2), 1, None, 0.3).propose(None, torch.tensor([8]), 2)
    assert sorted(paths_of(tree)) == [(1,), (1, 3), (2,)]


# The text


@pytest.fixture(scope="module")
def looping():
    """A model whose next token depends mostly on the present one: it soon repeats itself."""
    model = build_model(tiny_config())
    shrink_layers(model)
    return hf_treespec.enable(model)


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_trees_write_the_plain_text(looping, tree):
    # Repetitive prompts, one without any repetition, one of a single token.
    texts = [torch.cat([text, text, text[:4]]) for text in random_texts(generator(1), (9, 3, 17))]
    texts += [torch.arange(1, 20), torch.tensor([5])]
    _, plain = run(looping, texts, 40, tree_config={"budget": 1})
    assert_greedy(looping, plain, [len(text) for text in texts])
    output, together = run(looping, texts, 40, tree_config=tree, prefill_chunk_size=11)
    assert torch.equal(torch.cat(together), torch.cat(plain))
    assert output.tree_stats["emitted_tokens"] > output.tree_stats["rounds"]
    for row in (0, 3, 4):
        assert torch.equal(run(looping, [texts[row]], 40, tree_config=tree)[1][0], plain[row])


def test_a_random_model_rejects_and_goes_on(model):
    """Small vocabulary in the prompts: plenty of wrong proposals, partial paths of every length."""
    texts = random_texts(generator(2), (60, 33, 48), vocabulary=5)
    _, plain = run(model, texts, 64, tree_config={"budget": 1})
    for tree in (CHAIN, TREE):
        output, written = run(model, texts, 64, tree_config=tree)
        assert torch.equal(torch.cat(written), torch.cat(plain))
        assert output.tree_stats["accepted_lengths"].keys() >= {1, 2}


@pytest.mark.parametrize("tree", [CHAIN, {"budget": 9, "top_k": 1, "drafter": "ngram"}, TREE], ids=str)
def test_perfect_repetition_accepts_everything(looping, tree):
    _, texts = run(looping, random_texts(generator(3), (5, 8)), 120, tree_config={"budget": 1})
    # The prompts end deep inside the loop, so that every continuation is right.
    depth = TreeConfig(**tree).resolved_depth
    output, _ = run(looping, texts, 4 * (depth + 1), tree_config=tree)
    assert output.tree_stats["accepted_lengths"] == {depth + 1: 8}


def test_a_prompt_without_a_match_is_decoded_plainly(model, monkeypatch):
    sizes = []
    propose = NgramTreeGenerator.propose

    def spy(self, *args):
        tree = propose(self, *args)
        sizes.append(tree.tokens.shape[1])
        return tree

    monkeypatch.setattr(NgramTreeGenerator, "propose", spy)
    _, plain = run(model, [torch.arange(1, 20)], 6, tree_config={"budget": 1})
    _, written = run(model, [torch.arange(1, 20)], 6, tree_config=TREE)
    assert sizes[0] == 1 and torch.equal(written[0], plain[0])


def test_end_tokens_of_the_prompt_are_not_proposed(looping, monkeypatch):
    text = torch.tensor([7, 8, 9, 7, 8, 9, 7, 8, 9, 7])
    _, (unended,) = run(looping, [text], 30, tree_config={"budget": 1})
    end = int(unended[len(text) + 12])
    # The prompt holds the end token, in front of what the model writes.
    prompt = torch.cat([unended, text])
    proposed = []
    propose = NgramTreeGenerator.propose

    def spy(self, *args):
        proposed.append(propose(self, *args))
        return proposed[-1]

    monkeypatch.setattr(NgramTreeGenerator, "propose", spy)
    options = {"eos_token_id": [end, 96], "pad_token_id": 0}
    texts = [prompt, prompt[5:], text]
    _, plain = run(looping, texts, 30, tree_config={"budget": 1}, **options)
    _, written = run(looping, texts, 30, tree_config=TREE, **options)
    assert torch.equal(torch.cat(written), torch.cat(plain))
    assert proposed and end in prompt
    assert not any((tree.tokens[:, 1:][tree.valid[:, 1:]] == end).any() for tree in proposed)


def test_loose_bounds(looping, loose_bounds):
    texts = [text.repeat(2) for text in random_texts(generator(4), (9, 5))]
    _, plain = run(looping, texts, 30, tree_config={"budget": 1})
    assert torch.equal(torch.cat(run(looping, texts, 30, tree_config=TREE)[1]), torch.cat(plain))


def test_a_second_turn_looks_up_the_first(looping):
    texts = random_texts(generator(5), (12, 7))
    first, written = run(looping, texts, 20, tree_config=TREE)
    again = [torch.cat([text, more]) for text, more in zip(written, random_texts(generator(6), (3, 5)))]
    output, continued = run(looping, again, 20, tree_config=TREE, cache=first.cache)
    fresh, expected = run(looping, again, 20, tree_config=TREE)
    assert torch.equal(torch.cat(continued), torch.cat(expected))
    assert output.tree_stats["accepted_lengths"] == fresh.tree_stats["accepted_lengths"]


# The options


def test_prompt_lookup_num_tokens_chooses_the_drafter_and_the_depth(looping, caplog):
    texts = [text.repeat(3) for text in random_texts(generator(7), (6, 9))]
    chosen = {"budget": 8, "depth": 3, "drafter": "ngram"}
    expected, plain = run(looping, texts, 24, tree_config=chosen)
    lookup = {"prompt_lookup_num_tokens": 3}
    config = GenerationConfig(max_new_tokens=24, do_sample=False, return_dict_in_generate=True, **lookup)
    shipped = with_generation_config(looping, GenerationConfig(eos_token_id=None, pad_token_id=0, **lookup))
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        outputs = {
            "argument": run(looping, texts, 24, tree_config={"budget": 8}, **lookup)[0],
            "config": looping.generate(**left_pad(texts), tree_config={"budget": 8}, generation_config=config),
            "shipped": run(shipped, texts, 24, tree_config={"budget": 8})[0],
        }
    assert not caplog.records
    assert config.prompt_lookup_num_tokens == shipped.generation_config.prompt_lookup_num_tokens == 3
    for name, output in outputs.items():
        assert torch.equal(output.sequences, expected.sequences), name
        assert output.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"], name
    both, written = run(shipped, texts, 24, tree_config={"budget": 8}, generation_config=config)
    assert torch.equal(torch.cat(written), torch.cat(plain))
    assert both.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"]
    # A depth of the config stays; plain decoding stays plain.
    shallow = run(looping, texts, 24, tree_config={"budget": 8, "depth": 1}, **lookup)[0]
    assert max(shallow.tree_stats["accepted_lengths"]) == 2
    assert run(looping, texts, 24, tree_config={"budget": 1}, **lookup)[0].tree_stats["accepted_lengths"].keys() == {1}


def test_max_matching_ngram_size(looping, monkeypatch):
    seen = []
    init = NgramTreeGenerator.__init__

    def spy(self, cache, config, size, *args):
        seen.append(size)
        init(self, cache, config, size, *args)

    monkeypatch.setattr(NgramTreeGenerator, "__init__", spy)
    texts = [text.repeat(3) for text in random_texts(generator(8), (6, 9))]
    _, plain = run(looping, texts, 12, tree_config={"budget": 1}, max_matching_ngram_size=9)
    for options in (
        {},
        {"max_matching_ngram_size": 5},
        {"generation_config": GenerationConfig(max_matching_ngram_size=3)},
    ):
        written = run(looping, texts, 12, tree_config=TREE, **options)[1]
        assert torch.equal(torch.cat(written), torch.cat(plain))
    assert seen == [2, 5, 3]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"prompt_lookup_num_tokens": 0}, ["`prompt_lookup_num_tokens` is 0", "1 to 64"]),
        ({"prompt_lookup_num_tokens": 2.5}, ["`prompt_lookup_num_tokens` is 2.5"]),
        ({"prompt_lookup_num_tokens": True}, ["`prompt_lookup_num_tokens` is True"]),
        ({"prompt_lookup_num_tokens": 65}, ["`prompt_lookup_num_tokens` is 65", "1 to 64"]),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 0}, ["`max_matching_ngram_size` is 0"]),
        ({"tree_config": TREE, "max_matching_ngram_size": "2"}, ["`max_matching_ngram_size` is '2'"]),
        (
            {"prompt_lookup_num_tokens": 3, "tree_config": {"budget": 4, "drafter": "mtp"}},
            ["`prompt_lookup_num_tokens` is 3", "drafter='mtp'"],
        ),
    ],
    ids=str,
)
def test_what_is_refused(model, options, names):
    refuse(model, *names, **{"tree_config": {"budget": 4}, **options})


def test_one_drafter_only(model, drafter):
    refuse(model, "prompt_lookup_num_tokens", "assistant_model", prompt_lookup_num_tokens=3, assistant_model=drafter)
    refuse(model, "drafter='ngram'", "assistant_model", tree_config=TREE, assistant_model=drafter)
    tree = {"budget": 4}
    refuse(
        model, "max_matching_ngram_size", "ngram", tree_config=tree, max_matching_ngram_size=3, assistant_model=drafter
    )


def test_stock_decoding_drops_it_when_disabled(model, monkeypatch):
    monkeypatch.setenv("HF_TREESPEC_DISABLE", "1")
    inputs = left_pad(random_texts(generator(9), (6,)))
    options = {"max_new_tokens": 4, "do_sample": False}
    output = model.generate(**inputs, **options, tree_config={"budget": 4}, prompt_lookup_num_tokens=3)
    assert torch.equal(output, model.generate(**inputs, **options))
