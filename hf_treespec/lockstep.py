"""Processors and criteria of which nothing is known, and users' functions: they see what plain decoding would show them.

That is the full batch in order, with equal columns, once per column. So only the accepted path is walked, one token at
a time, and no unfinished row goes further than another: rows advance in lockstep.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .fork import Fork
from .selection import Selection, TokenSelector
from .texts import NodeTexts, Texts
from .verifying import StopRule, Verdict, Verifier


class FullBatchStep:
    """An unknown processor. Rows that finished are shown padded, with scores of 0."""

    def __init__(self, processor, texts: Texts) -> None:
        self.processor = LogitsProcessorList([processor])
        self.texts = texts

    def __call__(self, scores: Tensor, nodes: NodeTexts) -> Tensor:
        prompts = self.texts.prompts
        input_ids = self.texts.sequences(int(nodes.columns[0]) - prompts.shape[1])
        full = scores.new_zeros(len(prompts), scores.shape[-1]).index_copy(0, nodes.rows, scores)
        return self.processor(input_ids, full)[nodes.rows]


class AllowedTokensStep:
    """transformers' `prefix_allowed_tokens_fn`: a user's function that is told the row and its padded text. It may raise
    for texts that are not to be written, or remember what it was asked, so it is asked like an unknown processor; but
    not about rows that finished."""

    def __init__(self, processor, texts: Texts) -> None:
        self.processor, self.texts = copy.copy(processor), texts
        self.processor._num_beams = 1
        self._allowed_tokens, self._copies = processor._prefix_allowed_tokens_fn, processor._num_beams

    def __call__(self, scores: Tensor, nodes: NodeTexts) -> Tensor:
        rows = nodes.rows.tolist()

        def allowed(place: int, text: Tensor):
            tokens = self._allowed_tokens(rows[place] // self._copies, text)
            if len(tokens) == 0:
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` allows no token behind row {rows[place]}, {text.tolist()}; it must "
                    "allow at least one, e.g. the end-of-sequence token."
                )
            return tokens

        self.processor._prefix_allowed_tokens_fn = allowed
        input_ids = self.texts.sequences(int(nodes.columns[0]) - self.texts.prompts.shape[1])
        return self.processor(input_ids[nodes.rows], scores)


class LockstepVerifier(Verifier):
    """Walks every row's tree from the root, as long as all unfinished rows find their token drafted.

    Args:
        texts: of the call.
        criteria: those of which nothing is known, in order.
    """

    def __init__(
        self,
        selector: TokenSelector,
        texts: Texts,
        end: Tensor | None = None,
        rules: Sequence[StopRule] = (),
        criteria: Sequence = (),
    ) -> None:
        super().__init__(selector, end, rules)
        self.texts = texts
        self.criteria = criteria
        # What criteria may look at: the processed scores of every column, where they are kept.
        self.scores: list[Tensor] = []

    def __call__(self, logits: Tensor, fork: Fork, remaining: Tensor) -> Verdict:
        tree, texts = fork.tree, self.texts
        batch, count = tree.tokens.shape
        parents, width = tree.parents, tree.max_depth + 1
        path = torch.full((batch, width), -1, device=logits.device)
        emitted = torch.zeros_like(path)
        accepted = torch.zeros(batch, dtype=torch.long, device=logits.device)
        going = torch.ones(batch, dtype=torch.bool, device=logits.device)
        node = torch.zeros_like(accepted)
        selection = Selection(torch.zeros_like(tree.tokens))
        # Rows advance equally, so this is the column of all of them.
        start = texts.written[texts.live_rows[0]]
        for place in range(width):
            entries = going.nonzero()[:, 0]
            nodes = NodeTexts(fork, texts, entries, node[entries, None])
            chosen = self.selector.at_nodes(logits[entries, node[entries]][:, None], nodes)
            _fill(selection, chosen, entries, node[entries], count)
            path[entries, place] = node[entries]
            emitted[entries, place] = chosen.tokens[:, 0]
            texts.output[nodes.rows, start + place] = chosen.tokens[:, 0]
            accepted[entries] += 1
            stopped = self._stopped(fork, node, emitted[:, place], chosen, nodes, start + place + 1)
            going = going & ~stopped & (accepted < remaining)
            drafted = (parents == node[:, None]) & tree.valid & (tree.tokens == emitted[:, place, None])
            drafted[:, 0] = False
            if not going.any() or not drafted.any(1)[going].all():
                break
            node = torch.where(going, drafted.long().argmax(1), node)
        return Verdict(selection, path, emitted, accepted, ~going)

    def _stopped(
        self, fork: Fork, node: Tensor, tokens: Tensor, chosen: Selection, nodes: NodeTexts, columns: int
    ) -> Tensor:
        """Which live rows stop with their newest token, `[B]`."""
        stopped = torch.zeros_like(tokens, dtype=torch.bool)
        if self.end is not None:
            stopped |= (tokens[:, None] == self.end).any(-1)
        for rule in self.rules:
            stopped |= rule(fork, node[:, None], tokens[:, None])[:, 0]
        if chosen.scores is not None:
            scores = chosen.scores[:, 0]
            full = scores.new_zeros(len(self.texts.prompts), scores.shape[-1])
            self.scores.append(full.index_copy(0, nodes.rows, scores))
        full_batch = self.texts.sequences(columns)
        scores = tuple(self.scores) or None
        for criterion in self.criteria:
            done = torch.zeros(len(full_batch), dtype=torch.bool, device=tokens.device)
            stopped |= (done | criterion(full_batch, scores))[self.texts.live]
        return stopped


def _fill(selection: Selection, chosen: Selection, entries: Tensor, nodes: Tensor, count: int) -> None:
    """Puts what was chosen at one node of some rows into the tables over all nodes."""
    for field in fields(Selection):
        values = getattr(chosen, field.name)
        if values is None:
            continue
        if getattr(selection, field.name) is None:
            setattr(selection, field.name, values.new_zeros(len(selection.tokens), count, *values.shape[2:]))
        getattr(selection, field.name)[entries, nodes] = values[:, 0]
