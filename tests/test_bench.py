"""Benchmarks measure what they say: replay equals live decoding, intervals and margins equal hand-computed values."""

import pytest
import torch
from heads import make_checkpoint, make_dspark_checkpoint
from oracle import build_model, generator, tiny_config
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench.acceptance import compare, measure
from hf_treespec.bench.conditioning import PerDepthTreeGenerator
from hf_treespec.bench.forwards import ForwardTimer
from hf_treespec.bench.replay import Recording, observe, record, replay
from hf_treespec.heads import head_of
from hf_treespec.intervals import bootstrap, interleave, median_ratio, ratio_of_sums
from hf_treespec.oracle import first_difference, oracle_logits


@pytest.fixture(scope="module")
def ending_model():
    """A random target that sometimes ends its text."""
    return hf_treespec.enable(build_model(tiny_config(eos_token_id=5), seed=1))


@pytest.fixture(scope="module")
def draft(ending_model):
    noisy = build_model(tiny_config(eos_token_id=5), seed=1)
    with torch.no_grad():
        weight = noisy.lm_head.weight
        weight.add_(torch.randn(weight.shape, generator=generator(3)) * weight.std() * 0.3)
    return hf_treespec.enable(noisy)


@pytest.fixture(scope="module")
def recording(ending_model):
    prompts = [torch.randint(6, 97, (n,), generator=generator(n)).tolist() for n in (5, 9, 17, 30)]
    return record(ending_model, prompts, max_new_tokens=48, batch_size=3)


@pytest.mark.parametrize("options", [{"budget": 6}, {"budget": 6, "top_k": 1}, {"budget": 8, "top_k": 2, "depth": 3}])
def test_replay_equals_live_decoding(ending_model, draft, recording, options):
    config = TreeConfig(**options)
    replayed = replay(recording, ending_model, draft, config)
    for row, (text, prompt_length, length) in enumerate(
        zip(recording.tokens, recording.prompt_lengths.tolist(), recording.lengths.tolist())
    ):
        live = ending_model.generate(
            text[None, :prompt_length],
            max_new_tokens=48,
            tree_config=config,
            assistant_model=draft,
            return_dict_in_generate=True,
        )
        assert live.sequences[0].equal(text[:length])
        assert live.tree_stats["rounds"] == replayed.row_rounds[row]
        assert live.tree_stats["emitted_tokens"] == replayed.row_tokens[row] == length - prompt_length
    assert replayed.emitted_tokens > replayed.rounds


@pytest.mark.parametrize("make", [make_checkpoint, make_dspark_checkpoint])
@pytest.mark.parametrize("options", [{"budget": 6}, {"budget": 5, "top_k": 1}])
def test_replay_of_a_head_equals_live_decoding(tmp_path, make, options):
    model = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(make(tmp_path)))
    prompts = [torch.randint(6, 97, (n,), generator=generator(n)).tolist() for n in (1, 9, 30)]
    recorded, config = record(model, prompts, max_new_tokens=32), TreeConfig(**options)
    head = head_of(model)
    replayed = replay(recorded, model, head, config, observe(recorded, model, head.taps, batch_size=2))
    for row, prompt in enumerate(prompts):
        options = {"max_new_tokens": 32, "tree_config": config, "return_dict_in_generate": True}
        live = model.generate(torch.tensor([prompt]), **options)
        assert live.sequences[0].equal(recorded.tokens[row, : recorded.lengths[row]])
        assert live.tree_stats["rounds"] == replayed.row_rounds[row]
    assert replayed.emitted_tokens > 1.2 * replayed.rounds


def test_acceptance_table_compares_rounds(ending_model, draft, recording):
    stats = measure(recording, ending_model, draft, [3, 4])
    rows = compare({"random": stats}, [3, 4])
    assert [(row["set"], row["budget"]) for row in rows] == [
        ("random", 3),
        ("random", 4),
        ("pooled", 3),
        ("pooled", 4),
    ]
    for row in rows:
        tree, chain = stats[f"tree-{row['budget']}"], stats[f"chain-{row['budget']}"]
        assert row["tree"] == pytest.approx(tree.emitted_tokens / tree.rounds)
        assert row["gain"].value == pytest.approx(100 * (chain.rounds / tree.rounds - 1))
        assert row["best_chain"] >= row["chain"]


