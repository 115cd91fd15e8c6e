"""Drafting with an assistant, without a target: what it proposes is what the assistant itself would say.

A wrong draft cache never shows in the text, only in what is accepted. So every drafted token is checked here against
the assistant's own forward, without a cache, while a made-up target accepts random paths.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from decoding import ASSISTANTS, make_assistant, run
from oracle import build_model, generator, left_pad, oracle_last_logits, random_texts, tiny_config

import hf_treespec
from hf_treespec import TreeConfig, ops
from hf_treespec.drafting.assistant import AssistantTreeGenerator
from hf_treespec.drafting.calibration import AcceptanceCalibration
from hf_treespec.drafting.candidates import CandidatePool
from hf_treespec.prefill import left_align


class MadeUpTarget:
    """Walks a random path of every proposed tree; row `i` does the same in any batch."""

    def __init__(self, drafter: AssistantTreeGenerator, texts, seeds=None) -> None:
        self.drafter, self.texts = drafter, list(texts)
        self.rngs = [generator(seed) for seed in (seeds or range(len(texts)))]
        inputs = left_pad(texts)
        tokens, lengths = left_align(inputs["input_ids"], inputs["attention_mask"])
        with torch.no_grad():
            drafter.begin(tokens, lengths - 1)

    @torch.no_grad()
    def round(self, depth: int, rows: list[int]):
        """Returns the tree; afterwards the texts are longer by what was accepted."""
        index = None if len(rows) == len(self.texts) else torch.tensor(rows)
        tree = self.drafter.propose(index, torch.stack([self.texts[row][-1] for row in rows]), depth)
        predicted = torch.stack([self._predict(self.rngs[row], tree, i) for i, row in enumerate(rows)])
        path, lengths = ops.accept(tree.tokens, tree.paths, tree.valid, predicted)
        self._commit(index, tree, path, lengths, predicted)
        self.drafter.update(path, lengths, predicted)
        for i, row in enumerate(rows):
            self.texts[row] = torch.cat([self.texts[row], predicted[i, path[i, : lengths[i]]]])
        return tree

    def _commit(self, index, tree, path, lengths, predicted) -> None:
        """Where a target would run: this one has no cache."""

    def _predict(self, rng, tree, row) -> torch.Tensor:
        nodes = tree.valid[row].nonzero()[:, 0].tolist()
        end = nodes[int(torch.randint(len(nodes), (1,), generator=rng))]
        path = [node for node in tree.paths[row, end].tolist() if node >= 0]
        predicted = torch.full_like(tree.tokens[row], -1)
        for parent, child in zip(path, path[1:]):
            predicted[parent] = tree.tokens[row, child]
        children = {int(tree.tokens[row, node]) for node in nodes if node and tree.parents[row, node] == end}
        free = [token for token in range(97) if token not in children]
        predicted[end] = free[int(torch.randint(len(free), (1,), generator=rng))]
        return predicted


def assert_drafted_by(assistant, tree, texts, top_k: int) -> None:
    """Every token below the root is one of the assistant's `top_k` behind the path to its parent."""
    for row, text in enumerate(texts):
        nodes = [node for node in range(1, tree.tokens.shape[1]) if tree.valid[row, node]]
        parents = sorted({int(tree.parents[row, node]) for node in nodes})
        if not nodes:
            continue
        paths = [tree.paths[row, node][tree.paths[row, node] > 0] for node in parents]
        logits = oracle_last_logits(assistant, [torch.cat([text, tree.tokens[row, path]]) for path in paths])
        worst = logits.topk(top_k).values[:, -1]
        for node in nodes:
            parent = parents.index(int(tree.parents[row, node]))
            assert logits[parent, tree.tokens[row, node]] >= worst[parent] - 1e-5, (row, node)
        siblings = [(int(tree.parents[row, node]), int(tree.tokens[row, node])) for node in nodes]
        assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("kind", ASSISTANTS)
@pytest.mark.parametrize(("top_k", "depth"), [(1, 4), (3, 4)])
def test_drafts_are_the_assistants_own(kind, top_k, depth):
    assistant = make_assistant(kind)
    if kind == "deepseek_v4":
        hf_treespec.enable(assistant)
    texts = random_texts(generator(1), (21, 9, 2))
    config = TreeConfig(budget=8, depth=depth, top_k=top_k)
    target = MadeUpTarget(AssistantTreeGenerator(assistant, config, SimpleNamespace(rows=3), chunk_size=8), texts)
    deepest = 0
    for index in range(14):
        rows = [0, 1, 2] if index < 8 else [2, 0]  # a finished row leaves
        before = [target.texts[row] for row in rows]
        tree = target.round(depth, rows)
        assert_drafted_by(assistant, tree, before, top_k)
        assert tree.tokens.shape[1] == (depth + 1 if top_k == 1 else 8) and tree.valid.all()
        deepest = max(deepest, int(tree.depths.max()))
    assert deepest == depth
    # What the assistant has read: everything but the root, and at most one accepted leaf that it never expanded.
    unread = torch.tensor([len(text) - 1 for text in target.texts]) - target.drafter.cache.lengths
    assert torch.equal(unread, target.drafter.has_pending.long())


