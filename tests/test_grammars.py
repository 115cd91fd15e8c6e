"""JSON schemas by xgrammar (an extra): valid, and the text of plain decoding."""

import json
from importlib.resources import files

import pytest
import torch
import xgrammar
from decoding import run
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from xgrammar.contrib import hf

import hf_treespec


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "sizes": {"type": "array", "maxItems": 2}},
    "required": ["name", "sizes"],
}
SCHEMA["properties"]["sizes"]["items"] = {"type": "integer", "minimum": 0, "maximum": 99}


@pytest.fixture(scope="module")
def shipped():
    folder = files("hf_treespec") / "checkpoints"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("tiny-target", "tiny-draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny-target")
    return hf_treespec.enable(target), draft, tokenizer


@pytest.fixture(scope="module")
def grammar(shipped):
    model, _, tokenizer = shipped
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


class Undeclared(LogitsProcessor):
    """The same processor under another name: nothing is known about it."""

    def __init__(self, grammar) -> None:
        self.inner = hf.LogitsProcessor(grammar)

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seeds": list(range(8))}], ids=["greedy", "sampled"])
def test_json(shipped, grammar, options):
    """A batch of 8 whose rows leave at different times: plainly, with trees, and in lockstep."""
    model, draft, tokenizer = shipped
    ids = [tokenizer(f"Write the {n} as JSON:", return_tensors="pt")["input_ids"][0] for n in "abcdefgh"]
    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "top_k": 0, **options}
    outputs = {
        name: run(
            model,
            ids,
            50,
            tree_config=tree,
            assistant_model=draft,
            logits_processor=LogitsProcessorList([kind(grammar)]),
            **options,
        )
        for name, kind, tree in (
            ("plain", hf.LogitsProcessor, {"budget": 1}),
            ("tree", hf.LogitsProcessor, {"budget": 8}),
            ("lockstep", Undeclared, {"budget": 1}),
        )
    }
    assert torch.equal(outputs["tree"][0].sequences, outputs["plain"][0].sequences)
    assert torch.equal(outputs["lockstep"][0].sequences, outputs["plain"][0].sequences)
    ended = 0
    for prompt, text in zip(ids, outputs["tree"][1]):
        new = text[len(prompt) :].tolist()
        if tokenizer.eos_token_id in new:
            value = json.loads(tokenizer.decode(new[: new.index(tokenizer.eos_token_id)]))
            assert set(value) >= {"name", "sizes"} and all(0 <= size <= 99 for size in value["sizes"])
            ended += 1
    assert ended >= 6


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_two_hundred_texts_are_valid(shipped, grammar, temperature):
    """Batches of 8 whose rows leave: every text ends, fits the schema and is that of plain decoding."""
    model, draft, tokenizer = shipped
    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "top_k": 0}
    valid = 0
    for batch in range(25):
        numbers = range(8 * batch, 8 * batch + 8)
        ids = [tokenizer(f"Write item {n} as JSON:", return_tensors="pt")["input_ids"][0] for n in numbers]
        if temperature:
            options |= {"do_sample": True, "temperature": float(temperature), "seeds": list(numbers)}
        processor = {"logits_processor": LogitsProcessorList([hf.LogitsProcessor(grammar)])}
        output, texts = run(model, ids, 128, tree_config={"budget": 8}, assistant_model=draft, **processor, **options)
        processor = {"logits_processor": LogitsProcessorList([hf.LogitsProcessor(grammar)])}
        plain = run(model, ids, 128, tree_config={"budget": 1}, **processor, **options)[0]
        assert torch.equal(output.sequences, plain.sequences)
        for prompt, text in zip(ids, texts):
            new = text[len(prompt) :].tolist()
            value = json.loads(tokenizer.decode(new[: new.index(tokenizer.eos_token_id)]))
            assert set(value) >= {"name", "sizes"} and isinstance(value["name"], str) and len(value["name"]) <= 6
            assert len(value["sizes"]) <= 2 and all(type(n) is int and 0 <= n <= 99 for n in value["sizes"])
            valid += 1
    assert valid == 200


def test_the_number_of_grammars(shipped, grammar):
    model, _, tokenizer = shipped
    processor = LogitsProcessorList([hf.LogitsProcessor([grammar] * 2)])
    with pytest.raises(ValueError, match="2 grammars.*3 sequences"):
        run(model, [torch.tensor([5, 6])] * 3, 2, tree_config={"budget": 1}, logits_processor=processor)
