"""`Texts`: what the requests of one call have written; `NodeTexts`: the texts that end in nodes of a draft tree."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .fork import Fork


class Texts:
    """What the requests of a call have written, and which of them still write.

    Args:
        prompts: `[R, P]`, padded on the left as `generate` got them.
        padding: padding columns of each row, `[R]`.
        limit: new tokens at most.
        pad: fills rows behind their end.
    """

    def __init__(self, prompts: Tensor, padding: Tensor, limit: int, pad: int = 0) -> None:
        rows = len(prompts)
        self.prompts = prompts
        self.padding = padding
        self.limit = limit
        # One column more than can be written takes what rows do not emit.
        self.output = torch.full((rows, limit + 1), pad, device=prompts.device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=prompts.device)
        self.live = torch.arange(rows, device=prompts.device)
        # On the host: the rows still decoding, and tokens written per row.
        self.live_rows, self.written = list(range(rows)), [0] * rows

    @property
    def rows(self) -> Tensor | None:
        """The live rows `[B]`, `None` where all are."""
        return None if len(self.live_rows) == len(self.written) else self.live

    @property
    def remaining(self) -> Tensor:
        """Tokens that each live row may still write, `[B]`."""
        return self.limit - self.counts[self.live]

    @property
    def most_remaining(self) -> int:
        """Tokens that the live row with the shortest text may still write."""
        return self.limit - min(self.written[row] for row in self.live_rows)

    @property
    def complete(self) -> int:
        """New columns in which nothing will change any more."""
        return min((self.written[row] for row in self.live_rows), default=max(self.written))

    def columns(self, accepted: Tensor, width: int) -> Tensor:
        """Columns of `output` for `width` tokens of each live row `[B, width]`: what is not accepted goes to the last."""
        column = torch.arange(width, device=accepted.device)
        return torch.where(column < accepted[:, None], self.counts[self.live][:, None] + column, self.limit)

    def append(self, emitted: Tensor, accepted: Tensor) -> None:
        """Writes the first `accepted` `[B]` tokens of `emitted` `[B, S + 1]` behind the live rows."""
        self.output[self.live[:, None], self.columns(accepted, emitted.shape[1])] = emitted
        self.counts = self.counts.index_add(0, self.live, accepted)

    def leave(self, accepted: list[int], finished: list[int]) -> Tensor | None:
        """Counts what each live row wrote, and drops the finished ones.

        Returns:
            Which of the live rows stay, as places among them; `None` where all do.
        """
        for row, count in zip(self.live_rows, accepted):
            self.written[row] += count
        if not any(finished):
            return None
        kept = [place for place, done in enumerate(finished) if not done]
        self.live_rows = [self.live_rows[place] for place in kept]
        kept = torch.tensor(kept, dtype=torch.long, device=self.live.device)
        self.live = self.live[kept]
        return kept

    def sequences(self, columns: int) -> Tensor:
        """All rows with `columns` new columns, `[R, P + columns]`."""
        return torch.cat([self.prompts, self.output[:, :columns]], 1)


class NodeTexts:
    """The unpadded texts that end in given nodes of an open round: M of them, flat.

    Args:
        fork: the open round of the target.
        texts: of the call.
        entries: batch entries of the round, `[b]`.
        nodes: node numbers in each, `[b, m]`; M = b m.
    """

    def __init__(self, fork: Fork, texts: Texts, entries: Tensor, nodes: Tensor) -> None:
        tree = fork.tree
        self.tree = tree
        self.texts = texts
        self.entries = entries[:, None].expand_as(nodes).flatten()  # [M]
        self.nodes = nodes.flatten()
        self.valid = tree.valid[self.entries, self.nodes]
        self.rows = self.entries if fork.rows is None else fork.rows[self.entries]
        self.depths = tree.depths[self.entries, self.nodes]
        self.starts = fork.lengths[self.entries]
        self.committed = fork.cache.token_ids
        # A text is never longer than this; known on the host.
        self.longest = fork.max_length + tree.max_depth + 1
        path = tree.paths[self.entries, self.nodes].clamp(min=0)
        self.path_tokens = tree.tokens[self.entries[:, None], path]  # [M, S + 1]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each text, `[M]`."""
        return self.starts + self.depths + 1

    @cached_property
    def columns(self) -> Tensor:
        """Columns that plain decoding would show for each: its tokens and its row's padding, `[M]`."""
        return self.lengths + self.texts.padding[self.rows]

    def suffix(self, count: int, filler: int = -1) -> Tensor:
        """The last `count` tokens of each text, right-aligned, `[M, count]`; `filler` in front of a shorter one."""
        positions = self.lengths[:, None] - count + torch.arange(count, device=self.nodes.device)
        return torch.where(positions < 0, filler, self._tokens_at(positions, slice(None)))

    def whole(self, filler: int) -> Tensor:
        """All tokens of each text, right-aligned behind `filler`."""
        return self.suffix(self.longest, filler)

    def by_columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Groups of texts with equally many columns, parents before children: `(places among the M, input_ids)`.

        `input_ids` are padded on the left with what `generate` got there, as plain decoding shows them. Padding nodes
        are in no group.
        """
        for columns in self.columns[self.valid].unique().tolist():
            places = (self.valid & (self.columns == columns)).nonzero()[:, 0]
            rows = self.rows[places]
            positions = torch.arange(columns, device=places.device) - self.texts.padding[rows][:, None]
            prompts = self.texts.prompts[rows][:, :columns]
            # Only columns of the prompt can be padding.
            prompts = torch.nn.functional.pad(prompts, (0, columns - prompts.shape[1]))
            yield places, torch.where(positions < 0, prompts, self._tokens_at(positions, places))

    def _tokens_at(self, positions: Tensor, places) -> Tensor:
        """Tokens of the texts `places` at `positions` `[m, k]`, anything where those are negative."""
        depth = positions - self.starts[places][:, None]
        path = self.path_tokens[places].gather(1, depth.clamp(0, self.path_tokens.shape[1] - 1))
        column = positions.clamp(0, self.committed.shape[1] - 1)
        return torch.where(depth >= 0, path, self.committed[self.rows[places][:, None], column])