@pytest.fixture(scope="module")
def sure_of_some():
    """An assistant that is sure of some rows and of others not."""
    v4 = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]}
    assistant = build_model(tiny_config(**v4), seed=3)
    with torch.no_grad():
        assistant.lm_head.weight.mul_(2)
    return hf_treespec.enable(assistant)


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3])
def test_a_rows_trees_do_not_depend_on_its_batch(sure_of_some, threshold):
    config = TreeConfig(budget=8, depth=5, top_k=3)
    texts = random_texts(generator(2), (23, 14, 19, 30))

    def trees(rows: list[int]):
        target = MadeUpTarget(
            AssistantTreeGenerator(sure_of_some, config, SimpleNamespace(rows=len(rows)), threshold),
            [texts[row] for row in rows],
            rows,
        )
        for _ in range(12):
            tree = target.round(5, list(range(len(rows))))
            yield [
                [
                    [int(tree.tokens[i, n]) for n in path if n >= 0]
                    for path, real in zip(tree.paths[i].tolist(), tree.valid[i])
                    if real
                ]
                for i in range(len(rows))
            ]

    together = list(trees([0, 1, 2, 3]))
    for row in range(4):
        for index, alone in enumerate(trees([row])):
            assert sorted(alone[0]) == sorted(together[index][row]), f"row {row}, round {index}"


@pytest.mark.parametrize("threshold", [0.15, 0.3, 0.7])
def test_confidence_threshold(model, sure_of_some, threshold):
    """Rows stop expanding at different levels; the text is the same, and padding nodes are not counted."""
    texts = random_texts(generator(3), (23,) * 8)
    options = {"tree_config": {"budget": 8, "depth": 5}, "assistant_model": sure_of_some}
    everything, expected = run(model, texts, 20, **options)
    proposed = []
    propose = AssistantTreeGenerator.propose

    def spy(self, *args):
        proposed.append(propose(self, *args))
        return proposed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistantTreeGenerator, "propose", spy)
        output, written = run(model, texts, 20, **options, assistant_confidence_threshold=threshold)
    assert torch.equal(torch.stack(written), torch.stack(expected))
    assert any(not tree.valid.all() for tree in proposed)
    assert output.tree_stats["nodes"] == sum(int(tree.valid.sum()) for tree in proposed)
    assert output.tree_stats["nodes"] < everything.tree_stats["nodes"]


@pytest.mark.parametrize("threshold", [-0.1, 1, 1.5])
def test_confidence_threshold_out_of_range(model, sure_of_some, threshold):
    with pytest.raises(ValueError, match=rf"assistant_confidence_threshold` is {threshold}"):
        options = {"tree_config": {"budget": 4}, "assistant_model": sure_of_some}
        run(model, random_texts(generator(3), (5,)), **options, assistant_confidence_threshold=threshold)


def test_the_best_candidates_form_the_tree():
    # Row 0: the second child of the root is worse than its brother's child; row 1: the other way round.
    pool = CandidatePool(torch.tensor([7, 8]))
    tokens, chances = torch.tensor([[[1, 2]], [[3, 4]]]), torch.tensor([[[0.9, 0.1]], [[0.5, 0.4]]])
    pool.add_level(tokens, chances, chances)
    place, frontier, worth = pool.advance(1, 2, -math.inf, torch.tensor([[True], [True]]))
    assert place.tolist() == [[0], [0]] and frontier.tolist() == [[1], [3]] and worth.all()
    pool.add_level(torch.tensor([[[5, 6]], [[5, 6]]]), chances, torch.full((2, 1, 2), 0.6))
    tree, entries = pool.best_tree(2)
    assert tree.tokens.tolist() == [[7, 1, 5], [8, 3, 4]]
    assert tree.parents.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert entries.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert pool.ranks(entries).tolist() == [[0, 1, -1], [0, 1, -1]]
    assert pool.parents.tolist() == [[0, 0, 0, 1, 1]] * 2


def test_calibration_learns_acceptance_by_rank():
    calibration = AcceptanceCalibration(rows=2, top_k=2)
    probabilities = torch.tensor([[[0.6, 0.3]]])
    row = torch.tensor([1])
    first = calibration.estimate(row, probabilities)
    for _ in range(200):
        calibration.update(row, probabilities, torch.tensor([[[True, False]]]), torch.tensor([[True]]))
    learned = calibration.estimate(row, probabilities)[0, 0]
    assert learned[0] > 0.9 > first[0, 0, 0] and learned[1] < 0.05 < first[0, 0, 1]
    assert torch.equal(calibration.estimate(torch.tensor([0]), probabilities), first)  # rows learn for themselves
    before = calibration.estimate(row, probabilities)
    calibration.update(row, probabilities, torch.tensor([[[False, True]]]), torch.tensor([[False]]))  # not on the path
    assert torch.equal(calibration.estimate(row, probabilities), before)
