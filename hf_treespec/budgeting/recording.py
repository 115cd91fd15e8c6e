"""`record_rounds`: keeps the candidates of every round, and tells at the end which of them the text went along."""

from typing import Any

import torch
from torch import Tensor

from ..drafting.candidates import Candidates
from .rounds import RoundRecords


class RoundRecorder:
    """Collects rounds on their device; nothing is read before the end.

    Args:
        metadata: of the records.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self._rounds: list[tuple[Candidates | None, Tensor, Tensor, Tensor]] = []

    def add(self, candidates: Candidates | None, rows: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Takes in a round of `rows` `[B]`, which had emitted `counts` tokens and committed `lengths`, `[B]` each."""
        self._rounds.append((candidates, rows, counts, lengths))

    def finish(self, output: Tensor, written: Tensor) -> RoundRecords:
        """The records, given what the rows emitted: `output` `[R, T]`, of which the first `written` `[R]` are real."""
        output, written = output.cpu(), written.cpu()
        rounds = [self._finish(*parts, output, written) for parts in self._rounds]
        return RoundRecords.concatenate(rounds, renumber=False)

    def _finish(self, candidates, rows: Tensor, counts: Tensor, lengths: Tensor, output: Tensor, written: Tensor):
        batch, depths, entropies, confidences = len(rows), torch.zeros(1, dtype=torch.long), [], []
        parents = torch.zeros(batch, 1, dtype=torch.long)
        tokens, probabilities = parents, torch.ones(batch, 1)
        rows, counts, lengths = (tensor.cpu() for tensor in (rows, counts, lengths))
        if candidates is not None:
            tokens, parents, depths = candidates.tokens.cpu(), candidates.parents.cpu(), candidates.depths
            probabilities = candidates.scores.exp().cpu()
            entropies, confidences = candidates.entropies, candidates.confidences
            self.metadata.setdefault("top_k", candidates.top_k)
        column = counts[:, None] + depths - 1
        text = output[rows].gather(1, column.clamp(0, output.shape[1] - 1))
        accepted = (tokens == text) & (column < written[rows][:, None]) & (probabilities > 0)
        accepted[:, 0] = True
        for _ in range(int(depths.max())):
            accepted = accepted & accepted.gather(1, parents)
        return RoundRecords(
            texts=rows,
            positions=counts,
            contexts=lengths,
            batches=torch.full_like(rows, batch),
            parents=parents,
            depths=depths.expand(batch, -1),
            probabilities=probabilities,
            accepted=accepted,
            entropies=_columns(entropies, batch),
            confidences=_columns(confidences, batch),
            metadata=self.metadata,
        )


def _columns(parts: list[Tensor], count: int) -> Tensor:
    return torch.stack(parts, 1).cpu() if parts else torch.zeros(count, 0)
