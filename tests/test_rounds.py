"""Rounds of fixed shapes: exact, without a host sync, one graph, and replayed where a graph was captured."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from decoding import TREE, run
from oracle import build_model, generator, random_texts, tiny_config
from rounds import (
    FakeRecorder,
    append,
    assert_nodes,
    assert_same_state,
    filled_cache,
    graphs_everywhere,
    random_path,
    random_tree,
    run_round,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import hf_treespec
from hf_treespec import TokenTree, TreeConfig, graphs, ops
from hf_treespec.budgeting.live import RoundBudget
from hf_treespec.fork import Fork
from hf_treespec.selection import TokenSelector
from hf_treespec.texts import Texts
from hf_treespec.verifying import Verifier


# Operators that make the host wait, or whose result has a size that the device decides.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique")


class Operators(TorchDispatchMode):
    """Names of the operators called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name().split("::")[1].split(".")[0])
        return function(*args, **(kwargs or {}))


def fixed_round(model, cache, verifier, tokens: Tensor, paths: Tensor, valid: Tensor, rows: Tensor, lengths: Tensor):
    """Verify, accept and commit, as a graph of the round does: path, accepted counts, emitted tokens and the lengths that
    make it count."""
    fork = Fork(cache, TokenTree(tokens, paths, valid), rows, lengths, cache.capacity, fixed=True)
    with cache.opened(fork):
        logits = model(**fork.model_inputs()).logits
    verdict = verifier(logits, fork, torch.full_like(lengths, 6))
    return verdict.path, verdict.accepted, verdict.emitted, fork.commit(verdict.path, verdict.accepted)


def plausible_tree(model, cache, rng: torch.Generator, text_tokens: Tensor) -> TokenTree:
    """A random tree of 8 nodes, some of whose tokens are what the model says behind the root."""
    tree = random_tree(rng, cache.rows, 7, "wide", ragged=True).padded(8, 7)
    tree.tokens[:, 0] = text_tokens
    predicted = run_round(model, cache, tree).argmax(-1)
    guessed = torch.rand(tree.tokens.shape, generator=rng) < 0.7
    guessed[:, 0] = False
    tokens = torch.where(guessed & tree.valid, predicted.gather(1, tree.parents), tree.tokens)
    return TokenTree(torch.where(tree.valid, tokens, tokens[:, :1]), tree.paths, tree.valid)


@pytest.mark.parametrize(
    "style,lengths,nodes,backend",
    [("wide", (1, 37), 9, "torch"), ("star", (23, 34), 9, "torch"), ("wide", (6, 15), 4, "triton")],
)
def test_fixed_rounds_are_exact(model, style, lengths, nodes, backend):
    texts = random_texts(generator(1), lengths)
    cache = filled_cache(model, texts)
    # More columns than anything fills; the interpreter pays for each.
    cache.reserve(130 if backend == "torch" else 1)
    cache.backend = backend
    tree = random_tree(generator(2), 2, nodes, style, ragged=True).padded(nodes + 2, nodes)
    path, counts = random_path(generator(3), tree)
    with torch.no_grad(), cache.fork(tree, fixed=True) as fork:
        assert_nodes(model, model(**fork.model_inputs()).logits, texts, tree)
        fork.refresh(path, counts)
    other = filled_cache(model, append(texts, tree, path, counts))
    assert_same_state(cache, other)


def test_padding_rows_change_nothing(model):
    texts = random_texts(generator(1), (21, 9, 34))
    cache = filled_cache(model, texts)
    rows = torch.tensor([2])
    tree = random_tree(generator(2), 1, 7, "wide")
    with torch.no_grad(), cache.fork(tree, rows, fixed=True) as fork:
        wide = fork.widened(3)
        assert sorted(wide.rows.tolist()) == [0, 1, 2] and wide.rows[0] == 2
        with cache.opened(wide):
            logits = model(**wide.model_inputs()).logits
        fork.adopt(wide.all_scratch())
        assert_nodes(model, logits[:1], [texts[2]], tree)
        path, counts = random_path(generator(3), tree)
        fork.refresh(path, counts)
    expected = [*texts[:2], *append(texts[2:], tree, path, counts)]
    assert_same_state(cache, filled_cache(model, expected))


