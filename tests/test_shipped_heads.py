"""The heads that the tiny checkpoints ship: found without being named, right, and noticed when they are misused."""

import pytest
import torch
from test_shipped import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.demo import checkpoint
from hf_treespec.heads import DraftHead, detect_head, head_of
from hf_treespec.oracle import first_difference
from hf_treespec.prompts import encode_prompts


FOLDERS = {"mtp": "tiny-target", "dspark": "tiny-target-dspark"}


@pytest.fixture(scope="module", params=FOLDERS)
def target(request):
    return hf_treespec.enable(AutoModelForCausalLM.from_pretrained(checkpoint(FOLDERS[request.param])))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoint("tiny-target"))


def decode(target, batch, **options):
    options = {"tree_config": TreeConfig(budget=8), "max_new_tokens": 48, "return_dict_in_generate": True} | options
    return target.generate(**batch, **options)


@pytest.mark.parametrize(("kind", "folder"), FOLDERS.items())
def test_it_lies_beside_its_trunk(kind, folder):
    path = checkpoint(folder)
    assert detect_head(path) == kind
    for file in path.iterdir():
        assert file.stat().st_size < 16 * 2**20, file
    _, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_its_trees_write_the_oracles_text(target, tokenizer):
    rounds = emitted = 0
    for prompt in PROMPTS[::4]:
        batch = encode_prompts(tokenizer, [prompt])
        output = decode(target, batch)
        assert first_difference(target, output.sequences[0], batch["input_ids"].shape[1]) is None, prompt
        rounds += output.tree_stats["rounds"]
        emitted += output.tree_stats["emitted_tokens"]
    assert emitted > 1.5 * rounds


def test_ragged_batches_write_the_plain_text(target, tokenizer):
    batch = encode_prompts(tokenizer, PROMPTS[:16:2])
    plain = decode(target, batch, tree_config=TreeConfig(budget=1)).sequences
    for options in ({"budget": 8}, {"budget": 4, "top_k": 1}):
        assert torch.equal(decode(target, batch, tree_config=TreeConfig(**options)).sequences, plain)


def test_an_unprimed_window_drafts_worse(target, tokenizer, monkeypatch):
    batch = encode_prompts(tokenizer, PROMPTS)
    primed = decode(target, batch).tree_stats["rounds"]
    window_keys = type(head_of(target)).window_keys

    def unprimed(self: DraftHead, features, position_ids, cache=None):
        keys = window_keys(self, features, position_ids, cache)
        # Wider than a round: a chunk of a prompt.
        return [key.zero_() for key in keys] if features.shape[1] > 8 else keys

    monkeypatch.setattr(type(head_of(target)), "window_keys", unprimed)
    assert decode(target, batch).tree_stats["rounds"] > primed
