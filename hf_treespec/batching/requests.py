"""Requests: prepared by transformers exactly as `generate` prepares a call with that prompt alone."""

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..cache import TreeCache
from ..config import TreeConfig
from ..generation import Drafting, run_call
from ..modeling import device_of
from ..processors import WARPERS, bind, warpers
from ..selection import DraftNoise, TokenSelector
from ..steps import make_steps
from ..stopping import bind_criteria, end_tokens, token_limit
from ..validation import check_own_prepared, check_positions, check_prepared
from .rows import Judgement, RowTexts


# Judge every text by itself, however many share them.
_SHARED_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


@dataclass(eq=False)
class Prompt:
    """What `generate` would decode for one prompt.

    Attributes:
        tokens: its token ids.
        limit: new tokens at most.
        processors, criteria: as transformers prepared them.
        config: the generation config of the call, as prepared.
        drafting: how its trees are drafted.
    """

    tokens: tuple[int, ...]
    limit: int
    processors: list
    criteria: list
    config: GenerationConfig
    drafting: Drafting

    @property
    def length(self) -> int:
        """Tokens of the whole text, at most."""
        return len(self.tokens) + self.limit

    @property
    def is_shared(self) -> bool:
        """Whether processors and criteria depend neither on the prompt nor on the time."""
        shared = all(type(processor) in WARPERS for processor in self.processors)
        return shared and all(type(criterion) in _SHARED_CRITERIA for criterion in self.criteria)


@dataclass(eq=False)
class Request:
    """One text to be written: its prompt, seed and the result under way. `key` names what it shares with others."""

    prompt: Prompt
    output: GenerationOutput
    seed: int = 0
    key: Any = None
    timestamps: list[float] = field(default_factory=list)

    def judged(
        self, texts: RowTexts, seeds: Tensor, cache: TreeCache, keep: frozenset[str], known: dict[Any, Judgement]
    ) -> Judgement:
        """How its text is judged, made once for requests that share it."""
        key = self.key if self.prompt.is_shared else self
        if key not in known:
            prompt, sampled = self.prompt, self.prompt.config.do_sample
            steps, _ = make_steps(prompt.processors, texts)
            rules, _ = bind_criteria([_started(criterion) for criterion in prompt.criteria], texts)
            judgement = Judgement(
                TokenSelector(texts, steps, seeds if sampled else None, keep),
                end_tokens(prompt.criteria, seeds.device),
                rules,
                DraftNoise(warpers(prompt.processors), seeds, cache) if sampled else None,
            )
            if key is self:
                return judgement
            known[key] = judgement
        return known[key]


def _started(criterion):
    """The criterion with a clock that starts now: the time in the queue is not the text's."""
    if type(criterion) is not MaxTimeCriteria:
        return criterion
    criterion = copy.copy(criterion)
    criterion.initial_timestamp = time.time()
    return criterion


def prepare(model, tokens: list[int], tree_config: TreeConfig | dict, options: dict[str, Any]) -> Prompt:
    """Has transformers prepare a call of `generate` with `options`.

    Raises:
        ValueError: for whatever `generate` refuses, and for processors and criteria that need all rows of a call.
    """
    if not isinstance(tokens, (list, tuple)) or any(type(token) is not int for token in tokens):
        raise ValueError(f"A prompt must be a list of token ids, not {tokens!r:.80}.")
    input_ids = torch.tensor([tokens], dtype=torch.long, device=device_of(model))
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    return run_call(model, {**options, **inputs}, tree_config, _prepared)


def _prepared(
    model, input_ids, logits_processor, stopping_criteria, generation_config, drafting, **model_kwargs
) -> Prompt:
    """The decoding method that only says what is to be decoded."""
    for name in ("seeds", "return_logprobs", "streamer"):
        model_kwargs.pop(name)
    check_prepared(logits_processor, model_kwargs)
    check_own_prepared(None, None, generation_config)
    width = input_ids.shape[1]
    limit = token_limit(stopping_criteria, width)
    check_positions(drafting.assistant_model, width + limit)
    _check_independent(logits_processor, stopping_criteria)
    tokens = tuple(input_ids[0].tolist())
    return Prompt(tokens, limit, list(logits_processor), list(stopping_criteria), generation_config, drafting)


def _check_independent(processors: Iterable, criteria: Iterable) -> None:
    """Raises for what needs the rows of a call to stay together, or counts them."""
    for item in processors:
        name = type(item).__name__
        if isinstance(item, hf.PrefixConstrainedLogitsProcessor):
            raise ValueError(
                "`prefix_allowed_tokens_fn` is told the row of a prompt, but requests of `generate_batch` change rows; "
                "use `generate`."
            )
        if isinstance(getattr(item, "prompt_ignore_length", None), Tensor):
            raise ValueError(
                f"`{name}` in `logits_processor` has a `prompt_ignore_length` per row, but requests of "
                "`generate_batch` change rows; pass an integer, or use `generate`."
            )
        if bind(item) is None and not getattr(item, "row_independent", False):
            raise ValueError(
                f"`{name}` in `logits_processor` has a state, or nothing is known about it, but rows of "
                "`generate_batch` begin other texts: set `row_independent = True` on the class if a row's result "
                "depends on that row alone and on no earlier call, else use `generate`."
            )
    for item in criteria:
        known = isinstance(item, (*_SHARED_CRITERIA, MaxTimeCriteria))
        if not known and not getattr(item, "row_independent", False):
            raise ValueError(
                f"Nothing is known about `{type(item).__name__}` in `stopping_criteria`, but rows of `generate_batch` "
                "begin other texts: set `row_independent = True` on the class if a row's result depends on that row "
                "alone, else use `generate`."
            )
