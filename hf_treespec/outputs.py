"""What a call hands out beside its tokens, while it decodes and at its end: streams, scores, log-probabilities."""

from contextlib import contextmanager

import torch
from torch import Tensor

from .texts import Texts
from .verifying import Verdict


class Recorder:
    """Keeps what was chosen at accepted nodes.

    Args:
        texts: of the call.
        keep: fields of [`Selection`]; `logprobs` and `processed_logprobs` cost one number per token, `logits` and
            `scores` one per token and vocabulary entry.
    """

    def __init__(self, texts: Texts, keep: frozenset[str]) -> None:
        self.texts = texts
        numbers = sorted(keep & {"logprobs", "processed_logprobs"})
        self._numbers = {name: torch.zeros_like(texts.output, dtype=torch.float32) for name in numbers}
        self._steps: dict[str, list[Tensor]] = {name: [] for name in sorted(keep & {"logits", "scores"})}

    def add(self, verdict: Verdict) -> None:
        """Takes in a round, before its tokens are written."""
        if not self._numbers and not self._steps:
            return
        texts, nodes = self.texts, verdict.path.clamp(min=0)
        columns = texts.columns(verdict.accepted, nodes.shape[1])  # [B, S + 1]
        for name, table in self._numbers.items():
            table[texts.live[:, None], columns] = getattr(verdict.selection, name).gather(1, nodes)
        for name, steps in self._steps.items():
            self._add_vocabularies(steps, getattr(verdict.selection, name), nodes, columns)

    def _add_vocabularies(self, steps: list[Tensor], values: Tensor, nodes: Tensor, columns: Tensor) -> None:
        entry, depth = (columns < self.texts.limit).nonzero(as_tuple=True)
        values, columns = values[entry, nodes[entry, depth]], columns[entry, depth]  # [M, V], [M]
        for column in columns.unique().tolist():
            while len(steps) <= column:
                steps.append(values.new_zeros(len(self.texts.output), values.shape[-1]))
            here = columns == column
            steps[column][self.texts.live[entry[here]]] = values[here]

    def fields(self) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """By name: `[R, new tokens]`, and a tuple of `[R, V]` per new token; 0 behind a row's end."""
        numbers = {name: table[:, : self.texts.complete] for name, table in self._numbers.items()}
        return numbers | {name: tuple(steps) for name, steps in self._steps.items()}


class Stream:
    """Hands finished columns to a streamer of transformers, one token per row and call as plain decoding does."""

    def __init__(self, streamer, texts: Texts) -> None:
        self.streamer = streamer
        self.texts = texts
        self._sent = 0

    def send(self) -> None:
        """Sends the columns in which nothing will change any more and that were not sent yet."""
        if self.streamer is None or self.texts.complete == self._sent:
            return
        for tokens in self.texts.output[:, self._sent : self.texts.complete].cpu().unbind(1):
            self.streamer.put(tokens)
        self._sent = self.texts.complete


@contextmanager
def ended(streamer):
    """Calls the streamer's `end` whatever happens: who reads it in another thread must not wait for ever."""
    try:
        yield
    finally:
        # What is no streamer is refused in between.
        if hasattr(streamer, "end"):
            streamer.end()
