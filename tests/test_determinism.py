"""`deterministic=True`: the same bits with and without speculation, in every logit."""

import json

import pytest
import torch
from decoding import CHAIN, TREE, run
from oracle import assert_greedy, build_model, generator, left_pad, random_texts, tiny_config
from test_shipped import PROMPTS
from transformers import AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from typer.testing import CliRunner

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench import determinism
from hf_treespec.demo import checkpoint, load_pair
from hf_treespec.prompts import encode_prompts


def logits_of(model, texts, tree_config, new_tokens: int = 20, **options):
    output, written = run(model, texts, new_tokens, tree_config=tree_config, output_logits=True, **options)
    return output, written, torch.stack(output.logits)


@pytest.mark.parametrize("lengths,options", [((33,), {}), ((21, 40, 9), {"do_sample": True, "seeds": [3, 4, 5]})])
def test_no_bit_depends_on_what_is_drafted(model, drafter, lengths, options):
    """Also in ragged batches whose rows end at different times, behind prompts of one and of several chunks."""
    texts = random_texts(generator(1), lengths)
    options = {**options, "prefill_chunk_size": 32}
    different = {}
    for fixed in (True, False):
        runs = [logits_of(model, texts, {"budget": 1, "deterministic": fixed}, **options)]
        for shape in (TREE, CHAIN):
            config = {**shape, "deterministic": fixed}
            runs.append(logits_of(model, texts, config, assistant_model=drafter, **options))
        if fixed and "seeds" not in options:
            assert_greedy(model, runs[0][1], list(lengths))
        assert all(torch.equal(runs[0][0].sequences, other[0].sequences) for other in runs[1:])
        assert runs[0][0].tree_stats["rounds"] > runs[1][0].tree_stats["rounds"]
        different[fixed] = sum(int((runs[0][2] != other[2]).sum()) for other in runs[1:])
    assert different[True] == 0 and different[False] > 0


def test_more_nodes_and_a_second_turn(model, drafter):
    """The cache of either goes on alike."""
    texts = random_texts(generator(2), (21, 34))
    config = {"budget": 12, "depth": 5, "deterministic": 16}
    plain = logits_of(model, texts, {**config, "budget": 1, "depth": 0})
    tree = logits_of(model, texts, config, assistant_model=drafter)
    assert torch.equal(plain[2], tree[2])
    turns = [torch.cat([text, random_texts(generator(3), (7,))[0]]) for text in plain[1]]
    inputs = {**left_pad(turns), "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    second = [
        model.generate(**inputs, do_sample=False, cache=first[0].cache, tree_config={"budget": 1, "deterministic": 16})
        for first in (plain, tree)
    ]
    assert torch.equal(torch.stack(second[0].logits), torch.stack(second[1].logits))


def test_with_a_head(target):
    texts = random_texts(generator(4), (19, 30))
    plain = logits_of(target, texts, {"budget": 1, "deterministic": True})
    tree = logits_of(target, texts, {"budget": 6, "deterministic": True})
    assert torch.equal(plain[2], tree[2]) and tree[0].tree_stats["nodes"] > plain[0].tree_stats["nodes"]


@pytest.fixture(scope="module")
def shipped():
    return load_pair(checkpoint("tiny-target"), checkpoint("tiny-draft"))[:2]


def test_the_shipped_model(shipped):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("tiny-target"))
    found = {True: 0, False: 0}
    for prompt in PROMPTS[::7]:
        ids = encode_prompts(tokenizer, [prompt])["input_ids"]
        for fixed in found:
            found[fixed] += determinism.differing_logits(*shipped, ids, TreeConfig(deterministic=fixed), 16)[0]
    assert found[True] == 0 and found[False] > 0


def test_the_command_prints_figures(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2]))
    app = determinism.typer.Typer()
    app.command()(determinism.main)
    result = CliRunner().invoke(app, ["--prompts", str(path), "--max-new-tokens", "8"])
    assert result.exit_code == 0 and "deterministic: 0 of" in result.output, result.output


@pytest.mark.parametrize("options", [{"deterministic": 4}, {"deterministic": 12}, {"deterministic": "yes"}])
def test_numbers_of_nodes_are_checked(options):
    with pytest.raises(ValueError, match="`deterministic`"):
        TreeConfig(**options)


def test_a_larger_budget_says_what_to_set():
    with pytest.raises(ValueError, match="`deterministic=24`"):
        TreeConfig(budget=20, deterministic=True)
    assert TreeConfig(budget=20, deterministic=24).fixed_nodes == 24


def test_experts_of_which_nothing_is_known_are_refused(monkeypatch):
    model = hf_treespec.enable(build_model(tiny_config()))
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "own", lambda *args: None)
    monkeypatch.setattr(model.config, "_experts_implementation_internal", "own")
    prompt = random_texts(generator(0), (5,))[0][None]
    with pytest.raises(ValueError, match="`deterministic` needs experts"):
        model.generate(prompt, tree_config={"budget": 1, "deterministic": True})
