"""What `against` times, on whatever version of the package is imported; sticks to what early versions have, too.

A line with a case's name on standard input is one turn; the line that answers it has its seconds.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import hf_treespec
from hf_treespec import TreeCache, TreeConfig
from hf_treespec.bench.speed import long_model, prefilled, verify_step
from hf_treespec.prefill import prefill


@functools.cache
def _long(tokens: int):
    """A random model, and a cache that holds so many tokens in one row."""
    model = hf_treespec.enable(long_model())
    return model, prefilled(model, tokens)


def _prefill(settings: dict[str, Any]) -> Callable[[], int]:
    model, count = _long(settings["tokens"])[0], torch.tensor([settings["tokens"]])
    tokens = torch.randint(7, model.config.vocab_size, (1, settings["tokens"]))

    @torch.no_grad()
    def run() -> int:
        prefill(model, TreeCache(model.config, 1), tokens, count)
        return 1

    return run


def _verify(settings: dict[str, Any], nodes: int) -> Callable[[], int]:
    step = verify_step(*_long(settings["tokens"]), nodes)

    def run() -> int:
        for _ in range(settings["steps"]):
            step()
        return settings["steps"]

    return run


def _decode(settings: dict[str, Any]) -> Callable[[], int]:
    from transformers import AutoModelForCausalLM

    target, draft = (AutoModelForCausalLM.from_pretrained(settings[name]).eval() for name in ("target", "draft"))
    config = TreeConfig(budget=8, depth=3)
    # In versions that choose budgets while they run.
    config = config.as_fixed() if hasattr(config, "as_fixed") else config
    options = {"max_new_tokens": settings["new_tokens"], "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    options |= {"tree_config": config, "assistant_model": draft, "return_dict_in_generate": True}
    hf_treespec.enable(target)
    return lambda: target.generate(torch.arange(7, 23)[None], **options).tree_stats["rounds"]


# Each makes a function that does something and says how often.
CASES = {
    "prefill of a long prompt": _prefill,
    "verify 1 node behind it": functools.partial(_verify, nodes=1),
    "verify 8 nodes behind it": functools.partial(_verify, nodes=8),
    "verify 64 nodes behind it": functools.partial(_verify, nodes=64),
    "whole round of the shipped pair, 8 nodes": _decode,
}


def main(settings: dict[str, Any]) -> None:
    """Answers the turns until the input ends; first of all says which package it runs."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(hf_treespec.__file__), file=answers, flush=True)  # noqa: T201
    cases: dict[str, Callable[[], int]] = {}
    for name in map(str.strip, sys.stdin):
        if name not in cases:
            cases[name] = CASES[name](settings)
            cases[name]()
        start = time.perf_counter()
        count = cases[name]()
        print(json.dumps((time.perf_counter() - start) / count), file=answers, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
