"""Drafting with the MTP head: what it drafts, what its window holds, and the text, which never depends on it."""

import copy
import threading

import pytest
import torch
from decoding import run
from heads import PlainHead, head_tensors, mtp, oracle_streams
from oracle import TOLERANCE, build_model, generator, left_pad, random_texts, tiny_config
from rounds import assert_same_state
from safetensors.torch import save_file
from test_drafting import MadeUpTarget

import hf_treespec
from hf_treespec import TreeCache, TreeConfig
from hf_treespec.drafting.mtp import MTPTreeGenerator
from hf_treespec.heads import MTPHead, attach_head, head_of, load_head
from hf_treespec.prefill import left_align, prefill


TREE = {"budget": 8, "depth": 4, "top_k": 3}


# What it drafts


class MadeUpRounds(MadeUpTarget):
    """Random paths are accepted, as in `MadeUpTarget`, but the target runs: the head lives on its streams."""

    def __init__(
        self, model, head, config: TreeConfig, texts, chunk_size: int, drafter: type = MTPTreeGenerator
    ) -> None:
        self.model, self.texts = model, list(texts)
        self.rngs = [generator(seed) for seed in range(len(texts))]
        self.cache = TreeCache(model.config, len(texts), head_layers=len(head.layers))
        self.drafter = drafter(model, head, self.cache, config)
        inputs = left_pad(texts)
        tokens, lengths = left_align(inputs["input_ids"], inputs["attention_mask"])
        with torch.no_grad(), self.drafter.attached():
            prefill(model, self.cache, tokens, lengths - 1, chunk_size, self.drafter)

    def _commit(self, index, tree, path, lengths, predicted) -> None:
        with self.drafter.attached(), self.cache.fork(tree, index) as fork:
            self.model(**fork.model_inputs())
            self.drafter.read(fork, path, lengths, predicted.gather(1, path.clamp(min=0)))
            fork.refresh(path, lengths)


@torch.no_grad()
@pytest.mark.parametrize("chunk_size", [7, 64])
def test_steps_agree_with_plain_matrix_products(tmp_path, model, chunk_size, monkeypatch):
    """Steps 1 to 4 along every path of every drafted tree; rows are ragged, one has no context, some leave."""
    tensors = head_tensors(model.config)
    save_file(mtp(tensors), tmp_path / "model.safetensors")
    head = load_head(tmp_path, model.config)
    seen = []
    add = MTPTreeGenerator._add_candidates

    def record(self, logits, valid):
        seen.append((logits, self._pool.frontiers[-1][0], valid))
        add(self, logits, valid)

    monkeypatch.setattr(MTPTreeGenerator, "_add_candidates", record)
    rounds = MadeUpRounds(model, head, TreeConfig(**TREE), random_texts(generator(1), (37, 9, 2, 1)), chunk_size)
    steps = [0] * 5
    for index in range(8):
        rows = [0, 1, 2, 3] if index < 5 else [3, 0]
        texts = [rounds.texts[row] for row in rows]
        seen.clear()
        rounds.round(4, rows)
        pool = rounds.drafter._pool
        for i, text in enumerate(texts):
            length = len(text) - 1  # of the committed text; the root is behind it
            if not length:
                continue
            plain = PlainHead(tensors, model, oracle_streams(model, text)[0][:-1], text[1:])
            states = {0: plain.step(text[-1], oracle_streams(model, text)[0][length - 1], length - 1, plain.keys)}
            for depth, (logits, parents, valid) in enumerate(seen):
                for column in valid[i].nonzero()[:, 0].tolist():
                    entry = int(parents[i, column])
                    if entry:
                        _, lanes, keys = states[int(pool.parents[i, entry])]
                        states[entry] = plain.step(pool.tokens[i, entry], lanes, length - 1 + depth, keys)
                    expected = states[entry][0]
                    difference = float((logits[i, column] - expected).abs().max() / expected.abs().max())
                    assert difference <= TOLERANCE, (index, rows[i], depth, difference)
                    steps[depth + 1] += 1
    assert min(steps[1:]) >= 15, steps


def test_a_row_without_context_drafts_nothing_at_first(target):
    rounds = MadeUpRounds(target, head_of(target), TreeConfig(**TREE), random_texts(generator(1), (12, 1)), 64)
    tree = rounds.round(3, [0, 1])
    assert tree.valid.sum(1).tolist() == [8, 1]
    assert rounds.round(3, [0, 1]).valid.all()


