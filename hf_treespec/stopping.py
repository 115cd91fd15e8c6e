"""When a text stops: transformers' stopping criteria after every accepted token of a round."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .fork import Fork
from .texts import NodeTexts, Texts
from .validation import option
from .verifying import StopRule


def add_stop_strings(model, arguments: dict[str, Any]) -> None:
    """Adds a criterion for `stop_strings`, for which transformers would not find the tokenizer of the call.

    Raises:
        ValueError: if there is no `tokenizer`.
    """
    stop_strings = option("stop_strings", arguments, arguments.get("generation_config"), model.generation_config)
    if stop_strings is None:
        return
    if arguments.get("tokenizer") is None:
        raise ValueError(f"`stop_strings` is `{stop_strings}`, which needs the model's `tokenizer=` too.")
    criterion = StopStringCriteria(arguments["tokenizer"], stop_strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])


def token_limit(criteria: Iterable, width: int) -> int:
    """New tokens at most, behind prompts of `width` columns; criteria are asked behind a token, so at least one."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return max(1, min(lengths) - width)


def end_tokens(criteria: Iterable, device: torch.device) -> Tensor | None:
    """End-of-sequence tokens `[E]`, `None` if there are none."""
    tokens = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
    return torch.cat(tokens).to(device) if tokens else None


def bind_criteria(criteria: Iterable, texts: Texts) -> tuple[list[StopRule], list]:
    """Further criteria as rules for every token of a round; and those of which nothing is known."""
    rules, unknown = [], []
    for criterion in criteria:
        if type(criterion) in (MaxLengthCriteria, EosTokenCriteria):
            continue
        if type(criterion) is MaxTimeCriteria:
            rules.append(TimeRule(criterion))
        elif type(criterion) is StopStringCriteria:
            rules.append(StopStringRule(criterion, texts))
        elif getattr(criterion, "row_independent", False):
            rules.append(RowIndependentRule(criterion, texts))
        else:
            unknown.append(criterion)
    return rules, unknown


class TimeRule:
    """Read once per round: the first token behind the limit is the last one."""

    def __init__(self, criterion: MaxTimeCriteria) -> None:
        self.criterion = criterion

    def __call__(self, fork: Fork, path: Tensor, emitted: Tensor) -> Tensor:
        stops = torch.zeros_like(emitted, dtype=torch.bool)
        stops[:, 0] = self.criterion(emitted, None)
        return stops


class StopStringRule:
    """transformers' matcher on the last tokens of every text, prompts included, padding not."""

    def __init__(self, criterion: StopStringCriteria, texts: Texts) -> None:
        self.criterion = criterion
        self.texts = texts

    def __call__(self, fork: Fork, path: Tensor, emitted: Tensor) -> Tensor:
        nodes = _on_path(fork, self.texts, path)
        # No token of the vocabulary, so it matches nothing.
        filler = self.criterion.embedding_vec.shape[0]
        tail = nodes.suffix(self.criterion.maximum_token_len, filler)[:, 1:]
        return self.criterion(torch.cat([tail, emitted.flatten()[:, None]], 1), None).view(emitted.shape)


class RowIndependentRule:
    """A criterion whose class says `row_independent = True`: called on padded texts, as often as is convenient, without
    scores."""

    def __init__(self, criterion, texts: Texts) -> None:
        self.criterion = criterion
        self.texts = texts

    def __call__(self, fork: Fork, path: Tensor, emitted: Tensor) -> Tensor:
        stops = torch.zeros_like(emitted, dtype=torch.bool).flatten()
        for places, input_ids in _on_path(fork, self.texts, path).by_columns():
            stops[places] = self.criterion(torch.cat([input_ids, emitted.flatten()[places, None]], 1), None)
        return stops.view(emitted.shape)


def _on_path(fork: Fork, texts: Texts, path: Tensor) -> NodeTexts:
    return NodeTexts(fork, texts, torch.arange(len(path), device=path.device), path.clamp(min=0))
