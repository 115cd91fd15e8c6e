"""Processors with a state per text: the two-method protocol `fork(parents)` and `commit(path)`.

A class that has both methods is called on draft trees. Within a round it keeps a table of states: first one per row of
the call, then one per text it was called on, in the order of the calls. Before each call `fork(parents)` says which
states `[M]` the texts continue; the call then gets their `input_ids` `[M, columns]` and `scores` `[M, V]` as in plain
decoding and adds M states to the table. `commit(path)` ends the round with the states `[R]` that the rows go on with.
"""

import copy
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, SynthIDTextWatermarkState

from .fork import Fork
from .texts import NodeTexts


class StatefulStep:
    """Calls a processor of the protocol level by level, a text's parent before the text.

    Args:
        processor: has `fork(parents)` and `commit(path)`.
        rows: of the call.
    """

    def __init__(self, processor, rows: int) -> None:
        self.processor = processor
        self.rows = rows

    def begin(self, fork: Fork) -> None:
        """Starts a round: no node has a state yet."""
        self._states = torch.full_like(fork.tree.tokens, -1)
        self._count = self.rows
        self._parents = fork.tree.parents

    def __call__(self, scores: Tensor, nodes: NodeTexts) -> Tensor:
        processed = scores.clone()
        for places, input_ids in nodes.by_columns():
            entry, node = nodes.entries[places], nodes.nodes[places]
            parents = self._states[entry, self._parents[entry, node]]
            self.processor.fork(torch.where(nodes.depths[places] == 0, nodes.rows[places], parents))
            processed[places] = self.processor(input_ids, scores[places])
            self._states[entry, node] = self._count + torch.arange(len(places), device=places.device)
            self._count += len(places)
        return processed

    def commit(self, fork: Fork, path: Tensor, accepted: Tensor) -> None:
        """Ends the round with the first `accepted` `[B]` nodes of `path` `[B, P]`."""
        last = path.gather(1, accepted[:, None] - 1)
        states = torch.arange(self.rows, device=path.device)
        rows = states if fork.rows is None else fork.rows
        self.processor.commit(states.index_copy(0, rows, self._states.gather(1, last)[:, 0]))


class ForkedSynthID:
    """transformers' SynthID watermark under the protocol; its state starts anew with every call of `generate`.

    The context is the last tokens that were written, zeros at first; a context that was met before is not watermarked.
    """

    def __init__(self, processor: SynthIDTextWatermarkLogitsProcessor, rows: int) -> None:
        self._skipped = processor.ngram_len - 1 if processor.skip_first_ngram_calls else 0
        self._processor = copy.copy(processor)
        # The first calls are skipped here: the rows of one call may have been called unequally often.
        self._processor.skip_first_ngram_calls = False
        sizes = (processor.ngram_len, processor.context_history_size, processor.device)
        state = SynthIDTextWatermarkState(rows, *sizes)
        # Tables of states.
        self._contexts, self._histories = [state.context], [state.context_history]
        self._calls = [torch.zeros(rows, dtype=torch.long, device=processor.device)]

    def fork(self, parents: Tensor) -> None:
        tables = self._contexts, self._histories, self._calls
        self._context, self._history, self._number = (torch.cat(table)[parents] for table in tables)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # A call appends the newest token to the context, except the first one, whose context stays 0.
        newest = torch.where((self._number > 0)[:, None], input_ids[:, -1:], 0)
        state = SimpleNamespace(context=self._context, context_history=self._history, num_calls=0)
        self._processor.state = state
        processed = self._processor(newest, scores)
        number = self._number + 1
        skipped = (number <= self._skipped)[:, None]
        self._contexts.append(state.context)
        self._histories.append(torch.where(skipped, self._history, state.context_history))
        self._calls.append(number)
        return torch.where(skipped, scores, processed)

    def commit(self, path: Tensor) -> None:
        for table in (self._contexts, self._histories, self._calls):
            table[:] = [torch.cat(table)[path]]
