"""Accepted length: tokens emitted per round of speculative decoding."""

import datasets
import evaluate
import torch

from hf_treespec.intervals import ratio_of_sums


_DESCRIPTION = """
Tokens emitted per round over all prompts, with the target's own bonus token and without it, and a 95 % bootstrap interval
over prompts.
"""
_INPUTS = """
Args:
    emitted_tokens (`list[int]`): new tokens of each prompt.
    rounds (`list[int]`): target forwards that wrote them, prefill not counted.

Returns:
    `accepted_length` with its interval `low` and `high` (all with the bonus token), `without_bonus`, and `prompts`.

Raises:
    ValueError: without prompts, or for a prompt with less than one round or fewer tokens than rounds.
"""


class AcceptedLength(evaluate.Metric):
    """Tokens per round and row: drafts accepted plus one bonus token."""

    def _info(self) -> evaluate.MetricInfo:
        count = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"emitted_tokens": count, "rounds": count}),
        )

    def _compute(self, emitted_tokens: list[int], rounds: list[int]) -> dict[str, float]:
        for index, (emitted, count) in enumerate(zip(emitted_tokens, rounds)):
            if count < 1 or emitted < count:
                raise ValueError(
                    f"Prompt {index} has {emitted} tokens in {count} rounds; every round emits at least one token."
                )
        if not len(rounds):
            raise ValueError("`rounds` is empty; pass at least one prompt.")
        tokens, passes = (torch.tensor(counts, dtype=torch.double) for counts in (emitted_tokens, rounds))
        ratio = ratio_of_sums(tokens, passes)
        return {
            "accepted_length": ratio.value,
            "low": ratio.low,
            "high": ratio.high,
            "without_bonus": ratio.value - 1,
            "prompts": len(rounds),
        }