def test_twenty_rounds_are_one_graph():
    """Full graph, compiled once, without a wait; and what they commit is what ordinary rounds do."""
    layers = ["compressed_sparse_attention", "heavily_compressed_attention"]
    shape = {"num_hidden_layers": 2, "layer_types": layers, "mlp_layer_types": ["hash_moe", "moe"]}
    model = hf_treespec.enable(build_model(tiny_config(**shape, hc_sinkhorn_iters=1)))
    texts = random_texts(generator(1), (21, 34))
    cache, ordinary = filled_cache(model, texts), filled_cache(model, texts)
    cache.reserve(256)
    counter = CompileCounter()
    compiled = torch.compile(fixed_round, fullgraph=True, backend=counter, dynamic=False)
    accepted_counts, cut, rng = set(), False, generator(5)
    last, rows = torch.tensor([3, 4]), torch.arange(2)
    verifier = Verifier(TokenSelector(Texts(last[:, None], torch.zeros_like(last), 160)), end=torch.arange(20))
    assert verifier.is_static
    with torch.no_grad():
        for _ in range(20):
            tree = plausible_tree(model, ordinary, rng, last)
            arguments = (model, cache, verifier, tree.tokens, tree.paths, tree.valid, rows, cache.lengths)
            path, accepted, emitted, lengths = compiled(*arguments)
            with ordinary.fork(tree) as fork:
                predicted = model(**fork.model_inputs()).logits.argmax(-1)
                nodes, counts = ops.accept(tree.tokens, tree.paths, tree.valid, predicted)
                # No text goes on behind its end, nor beyond what it may have.
                ends = predicted.gather(1, nodes.clamp(min=0)) < 20
                until_end = torch.where(ends, torch.arange(1, 9), 9).amin(1)
                expected = nodes, torch.minimum(counts, until_end).clamp(max=6)
                cut |= bool((expected[1] < counts).any())
                fork.refresh(*expected)
            assert torch.equal(path, expected[0]) and torch.equal(accepted, expected[1])
            cache.lengths = lengths
            cache.written = torch.maximum(cache.written, lengths)
            last = predicted.gather(1, path.gather(1, accepted[:, None] - 1))[:, 0]
            assert torch.equal(last, emitted.gather(1, accepted[:, None] - 1)[:, 0])
            accepted_counts |= set(accepted.tolist())
        assert counter.frame_count == 1
        assert len(accepted_counts) >= 3 and cut  # rounds that differ in what they commit
        assert_same_state(cache, ordinary)
        with Operators() as operators:
            fixed_round(*arguments[:-1], cache.lengths)
    assert not [name for name in operators.names if name in WAITING]


# Graphs, with a stand-in for CUDA


@pytest.fixture()
def recorders():
    with graphs_everywhere() as made:
        yield made


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seeds": [1, 2, 3, 4]}])
def test_replayed_rounds_write_the_same(model, drafter, recorders, monkeypatch, options):
    untimed = []

    def end(self, rows, emitted, timed=True, original=RoundBudget.end):
        untimed.append(not timed)
        original(self, rows, emitted, timed)

    monkeypatch.setattr(RoundBudget, "end", end)
    # Of four rows one leaves first: a graph of four then runs with a row of padding.
    texts = random_texts(generator(4), (19, 30, 8, 13))
    plain = {**TREE, "cuda_graphs": False}
    expected = run(model, texts, 30, tree_config=plain, assistant_model=drafter, **options)
    assert not recorders and not any(untimed)
    output = run(model, texts, 30, tree_config=TREE, assistant_model=drafter, **options)
    assert torch.equal(output[0].sequences, expected[0].sequences)
    assert output[0].tree_stats["accepted_lengths"] == expected[0].tree_stats["accepted_lengths"]
    assert_same_state(output[0].cache, expected[0].cache)
    (recorder,) = recorders
    # Forward, acceptance where the best logit decides, and commit; once per power of two of rows, and of capacity.
    parts = 2 if options else 3
    buckets = recorder.captures // parts
    assert recorder.captures == parts * buckets and 1 <= buckets <= 6
    assert recorder.replays > 2 * recorder.captures
    # What a capture takes is not taken for what a round takes.
    assert sum(untimed) == buckets


