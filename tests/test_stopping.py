"""Stopping after every accepted token, and what processors and criteria see of which nothing is known."""

import logging
import time
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
from decoding import TREE, run
from hypothesis import given
from hypothesis import strategies as st
from oracle import generator, left_pad, random_texts
from rounds import fake_fork, random_tree
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_treespec
from hf_treespec.lockstep import LockstepVerifier
from hf_treespec.selection import TokenSelector
from hf_treespec.texts import Texts
from hf_treespec.verifying import Verifier


PROMPTS = random_texts(generator(21), (12, 7, 9))
PLAIN = {"budget": 1}
NEW = 20


@pytest.fixture(scope="module")
def plain(model):
    return run(model, PROMPTS, NEW, tree_config=PLAIN)[1]


# Rounds against decoding written out in Python


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from(["wide", "deep", "chain", "star"]))
def test_rounds_stop_as_plain_decoding_does(seed, count, style):
    """Random trees over a Markov chain, random ends and limits: all nodes at once, and in lockstep."""
    rng = generator(seed)
    batch, vocabulary = 3, 4
    table = torch.randn(vocabulary, vocabulary, generator=rng)
    tree = random_tree(rng, batch, count, style, ragged=True)
    tree.tokens.remainder_(vocabulary)
    end = torch.randint(vocabulary, (int(torch.randint(1, 3, (1,), generator=rng)),), generator=rng)
    end = None if seed % 3 == 0 else end
    remaining = torch.randint(1, 5, (batch,), generator=rng)
    texts = Texts(torch.zeros(batch, 2, dtype=torch.long), torch.zeros(batch, dtype=torch.long), 12)
    fork, logits = fake_fork(tree, [torch.zeros(2, dtype=torch.long)] * batch), table[tree.tokens]
    verdicts = [
        Verifier(TokenSelector(texts), end)(logits, fork, remaining),
        LockstepVerifier(TokenSelector(texts), texts, end)(logits, fork, remaining),
    ]
    expected = [emit(tree, table, row, end, int(remaining[row])) for row in range(batch)]
    for row, (tokens, stopped) in enumerate(expected):
        accepted = int(verdicts[0].accepted[row])
        assert verdicts[0].emitted[row, :accepted].tolist() == tokens and bool(verdicts[0].finished[row]) == stopped
    # In lockstep no unfinished row goes further than another.
    least = min((len(tokens) for tokens, stopped in expected if not stopped), default=99)
    for row, (tokens, stopped) in enumerate(expected):
        accepted = int(verdicts[1].accepted[row])
        assert verdicts[1].emitted[row, :accepted].tolist() == tokens[:least]
        assert bool(verdicts[1].finished[row]) == (stopped and len(tokens) <= least)


def emit(tree, table, row, end, limit):
    """One row, token by token: what is emitted and whether the text is over."""
    node, tokens = 0, []
    while True:
        tokens.append(int(table[tree.tokens[row, node]].argmax()))
        if len(tokens) == limit or end is not None and tokens[-1] in end:
            return tokens, True
        children = [
            child
            for child in range(1, tree.tokens.shape[1])
            if tree.valid[row, child] and tree.parents[row, child] == node and tree.tokens[row, child] == tokens[-1]
        ]
        if not children:
            return tokens, False
        # Of siblings with one token, the one whose subtree fits longest may be taken: the tokens are the same.
        node = max(children, key=lambda child: len(emit_below(tree, table, row, child)))


def emit_below(tree, table, row, node):
    best = []
    token = int(table[tree.tokens[row, node]].argmax())
    for child in range(1, tree.tokens.shape[1]):
        if tree.valid[row, child] and tree.parents[row, child] == node and tree.tokens[row, child] == token:
            best = max(best, emit_below(tree, table, row, child), key=len)
    return [token, *best]


# Criteria of transformers


@pytest.fixture(scope="module")
def shipped():
    folder = files("hf_treespec") / "checkpoints"
    model = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder / "tiny-target").eval())
    return model, AutoTokenizer.from_pretrained(folder / "tiny-target")


def test_stop_strings(shipped):
    model, tokenizer = shipped
    chats = [[{"role": "user", "content": text}] for text in ("Write a function to add two numbers.", "Say hello.")]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0] for text in texts]
    free = tokenizer.decode(run(model, ids[:1], 40)[1][0][len(ids[0]) :])
    # The end of a word in the middle, and a string that spans tokens.
    stop = [free[20:23], free[31:36], "never written"]
    options = {"stop_strings": stop, "tokenizer": tokenizer}
    stock = [run(model, [row], 40, **options)[1][0] for row in ids]
    assert len(stock[0]) < len(ids[0]) + 40
    # As an argument, in the call's generation config, and as the model's default.
    for tree in (PLAIN, {"budget": 6, "top_k": 1}):
        output, ours = run(model, ids, 40, tree_config=tree, assistant_model=model, pad_token_id=0, **options)
        for text, expected in zip(ours, stock):
            assert torch.equal(text[: len(expected)], expected) and not text[len(expected) :].any()
        assert output.cache.lengths.tolist() == [len(text) - 1 for text in stock]
    with pytest.raises(ValueError, match="`stop_strings`.*`tokenizer=`"):
        run(model, ids, 4, tree_config=PLAIN, stop_strings=stop)