@pytest.fixture(scope="module")
def echo():
    """A target of one sliding layer, and a head that is this very layer over embeddings: a perfect drafter, as long as
    its window holds what the target's does. (Position t of the head is position t + 1 of the target; RoPE is relative.)"""
    config = tiny_config(num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    model = hf_treespec.enable(build_model(config, seed=11))
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        table.div_(table.square().mean(-1, keepdim=True).sqrt())
    head = MTPHead(config).eval().requires_grad_(False)
    with torch.no_grad():
        head.enorm.weight.fill_(1)
        head.e_proj.weight.copy_(torch.eye(config.hidden_size))
        head.h_proj.weight.zero_()
    for part, source in (
        (head.layers[0], model.model.layers[0]),
        (head.hc_head, model.model.hc_head),
        (head.norm, model.model.norm),
    ):
        part.load_state_dict(source.state_dict())
    return model, head


def chain_lengths(model, head, texts, patch=None) -> dict[int, int]:
    """Accepted lengths of a chain of 5 over 40 tokens per row."""
    attach_head(model, head)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if patch is not None:
            monkeypatch.setattr(MTPHead, "window_keys", patch)
        output, written = run(model, texts, 40, tree_config={"budget": 5, "top_k": 1})
    assert torch.equal(torch.cat(written), torch.cat(run(model, texts, 40, tree_config={"budget": 1})[1]))
    return output.tree_stats["accepted_lengths"]


def test_nothing_of_a_perfect_head_is_rejected(echo):
    """A stale or shifted window is never an error, only lost acceptance: here none may be lost."""
    for texts in (random_texts(generator(1), (23, 40, 12, 31)), random_texts(generator(2), (17,))):
        assert chain_lengths(*echo, texts) == {5: 8 * len(texts)}


def test_priming_matters(echo):
    """Without the keys of the prompt the same head drafts worse."""
    window_keys = MTPHead.window_keys

    def unprimed(self, inputs, position_ids, cache=None):
        keys = window_keys(self, inputs, position_ids, cache)
        return [key.zero_() for key in keys] if inputs.shape[1] > 5 else keys  # longer than a round: a prefill chunk

    accepted = chain_lengths(*echo, random_texts(generator(1), (23, 40, 12, 31)), unprimed)
    assert sum(count for length, count in accepted.items() if length < 5) >= 4


# The text


def assert_plain_text(target, tree) -> None:
    """Trees of the target's head write what plain decoding does, in a ragged batch and alone."""
    texts = random_texts(generator(2), (23, 5, 40, 1, 17, 31, 2, 9))
    _, plain = run(target, texts, 20, tree_config={"budget": 1})
    output, together = run(target, texts, 20, tree_config=tree, prefill_chunk_size=11)
    assert torch.equal(torch.cat(together), torch.cat(plain))
    assert len(output.tree_stats["accepted_lengths"]) >= 3  # it is right often enough to matter
    for row in (0, 3, 6):
        assert torch.equal(run(target, [texts[row]], 20, tree_config=tree)[1][0], plain[row])


@pytest.mark.parametrize("tree", [{"budget": 4, "top_k": 1}, TREE, {"budget": 8, "drafter": "mtp"}], ids=str)
def test_trees_of_the_head_write_the_plain_text(target, tree):
    assert_plain_text(target, tree)


def test_rows_leave_at_different_times(target):
    texts = random_texts(generator(3), (23, 5, 40, 1, 17, 31, 2, 9))
    _, unended = run(target, texts, 24, tree_config={"budget": 1})
    ends = sorted({int(text[len(prompt) + 3 * i]) for i, (text, prompt) in enumerate(zip(unended, texts)) if i % 2})
    options = {"eos_token_id": ends, "pad_token_id": 0}
    _, plain = run(target, texts, 24, tree_config={"budget": 1}, **options)
    output, together = run(target, texts, 24, tree_config=TREE, **options)
    assert torch.equal(torch.cat(together), torch.cat(plain))
    assert len(set(output.cache.lengths.tolist())) > 2


def test_streams_of_other_threads_are_not_seen(target):
    """Two calls share the model, and so the hook's place."""
    rounds = MadeUpRounds(target, head_of(target), TreeConfig(**TREE), random_texts(generator(4), (12,)), 64)
    with torch.no_grad(), rounds.drafter.attached():
        other = threading.Thread(target=target, kwargs={"input_ids": rounds.texts[0][None], "use_cache": False})
        other.start()
        other.join()
        assert not rounds.drafter.taps._seen
        target(input_ids=rounds.texts[0][None], use_cache=False)
        assert rounds.drafter.taps.take()[0].shape[:2] == (1, 12)
    assert not target.model.hc_head._forward_pre_hooks


# Reuse


def assert_reuse(target, tree) -> None:
    """A reused cache holds what a fresh one does, the head's rings included."""
    prompts = random_texts(generator(5), (23, 6))
    first, written = run(target, prompts, 20, tree_config=tree)
    new = random_texts(generator(6), (7, 3))
    turns = {
        "continued": [torch.cat(pair) for pair in zip(written, new)],
        "the same again": written,
        "rewound": [torch.cat([text[:-9], more]) for text, more in zip(written, new)],
        "another": prompts[::-1],
    }
    for name, texts in turns.items():
        cache = copy.deepcopy(first.cache)
        output, again = run(target, texts, 12, tree_config=tree, cache=cache)
        fresh, expected = run(target, texts, 12, tree_config=tree)
        assert torch.equal(torch.cat(again), torch.cat(expected)), name
        assert output.cache is cache and cache.head_layers == len(head_of(target).layers)
        assert_same_state(cache, fresh.cache)


def test_a_reused_cache_holds_what_a_fresh_one_does(target):
    assert_reuse(target, TREE)


def test_a_cache_changes_its_drafter(target):
    texts = random_texts(generator(7), (23, 6))
    first, texts = run(target, texts, 12, tree_config={"budget": 1})
    assert first.cache.head_layers == 0
    fresh, _ = run(target, texts, 12, tree_config=TREE)
    second, texts = run(target, texts, 12, tree_config=TREE, cache=first.cache)
    assert_same_state(second.cache, fresh.cache)
    assert second.cache.head_layers == 1
    third, written = run(target, texts, 12, tree_config={"budget": 1}, cache=second.cache)
    assert third.cache.head_layers == 0 and len(third.cache.layers) == target.config.num_hidden_layers
    assert torch.equal(torch.cat(written), torch.cat(run(target, texts, 12, tree_config={"budget": 1})[1]))
