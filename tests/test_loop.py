"""The decoding loop against decoding written out in plain Python: random trees, acceptance, stops and batches."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import generator, left_pad, tiny_config
from rounds import random_tree

from hf_treespec import TokenTree, TreeCache
from hf_treespec.drafting import TreeCandidateGenerator
from hf_treespec.generation import TreeStats, decode_rows
from hf_treespec.lockstep import LockstepVerifier
from hf_treespec.outputs import Recorder, Stream
from hf_treespec.prefill import prefill
from hf_treespec.sampling import gumbel_noise
from hf_treespec.selection import TokenSelector
from hf_treespec.texts import Texts
from hf_treespec.verifying import Verifier


VOCABULARY, PAD = 4, 9
CONFIG = tiny_config()


class Markov:
    """A target whose logits depend on the last two tokens of a path."""

    def __init__(self, table, cache) -> None:
        self.table, self.cache = table, cache

    def __call__(self, input_ids, **kwargs):
        fork, committed = self.cache.open_fork, self.cache.token_ids
        rows = torch.arange(len(input_ids)) if fork.rows is None else fork.rows
        before = torch.where(fork.lengths > 0, committed[rows, (fork.lengths - 1).clamp(min=0)], 0)
        above = input_ids.gather(1, fork.tree.parents)
        above[:, 0] = before
        return SimpleNamespace(logits=self.table[above, input_ids])


class RandomDrafter(TreeCandidateGenerator):
    """Trees of any shape, ragged, deeper than a row may still write."""

    def __init__(self, rng) -> None:
        self.rng = rng

    def propose(self, rows, roots, depth, limits=None):
        style = ["wide", "deep", "chain", "star"][int(torch.randint(4, (1,), generator=self.rng))]
        count = int(torch.randint(1, 10, (1,), generator=self.rng))
        tree = random_tree(self.rng, len(roots), count, style, ragged=True)
        tokens = torch.where(tree.valid, tree.tokens % VOCABULARY, roots[:, None])
        tokens[:, 0] = roots
        return TokenTree(tokens, tree.paths, tree.valid)


def rule(fork, path, emitted):
    """Stops at tokens and places that have nothing to do with blocks."""
    places = fork.lengths[:, None] + fork.tree.depths.gather(1, path.clamp(min=0))
    return (places * 3 + emitted) % 11 == 0


def plain(table, prompt: list[int], limit: int, ends, seed) -> list[int]:
    """New tokens of one row, one after another."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        scores = table[text[-2] if len(text) > 1 else 0, text[-1]]
        if seed is not None:
            scores = scores + gumbel_noise(torch.tensor(seed), torch.tensor(len(text)), VOCABULARY)
        text.append(int(scores.argmax()))
        if text[-1] in ends or ((len(text) - 2) * 3 + text[-1]) % 11 == 0:
            break
    return text[len(prompt) :]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 23), st.booleans(), st.booleans())
def test_every_text_is_that_of_plain_decoding(seed, rows, limit, sampled, lockstep):
    rng = generator(seed)
    table = 2 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=rng)
    lengths = torch.randint(1, 9, (rows,), generator=rng)
    prompts = [torch.randint(VOCABULARY, (int(length),), generator=rng) for length in lengths]
    ends = torch.randint(VOCABULARY, (1,), generator=rng) if seed % 3 else None
    seeds = torch.randint(2**40, (rows,), generator=rng) if sampled else None
    given_seeds = [None] * rows if seeds is None else seeds.tolist()
    stops = [] if ends is None else ends.tolist()
    expected = [plain(table, p.tolist(), limit, stops, s) for p, s in zip(prompts, given_seeds)]

    cache = TreeCache(CONFIG, rows, spare=16)
    target = Markov(table, cache)
    tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    padded = left_pad(prompts)["input_ids"]
    texts = Texts(padded, padded.shape[1] - lengths, limit, pad=PAD)
    selector = TokenSelector(texts, seeds=seeds, keep=frozenset({"logprobs"}))
    verifier = LockstepVerifier(selector, texts, ends, [rule]) if lockstep else Verifier(selector, ends, [rule])
    recorder, stats, sent = Recorder(texts, selector.keep), TreeStats(), []
    stream = Stream(SimpleNamespace(put=sent.append), texts)
    prefill(target, cache, tokens, lengths - 1)
    roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    decode_rows(target, cache, texts, roots, RandomDrafter(rng), 5, verifier, stats, recorder, stream)

    width = max(map(len, expected))
    new = texts.output[:, : texts.complete]
    assert new.tolist() == [row + [PAD] * (width - len(row)) for row in expected]
    assert torch.equal(torch.stack(sent, 1), new)
    assert cache.lengths.tolist() == [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, expected)]
    for row, (prompt, text) in enumerate(zip(prompts, expected)):
        whole = prompt.tolist() + text
        assert cache.token_ids[row, : len(whole) - 1].tolist() == whole[:-1]
        pairs = list(zip([0, *whole][len(prompt) - 1 :], whole[len(prompt) - 1 : -1], text))
        numbers = torch.stack([table[a, b].log_softmax(-1)[c] for a, b, c in pairs])
        torch.testing.assert_close(recorder.fields()["logprobs"][row, : len(text)], numbers)
    assert stats.emitted_tokens == sum(map(len, expected))
    assert stats.rounds == sum(stats.accepted_lengths.values()) <= stats.nodes