def test_repeated_share():
    # 1 2 3 1 2 3 1: with 3-grams, 1 2 3 comes again at 3, then 2 3 1 at 4: tokens 3 .. 6 of 7.
    tokens = torch.tensor([[9, 1, 2, 3, 1, 2, 3, 1]])
    recorded = Recording(tokens, torch.tensor([1]), torch.tensor([8]), 7)
    assert recorded.repeated_share(3) == pytest.approx(4 / 7)
    assert recorded.repeated_share(8) == 0


def test_intervals():
    assert median_ratio([(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]).value == 3
    ratio = ratio_of_sums(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    values = torch.randn(400, generator=generator(0))
    mean = bootstrap(lambda index: values[index].mean(1), 400)
    # The interval of a mean is about +- 1.96 standard errors.
    assert (mean.high - mean.low) / 2 == pytest.approx(1.96 * float(values.std()) / 20, rel=0.1)
    assert mean.low < mean.value < mean.high


def test_interleave_alternates():
    calls = []
    pairs = interleave(lambda: calls.append("a"), lambda: calls.append("b"), 3)
    assert calls == ["a", "b"] * 4 and len(pairs) == 3


def test_first_difference_finds_a_wrong_token(ending_model, recording):
    text = recording.tokens[0, : recording.lengths[0]]
    prompt_length = int(recording.prompt_lengths[0])
    assert first_difference(ending_model, text, prompt_length) is None
    wrong = text.clone()
    place = len(text) - 3
    wrong[place] = (wrong[place] + 1) % 97
    position, margin = first_difference(ending_model, wrong, prompt_length)
    logits = oracle_logits(ending_model, text[None, :place])[0, -1]
    assert position == place
    assert margin == pytest.approx(float(logits.max() - logits[wrong[place]]), rel=1e-4) and margin > 0


def test_forward_timer_sees_rounds_and_no_prefill(ending_model):
    timer, inputs = ForwardTimer(ending_model), {"input_ids": torch.tensor([[7, 8, 9]]), "do_sample": False}
    options = {"max_new_tokens": 1, "tree_config": {"budget": 1}, "return_dict_in_generate": True, "pad_token_id": 0}
    seen = []
    handle = ending_model.register_forward_hook(lambda *_: seen.append(timer.seconds))
    with timer.attached():
        time = ending_model.generate(**inputs, **options).tree_stats["time"]
    handle.remove()
    # A prompt of three tokens, two of them read beforehand, and a round of one.
    assert len(seen) == 2 and seen[0] == 0 and 0 < timer.seconds < time["verify"]
    ending_model(torch.tensor([[7, 8]]), use_cache=False)
    assert timer.seconds < time["verify"]


def test_per_depth_candidates_are_the_chain_s(tmp_path):
    """Without conditioning every parent of a level has the same children; the chain itself is the same."""
    model = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(make_dspark_checkpoint(tmp_path)))
    head, config = head_of(model), TreeConfig(budget=12, depth=3, top_k=3)
    prompts = [torch.randint(6, 97, (n,), generator=generator(n)).tolist() for n in (9, 30)]
    recorded = record(model, prompts, max_new_tokens=4)
    streams = observe(recorded, model, head.taps)
    seen = []

    class Spy(PerDepthTreeGenerator):
        def propose(self, *arguments):
            seen.append(super().propose(*arguments))
            return seen[-1]

    replay(recorded, model, head, config, streams, Spy)
    tree = seen[0]
    for row in range(2):
        children = {}
        for node in range(1, 12):
            parent, depth = int(tree.parents[row, node]), int(tree.depths[row, node])
            children.setdefault(depth, {}).setdefault(parent, set()).add(int(tree.tokens[row, node]))
        for by_parent in children.values():
            assert len(set.union(*by_parent.values())) <= 3
    chain = TreeConfig(budget=5, top_k=1)
    assert replay(recorded, model, head, chain, streams, Spy).row_rounds == (
        replay(recorded, model, head, chain, streams).row_rounds
    )
