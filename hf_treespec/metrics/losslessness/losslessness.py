"""Losslessness: are two sets of token sequences the same, where do they first differ, and how close was it there."""

import datasets
import evaluate
import torch

from hf_treespec.metrics.tokens import first_difference
from hf_treespec.modeling import device_of
from hf_treespec.oracle import oracle_logits
from hf_treespec.sampling import gumbel_noise


_DESCRIPTION = """
Token identity of texts with reference texts: which are the same, where the others first differ, and, given the model that
wrote them, the top-1 gap there. A gap near the rounding of the model's dtype is a near-tie, a larger one is a fault.
"""
_INPUTS = """
Args:
    predictions (`list[list[int]]`): new token ids of each prompt, without padding, with the end-of-sequence token.
    references (`list[list[int]]`): those of the reference, plain greedy decoding say.
    model (`DeepseekV4ForCausalLM`, *optional*): measures the gaps, with one forward per differing text and no cache.
    prompts (`list[list[int]]`, *optional*): token ids of the prompts, without padding; needed with `model`.
    seeds (`list[int]`, *optional*): of texts that were sampled at temperature 1: gaps are those after the seed's noise.

Returns:
    `identical`: share of texts that are the same.
    `token_identity`: tokens before the first difference, as a share of the longer one's tokens, over all texts.
    `first_differences`: per text the number of new tokens before the first difference, `None` for identical ones.
    `gaps`: per text the model's best logit there minus that of the worse of the two tokens; `None` for identical ones and
    without a model, infinite where one text ends and the other goes on.

Raises:
    ValueError: without texts, or if only one of `model` and `prompts` is given, or the prompts are not one per text.
"""


class Losslessness(evaluate.Metric):
    """Token identity, first differences, and the model's top-1 gaps there."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(self, predictions, references, model=None, prompts=None, seeds=None) -> dict[str, float | list]:
        texts = list(zip(predictions, references))
        if not texts:
            raise ValueError("`predictions` is empty; pass at least one text.")
        if (model is None) != (prompts is None):
            raise ValueError("`model` and `prompts` belong together: gaps need both; pass both or neither.")
        if prompts is not None and len(prompts) != len(texts):
            raise ValueError(f"`prompts` has {len(prompts)} rows for {len(texts)} texts; pass one per text.")
        places = [first_difference(*pair) for pair in texts]
        gaps = [None] * len(texts)
        if model is not None:
            gaps = [
                None if place is None else top1_gap(model, prompt, *pair, place, seed)
                for prompt, pair, place, seed in zip(prompts, texts, places, seeds or [None] * len(texts))
            ]
        longest = [max(map(len, pair)) for pair in texts]
        same = [length if place is None else place for place, length in zip(places, longest)]
        return {
            "identical": places.count(None) / len(places),
            "token_identity": sum(same) / max(1, sum(longest)),
            "first_differences": places,
            "gaps": gaps,
        }


def top1_gap(model, prompt: list[int], one: list[int], other: list[int], place: int, seed: int | None = None) -> float:
    """How far the worse of two texts' tokens at `place` lies below the model's best one, in logits.

    The model reads the tokens before it as the oracle does: stock modules, no cache. With a `seed`, logits are those to
    which its noise was added.
    """
    if place >= min(len(one), len(other)):
        return float("inf")
    ids = torch.tensor([[*prompt, *one[:place]]], device=device_of(model))
    logits = oracle_logits(model, ids)[0, -1].float()
    if seed is not None:
        key, position = (torch.tensor([value], device=ids.device) for value in (seed, ids.shape[1]))
        logits = logits + gumbel_noise(key, position, len(logits))[0].to(logits.device)
    return float(logits.max() - logits[[one[place], other[place]]].min())