def test_a_heads_streams_are_replayed(target, recorders):
    texts = random_texts(generator(4), (19, 30))
    runs = [run(target, texts, 24, tree_config={"budget": 6, "cuda_graphs": graphs}) for graphs in (False, "auto")]
    assert torch.equal(runs[0][0].sequences, runs[1][0].sequences)
    assert runs[0][0].tree_stats["accepted_lengths"] == runs[1][0].tree_stats["accepted_lengths"]
    # The head's windows too, which no graph commits.
    assert_same_state(runs[0][0].cache, runs[1][0].cache)
    assert recorders[0].replays > 2


def test_queues_are_replayed(model, drafter, recorders):
    """Whose rows go on to other texts, and are padding while they wait."""
    prompts = [text.tolist() for text in random_texts(generator(6), (19, 30, 8, 13, 22))]
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": drafter}
    cap = ContinuousBatchingConfig(page_size=64, num_blocks=4)
    texts = [
        [
            output.generated_tokens
            for output in model.generate_batch(
                prompts, None, cap, tree_config={**TREE, "cuda_graphs": graphs}, **options
            ).values()
        ]
        for graphs in (False, "auto")
    ]
    assert texts[0] == texts[1]
    assert recorders[0].replays > recorders[0].captures


@pytest.mark.parametrize("part,fault", [(0, "raises"), (0, "differs"), (1, "raises"), (1, "differs"), (2, "raises")])
def test_what_cannot_be_captured_runs_eagerly_with_one_warning(
    model, drafter, recorders, monkeypatch, caplog, part, fault
):
    """Forward, acceptance or commit."""
    made = []

    def record(self, run, record=FakeRecorder.__call__):
        made.append(run)
        if len(made) <= part:
            return record(self, run)
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        result = run()
        return lambda: result[0].mul_(2), result

    monkeypatch.setattr(FakeRecorder, "__call__", record)
    texts = random_texts(generator(4), (19, 30))
    expected = run(model, texts, 9, tree_config={**TREE, "cuda_graphs": False}, assistant_model=drafter)
    written = run(model, texts, 9, tree_config=TREE, assistant_model=drafter)
    assert torch.equal(torch.cat(written[1]), torch.cat(expected[1]))
    assert_same_state(written[0].cache, expected[0].cache)
    assert len(made) == part + 1
    assert len([record for record in caplog.records if "CUDA graph" in record.getMessage()]) == 1


def test_what_is_known_not_to_be_captured():
    model = hf_treespec.enable(build_model(tiny_config()))
    assert graphs.why_not_captured(model) is None
    handle = model.model.layers[1].register_forward_hook(lambda *args: None)
    assert "layers.1" in graphs.why_not_captured(model)
    handle.remove()
    quantised = copy.copy(model)
    quantised.hf_quantizer = object()
    assert "quantised" in graphs.why_not_captured(quantised)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert "accelerate" in graphs.why_not_captured(model)


def test_graphs_are_asked_for_where_there_can_be_some(model):
    with pytest.raises(ValueError, match="cuda_graphs"):
        TreeConfig(cuda_graphs="yes")
    prompt = random_texts(generator(0), (5,))[0][None]
    with pytest.raises(ValueError, match="needs a CUDA device"):
        model.generate(prompt, tree_config={"budget": 1, "cuda_graphs": True})
    assert not graphs.graphs_wanted(model, filled_cache(model, [prompt[0]]), TreeConfig())