def test_stop_strings_do_not_see_padding(shipped):
    """Neither the batch's nor ours: here padding, prompt and first token together are the stop string."""
    model, tokenizer = shipped
    prompts = [torch.tensor([20, 21, 22, 23, 24, 25]), torch.tensor([30])]
    free = run(model, prompts[1:], 4)[1][0]
    stop = "".join(tokenizer.convert_ids_to_tokens([0, 30, int(free[1])]))
    options = {"stop_strings": stop, "tokenizer": tokenizer}
    texts = run(model, prompts, 4, tree_config=PLAIN, **options)[1]
    assert torch.equal(texts[1], free)


def test_max_time_stops_with_the_first_token_behind_it(model, drafter):
    for tree in (PLAIN, TREE):
        output, _ = run(model, PROMPTS, NEW, tree_config=tree, assistant_model=drafter, max_time=0.0)
        assert output.sequences.shape[1] == 12 + 1
    start = time.time()
    run(model, PROMPTS, 4000, tree_config=PLAIN, max_time=0.5)
    assert time.time() - start < 10


def test_criteria_of_the_caller_take_the_place_of_the_defaults(model, drafter, plain):
    end = int(plain[0][12 + 6])
    given = StoppingCriteriaList([EosTokenCriteria([end]), MaxLengthCriteria(12 + 9)])
    options = {"eos_token_id": 96, "pad_token_id": 0, "stopping_criteria": given}
    stock = run(model, PROMPTS[:1], NEW, **options)[1][0]
    for tree in (PLAIN, TREE):
        ours = run(model, PROMPTS[:1], NEW, tree_config=tree, assistant_model=drafter, **options)[1][0]
        assert torch.equal(ours, stock)


# Unknown ones


class Watcher(StoppingCriteria):
    """Stops rows at even sums of two tokens, and remembers all that it saw."""

    def __init__(self) -> None:
        self.seen, self.scores = [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.clone())
        self.scores.append(None if scores is None else [score.clone() for score in scores])
        return (input_ids[:, -1] + input_ids[:, -2]) % 16 == 0


class Counter(LogitsProcessor):
    """Bans what its number of calls says, and remembers what it saw. Undeclared: only lockstep is right."""

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        scores[:, (len(self.seen) * 7 + torch.arange(40)) % 97] = float("-inf")
        return scores


def test_unknown_ones_see_what_plain_decoding_shows(model, drafter, caplog):
    """On one row what stock shows; on a batch the full one, in order, with equal columns, once per column."""
    seen, texts = {}, {}
    for name, prompts, tree in (
        ("stock", PROMPTS[:1], None),
        ("row", PROMPTS[:1], TREE),
        ("plain", PROMPTS, PLAIN),
        ("tree", PROMPTS, TREE),
    ):
        watcher, counter = Watcher(), Counter()
        options = {"stopping_criteria": StoppingCriteriaList([watcher]), "output_scores": True, "pad_token_id": 0}
        options |= {"logits_processor": LogitsProcessorList([counter]), "repetition_penalty": 1.2}
        if tree is not None:
            options |= {"tree_config": tree, "assistant_model": drafter}
            del options["output_scores"]
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_treespec"):
            output, texts[name] = run(model, prompts, NEW, **options)
        warnings = [record.message for record in caplog.records]
        assert len(warnings) == (tree is not None)
        assert all("Counter, Watcher" in message and "lockstep" in message for message in warnings)
        seen[name] = watcher.seen, counter.seen
        if tree == TREE:
            assert len(output.tree_stats["accepted_lengths"]) >= 2
    assert torch.equal(texts["row"][0], texts["stock"][0])
    assert all(torch.equal(text, other) for text, other in zip(texts["tree"], texts["plain"]))
    for name, other in (("row", "stock"), ("tree", "plain")):
        for kind in (0, 1):
            assert len(seen[name][kind]) == len(seen[other][kind])
            assert all(torch.equal(ids, ids_) for ids, ids_ in zip(seen[name][kind], seen[other][kind]))
    # Rows stopped at different places, and were shown padded from there on.
    last = seen["tree"][0][-1]
    assert len(last) == len(PROMPTS) and (last[:, -1] == 0).any()
    assert [ids.shape[1] for ids in seen["tree"][1]] == list(range(12, 12 + len(seen["tree"][1])))


