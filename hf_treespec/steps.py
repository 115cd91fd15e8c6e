"""From the processors and criteria of a call to what judges its trees."""

import logging
from collections.abc import Iterable

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

from .grammars import ForkedGrammar, is_grammar
from .lockstep import AllowedTokensStep, FullBatchStep, LockstepVerifier
from .processors import bind
from .selection import ScoreStep, TokenSelector
from .stateful import ForkedSynthID, StatefulStep
from .stopping import bind_criteria, end_tokens
from .texts import NodeTexts, Texts
from .verifying import Verifier


logger = logging.getLogger(__name__)


class RowIndependentStep:
    """A processor whose class says `row_independent = True`: called on padded texts, as often as is convenient."""

    def __init__(self, processor) -> None:
        self.processor = LogitsProcessorList([processor])

    def __call__(self, scores: Tensor, nodes: NodeTexts) -> Tensor:
        processed = scores.clone()
        for places, input_ids in nodes.by_columns():
            processed[places] = self.processor(input_ids, scores[places])
        return processed


def make_steps(processors: Iterable, texts: Texts) -> tuple[list[ScoreStep], list]:
    """The steps of a call, in order; and the processors among them of which nothing is known."""
    steps, unknown = [], []
    for processor in processors:
        step = bind(processor)
        if step is None and type(processor) is SynthIDTextWatermarkLogitsProcessor:
            step = StatefulStep(ForkedSynthID(processor, len(texts.prompts)), len(texts.prompts))
        elif step is None and type(processor) is PrefixConstrainedLogitsProcessor:
            step = AllowedTokensStep(processor, texts)
        elif step is None and is_grammar(processor):
            step = StatefulStep(ForkedGrammar(processor, len(texts.prompts)), len(texts.prompts))
        elif step is None and hasattr(processor, "fork") and hasattr(processor, "commit"):
            step = StatefulStep(processor, len(texts.prompts))
        elif step is None and getattr(processor, "row_independent", False):
            step = RowIndependentStep(processor)
        elif step is None:
            step = FullBatchStep(processor, texts)
            unknown.append(processor)
        steps.append(step)
    return steps, unknown


def fields_to_keep(generation_config, return_logprobs: bool | None) -> frozenset[str]:
    """Fields of [`Selection`] that the output of a call needs."""
    if not generation_config.return_dict_in_generate:
        return frozenset()
    wanted = {"scores": generation_config.output_scores, "logits": generation_config.output_logits}
    wanted |= dict.fromkeys(("logprobs", "processed_logprobs"), return_logprobs)
    return frozenset(name for name, value in wanted.items() if value)


def make_verifier(
    texts: Texts, processors: Iterable, criteria: Iterable, seeds: Tensor | None, keep: frozenset[str] = frozenset()
) -> Verifier:
    """What judges the trees of a call; rows advance in lockstep where a processor or criterion is unknown,
    or allowed tokens are a user's function.

    Args:
        texts: of the call.
        processors, criteria: as transformers prepared them, in order.
        seeds: of each row `[R]` where tokens are sampled.
        keep: fields of [`Selection`] to keep beside the tokens.
    """
    steps, unknown = make_steps(processors, texts)
    rules, unknown_criteria = bind_criteria(criteria, texts)
    selector, end = TokenSelector(texts, steps, seeds, keep), end_tokens(criteria, texts.prompts.device)
    unknown += unknown_criteria
    if not unknown and not any(isinstance(step, AllowedTokensStep) for step in steps):
        return Verifier(selector, end, rules)
    if unknown:
        names = ", ".join(getattr(item, "__name__", type(item).__name__) for item in unknown)
        logger.warning(
            f"Nothing is known about {names}: rows advance in lockstep, as far as the one that accepts least. If each "
            "row's result depends on that row alone and on no earlier call, set `row_independent = True` on the class."
        )
    return LockstepVerifier(selector, texts, end, rules, unknown_criteria)
