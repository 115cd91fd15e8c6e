"""The shipped pair: what it promises to be, and that its texts are the oracle's under every drafter."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.demo import checkpoint
from hf_treespec.oracle import first_difference
from hf_treespec.prompts import encode_prompts


ITEMS = ("apples", "pens", "coins", "books")
PROMPTS = [
    *[
        f"Tom has {n} {item}. He buys {2 * n} more and gives 3 away. How many are left?"
        for n in (4, 7)
        for item in ITEMS
    ],
    *[
        f"Write a function to {task}."
        for task in ("reverse a string", "sort a list", "sum two numbers", "find a prime")
    ],
    *[f"Repeat the following code: x{n} = {n}\nprint(x{n} + {n})" for n in (1, 2, 3, 4)],
    *["What is the derivative of x**2?", "Tell me about the sea.", "Solve 3*x + 2 = 11 for x.", "Name three colours."],
]


@pytest.fixture(scope="module")
def target():
    return hf_treespec.enable(AutoModelForCausalLM.from_pretrained(checkpoint("tiny-target")))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoint("tiny-target"))


@pytest.fixture(scope="module")
def drafts():
    trained = AutoModelForCausalLM.from_pretrained(checkpoint("tiny-draft"))
    torch.manual_seed(0)
    return {"trained": trained, "random": type(trained)(trained.config).eval()}


@pytest.mark.parametrize("name", ["tiny-target", "tiny-target-copying", "tiny-draft"])
def test_tensors_are_bf16_and_load_in_fp32(name):
    file = checkpoint(name) / "model.safetensors"
    assert file.stat().st_size < 16 * 2**20
    with safe_open(file, "pt") as tensors:
        kinds = {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    # The hash router's table of expert numbers is the only integer tensor.
    assert kinds <= {"BF16", "I64"}
    model, loading = AutoModelForCausalLM.from_pretrained(checkpoint(name), output_loading_info=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_the_target_has_every_mechanism(target):
    config = target.config
    assert sum(parameter.numel() for parameter in target.parameters()) <= 7_500_000
    assert len(set(config.layer_types)) == 3 and set(config.mlp_layer_types) == {"hash_moe", "moe"}
    assert config.hc_mult > 1 and config.index_n_heads >= 8
    # In a context of 1,000 tokens the indexer has to choose.
    assert 1000 // config.compress_rates["compressed_sparse_attention"] > config.index_topk


@pytest.mark.parametrize(
    ("draft", "options", "count"),
    [
        (None, {"budget": 1}, 20),
        ("trained", {"budget": 8}, 20),
        ("trained", {"budget": 8, "top_k": 1}, 20),
        ("random", {"budget": 6, "depth": 3}, 5),
    ],
)
def test_text_is_the_oracles(target, tokenizer, drafts, draft, options, count):
    rounds = emitted = 0
    for prompt in PROMPTS[:: len(PROMPTS) // count]:
        ids = encode_prompts(tokenizer, [prompt])["input_ids"]
        output = target.generate(
            ids,
            max_new_tokens=64,
            tree_config=TreeConfig(**options),
            assistant_model=drafts.get(draft),
            return_dict_in_generate=True,
        )
        assert first_difference(target, output.sequences[0], ids.shape[1]) is None, prompt
        rounds += output.tree_stats["rounds"]
        emitted += output.tree_stats["emitted_tokens"]
    assert (emitted > 1.5 * rounds) == (draft == "trained")


def test_rows_of_a_batch_are_the_rows_alone(target, tokenizer, drafts):
    options = {"max_new_tokens": 48, "tree_config": TreeConfig(budget=6), "assistant_model": drafts["trained"]}
    batch = encode_prompts(tokenizer, PROMPTS[:12:2])
    texts = target.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for text, prompt in zip(texts, PROMPTS[:12:2]):
        ids = encode_prompts(tokenizer, [prompt])["input_ids"]
        alone = target.generate(ids, **options)[0, ids.shape[1] :]
        assert text[: len(alone)].equal(alone)
        assert (text[len(alone) :] == tokenizer.pad_token_id).all()