def test_row_independent_ones_do_not_need_lockstep(model, drafter, caplog):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            banned = (input_ids[:, -1:] * 3 + input_ids.shape[1] + torch.arange(30)) % 97
            return scores.scatter(1, banned, float("-inf"))

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] + input_ids[:, -2]) % 16 == 0

    texts = []
    for declared in (False, True):
        Ban.row_independent = Stop.row_independent = declared
        options = {"logits_processor": LogitsProcessorList([Ban()]), "pad_token_id": 0}
        options |= {"stopping_criteria": StoppingCriteriaList([Stop()]), "assistant_model": drafter}
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_treespec"):
            for tree in (PLAIN, TREE):
                texts.append(run(model, PROMPTS, NEW, tree_config=tree, **options)[0].sequences)
        assert bool(caplog.records) != declared
    assert all(torch.equal(sequences, texts[0]) for sequences in texts)
    assert (texts[0][:, -1] == 0).any()


# State per text


class Sums(LogitsProcessor):
    """Bans what the sum of all tokens that it was ever called on says; a call counts the newest token."""

    def __init__(self, rows: int) -> None:
        self.sums, self.tables = torch.zeros(rows, dtype=torch.long), None

    def __call__(self, input_ids, scores):
        self.sums = self.sums + input_ids[:, -1]
        if self.tables is not None:
            self.tables.append(self.sums)
        banned = (self.sums[:, None] + torch.arange(40)) % 97
        return scores.scatter(1, banned, float("-inf"))


class ForkedSums(Sums):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.tables = [self.sums]

    def fork(self, parents):
        self.sums = torch.cat(self.tables)[parents]

    def commit(self, path):
        self.tables = [torch.cat(self.tables)[path]]


@pytest.mark.parametrize("chunk", [1, 2**24], ids=["row by row", "at once"])
def test_the_protocol_of_states(model, drafter, caplog, chunk, monkeypatch):
    """On trees as in lockstep, where the same class without the two methods is called plainly."""
    monkeypatch.setattr("hf_treespec.selection.CHUNK_ELEMENTS", chunk)
    options = {"assistant_model": drafter, "eos_token_id": [3, 11, 29, 47], "pad_token_id": 0}
    expected = run(model, PROMPTS, NEW, tree_config=PLAIN, logits_processor=LogitsProcessorList([Sums(3)]), **options)[
        0
    ].sequences
    caplog.clear()
    for tree in (PLAIN, TREE):
        output, _ = run(
            model, PROMPTS, NEW, tree_config=tree, logits_processor=LogitsProcessorList([ForkedSums(3)]), **options
        )
        assert torch.equal(output.sequences, expected)
    assert not caplog.records and len(output.tree_stats["accepted_lengths"]) >= 2


@pytest.mark.parametrize("skip", [False, True])
def test_synthid(model, drafter, skip):
    """Stock greedy rows; short contexts, so that some are met again."""
    config = SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[11, 5, 99], context_history_size=6, skip_first_ngram_calls=skip
    )
    options = {"watermarking_config": config, "suppress_tokens": list(range(12, 97))}
    stock = [run(model, [prompt], NEW, **options)[1][0] for prompt in PROMPTS]
    unmarked = run(model, PROMPTS, NEW, tree_config=PLAIN, suppress_tokens=list(range(12, 97)))[1]
    assert not torch.equal(torch.cat(stock), torch.cat(unmarked))
    for tree in (PLAIN, TREE):
        ours = run(model, PROMPTS, NEW, tree_config=tree, assistant_model=drafter, **options)[1]
        assert torch.equal(torch.cat(ours), torch.cat(stock))
    seeds = {"do_sample": True, "seeds": [1, 2, 3], "temperature": 0.8}
    texts = [
        run(model, PROMPTS, 8, tree_config=tree, assistant_model=drafter, **options, **seeds)[0].sequences
        for tree in (PLAIN, TREE)
    ]
    assert torch.equal(*texts)


def test_a_processor_of_another_model_is_refused(model):
    from transformers import WhisperTimeStampLogitsProcessor

    processor = WhisperTimeStampLogitsProcessor(
        SimpleNamespace(no_timestamps_token_id=5, eos_token_id=3, bos_token_id=1), begin_index=1
    )
    with pytest.raises(ValueError, match="WhisperTimeStamp.*speech"):
        model.generate(**left_pad(PROMPTS), tree_config=PLAIN, logits_processor=LogitsProcessorList([processor]))
