"""The shipped target that copies: prompt lookup pays on echoes, and the text is the oracle's."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec.bench.copying import echo_requests
from hf_treespec.demo import checkpoint
from hf_treespec.oracle import first_difference


CODES = [
    "def add(first, second):\n    return first + second",
    "for name in names:\n    print(name, len(name))",
    "import os\n\nfor path in os.listdir('.'):\n    print(path)",
    "class Counter:\n    def __init__(self):\n        self.count = 0",
    "def is_even(number):\n    return number % 2 == 0",
    "total = 0\nfor value in values:\n    total += value",
    "with open(path) as file:\n    text = file.read()",
    "if not items:\n    raise ValueError('no items')",
    "squares = [n * n for n in range(10)]\nprint(sum(squares))",
    "def first_word(text):\n    return text.split()[0]",
]


def test_prompt_lookup_accepts_three_tokens_per_round_on_echoes():
    folder = checkpoint("tiny-target-copying")
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder))
    prompts, answers = echo_requests(AutoTokenizer.from_pretrained(folder), CODES)
    rounds = tokens = copies = 0
    for prompt, answer in zip(prompts, answers):
        output = target.generate(
            torch.tensor([prompt]),
            tree_config={"budget": 8, "fallback": False},
            prompt_lookup_num_tokens=7,
            max_new_tokens=64,
            return_dict_in_generate=True,
        )
        assert first_difference(target, output.sequences[0], len(prompt)) is None
        copies += output.sequences[0, len(prompt) :].tolist() == answer
        rounds += output.tree_stats["rounds"]
        tokens += output.tree_stats["emitted_tokens"]
    assert copies >= len(CODES) // 2
    assert tokens / rounds >= 3
