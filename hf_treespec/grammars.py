"""xgrammar's processor for transformers on draft trees: token-mask grammars such as JSON schemas."""

import torch
from torch import Tensor


def is_grammar(processor) -> bool:
    """Whether this is xgrammar's processor; xgrammar itself is not needed to ask."""
    return (type(processor).__module__, type(processor).__name__) == ("xgrammar.contrib.hf", "LogitsProcessor")


class ForkedGrammar:
    """xgrammar's matchers under the protocol of [`StatefulStep`], one per node; they start anew with every call.

    A state is a matcher, `None` where a draft left the grammar, and the mask it last made; a matcher that is over keeps
    that, as in xgrammar.

    Args:
        processor: an `xgrammar.contrib.hf.LogitsProcessor`.
        rows: of the call.

    Raises:
        ValueError: if there is neither one grammar nor one per row.
    """

    def __init__(self, processor, rows: int) -> None:
        import xgrammar

        grammars = processor.compiled_grammars
        if len(grammars) not in (1, rows):
            raise ValueError(
                f"The `LogitsProcessor` of xgrammar holds {len(grammars)} grammars, but {rows} sequences are returned; "
                "pass one grammar, or one per sequence."
            )
        self._xgrammar, self._vocab_size = xgrammar, processor.full_vocab_size
        matchers = [xgrammar.GrammarMatcher(grammar) for grammar in grammars]
        matchers += [matchers[0].fork() for _ in range(rows - len(matchers))]
        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)[0]
        self._states = [(matcher, mask) for matcher in matchers]
        self._rows, self._started = rows, False

    def fork(self, parents: Tensor) -> None:
        # The first call of each row shows its prompt, of which a grammar knows nothing.
        self._shown = [place >= self._rows or self._started for place in parents.tolist()]
        self._parents = [self._states[place] for place in parents.tolist()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        states = [
            self._advance(*state, token if shown else None)
            for state, token, shown in zip(self._parents, tokens, self._shown)
        ]
        self._states += states
        masks = torch.stack([mask for _, mask in states])
        scores = scores.clone()
        self._xgrammar.apply_token_bitmask_inplace(scores, masks.to(scores.device))
        return scores

    def _advance(self, matcher, mask: Tensor, token: int | None):
        if matcher is None or matcher.is_terminated():
            return matcher, mask
        matcher = matcher.fork()
        if token is not None and not matcher.accept_token(token):
            return None, mask
        if not matcher.is_terminated():
            mask = self._xgrammar.allocate_token_bitmask(1, self._vocab_size)
            matcher.fill_next_token_bitmask(mask, 0)
            mask = mask[0]
        return matcher, mask

    def commit(self, path: Tensor) -> None:
        self._states = [self._states[place] for place in path.tolist()]
        self._started = True
