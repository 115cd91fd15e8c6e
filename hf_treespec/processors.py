"""transformers' logits processors at every node of a tree, each node with its own text.

A processor of transformers gets scores `[rows, V]` and one column count for all rows. Here the rows are nodes, whose
texts differ in length, so each class is bound by what it looks at: the scores alone, the number of columns, or the
tokens. Arithmetic is transformers' own wherever it can be called.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from .selection import ScoreStep
from .texts import NodeTexts


# Depend on the scores alone.
WARPERS = (
    hf.TemperatureLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
    hf.BarkEosPrioritizerLogitsProcessor,
)


def warpers(processors: Iterable) -> list[Callable]:
    """The processors that a drafter can apply too: those that depend on the scores alone."""
    return [processor for processor in processors if type(processor) in WARPERS]


def bind(processor) -> ScoreStep | None:
    """The processor as a step over nodes, or `None` if nothing is known about its class."""
    if type(processor) in WARPERS:
        return partial(_warp, processor)
    if type(processor) in _BY_TEXT:
        return partial(_BY_TEXT[type(processor)], processor)
    return None


def _warp(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return processor(None, scores)


# By the number of columns, which counts a row's padding as in transformers.


def _banned(scores: Tensor, where: Tensor, tokens: Tensor) -> Tensor:
    """-inf at `tokens` for the nodes `where` `[M]`."""
    vocabulary = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(where[:, None] & torch.isin(vocabulary, tokens.to(scores.device)), float("-inf"))


def _forced(scores: Tensor, where: Tensor, tokens) -> Tensor:
    """0 at `tokens` and -inf elsewhere for the nodes `where` `[M]`."""
    forced = scores.new_full((scores.shape[-1],), float("-inf"))
    forced[tokens] = 0
    return torch.where(where[:, None], forced, scores)


def _min_length(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return _banned(scores, nodes.columns < processor.min_length, processor.eos_token_id)


def _min_new_tokens(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    early = nodes.columns - processor.prompt_length_to_skip < processor.min_new_tokens
    return _banned(scores, early, processor.eos_token_id)


def _forced_bos(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return _forced(scores, nodes.columns == 1, processor.bos_token_id)


def _forced_eos(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return _forced(scores, nodes.columns == processor.max_length - 1, processor.eos_token_id)


def _exponential_decay(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    tokens = processor.eos_token_id.to(scores.device)
    late = (nodes.columns - processor.regulation_start).clamp(min=0)
    # In float64 as in Python; without a late token the power is 1 and nothing is added.
    growth = (processor.regulation_factor ** late.double() - 1).to(scores.dtype)[:, None]
    chosen = scores[:, tokens]
    penalty = (chosen.abs() * growth).masked_fill(~chosen.isfinite(), 0.0)
    penalties = torch.zeros_like(scores)
    penalties[:, tokens] = penalty
    return scores + penalties


def _suppress_at_begin(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return _banned(scores, nodes.columns == processor.begin_index, processor.begin_suppress_tokens)


def _alternating_codebooks(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    tokens = torch.arange(scores.shape[-1], device=scores.device)
    semantic, end = processor.semantic_vocab_size, processor.semantic_vocab_size + processor.codebook_size
    first = ((nodes.columns - processor.input_start_len) % 2 == 0)[:, None]
    allowed = torch.where(first, (tokens >= semantic) & (tokens < end), tokens >= end)
    return scores.masked_fill(~allowed, float("-inf"))


# By the tokens, without padding.


def _repetition_penalty(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    vocab_size = scores.shape[-1]
    tokens, ignored = nodes.whole(filler=vocab_size), processor.prompt_ignore_length
    if ignored is not None:
        # Columns are counted with the padding. (transformers sets it to the padding, by which nothing is ignored.)
        ignored = ignored.to(scores.device)[nodes.rows] if isinstance(ignored, Tensor) else ignored
        positions = nodes.lengths[:, None] - tokens.shape[1] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = positions < (ignored - nodes.texts.padding[nodes.rows])[:, None]
        tokens = tokens.masked_fill(hidden, vocab_size)
    return hf.RepetitionPenaltyLogitsProcessor(processor.penalty)(tokens, scores)


def _no_repeat_ngram(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return processor(nodes.whole(filler=scores.shape[-1]), scores)


def _sequence_bias(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    return processor(nodes.suffix(max(map(len, processor.sequence_bias), default=1) - 1), scores)


def _encoder_repetition_penalty(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    prompts, texts = processor.encoder_input_ids, nodes.texts
    source = nodes.rows // (len(texts.padding) // len(prompts))
    prompts = prompts.to(scores.device)[source]  # [M, P]
    if prompts.shape[1] == texts.prompts.shape[1]:
        # Padding is no part of a prompt. Repeating its last token changes nothing.
        padding = torch.arange(prompts.shape[1], device=prompts.device) < texts.padding[nodes.rows][:, None]
        prompts = torch.where(padding, prompts[:, -1:], prompts)
    processor = copy.copy(processor)
    processor.encoder_input_ids = prompts
    return processor(None, scores)


def _encoder_no_repeat_ngram(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    source = nodes.rows // (len(nodes.texts.padding) // processor.batch_size)
    tables = [processor.generated_ngrams[row] for row in source.tolist()]
    processor = copy.copy(processor)
    processor.generated_ngrams, processor.batch_size = tables, len(tables)
    return processor(nodes.suffix(processor.ngram_size - 1), scores)


def _watermark(processor, scores: Tensor, nodes: NodeTexts) -> Tensor:
    # The seeding needs `context_width` tokens of the text itself, and goes by Python: real nodes only.
    places = (nodes.valid & (nodes.lengths >= processor.context_width)).nonzero()[:, 0]
    if not len(places):
        return scores
    marked = processor(nodes.suffix(processor.context_width)[places], scores[places])
    return scores.index_copy(0, places, marked)


_BY_TEXT: dict[type, Callable[..., Tensor]] = {
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.ForcedBOSTokenLogitsProcessor: _forced_bos,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.ExponentialDecayLengthPenalty: _exponential_decay,
    hf.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    hf.AlternatingCodebooksLogitsProcessor: _alternating_codebooks,
    hf.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    hf.SequenceBiasLogitsProcessor: _sequence_bias,
    hf.NoBadWordsLogitsProcessor: _sequence_bias,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition_penalty,
    hf.EncoderNoRepeatNGramLogitsProcessor: _encoder_no_repeat_ngram,
    hf.WatermarkLogitsProcessor: _watermark,
}
