"""The `cost` controller: the most expected tokens per second, by a cost table."""

import math

import numpy as np

from .controllers import Choice, Level, sizes_up_to
from .costs import RoundCosts


# What is assumed of a node's best children before any was drafted: optimistic, so that levels are tried.
_PRIOR = (0.8, 0.1, 0.05)
# What that counts, in expanded nodes; and what a round's observations still count after the next one.
_PRIOR_WEIGHT, _MEMORY = 0.5, 0.9
# What a round still counts in the running rate after the next one.
_RATE_MEMORY = 0.95
# Exponents that estimates may be corrected by, and what the prior for 1 counts: so many candidates with a chance of a half.
_EXPONENTS = np.linspace(0.3, 1.8, 16)
_HALVES = 2.0
# Nodes of a level that are looked at for the next one.
_FRONTIER = 8
# Rounds without a draft before one is drafted again, and what such a look may cost, as a share of the rounds before it.
_FIRST_WAIT, _LONGEST_WAIT, _LOOK_SHARE = 8, 512, 0.02
# Sizes of trees over a whole batch that are compared per width.
_TOTALS = 64


class CostController:
    """Takes the trees with the largest (1 + sum of path probabilities) / (T_draft + T_verify).

    Drafters calibrate each candidate for itself, slowly. What all that were verified promise together and how many of
    them are accepted tells sooner how far estimates are off on this text: they are raised to the power that makes up
    for it, which leaves their order as it is.

    Candidates are sorted by that path probability, and the best prefix is found among all widths: costs are
    staircases, so the first maximum need not be the best one. In a batch one budget is shared by the rows: where padding
    costs less than nodes do, the candidates of all rows are sorted together and nodes go where they pay most. Another
    level is drafted while some depth below, with the acceptance that levels lately had, promises a better rate than
    stopping. Where none does at the root, and rounds with a draft lately were no better than plain ones, nothing is
    drafted; that is looked at again after more and more rounds.

    Args:
        costs: of this model, drafter and machine.
        budget: nodes per row at most.
        width: candidates per expanded node (`top_k`).
    """

    reads_entropy = False

    def __init__(self, costs: RoundCosts, budget: int, width: int) -> None:
        self.costs, self.budget, self.width = costs, budget, width
        self.sizes = sizes_up_to(budget)
        self._prior = [_PRIOR[rank] if rank < len(_PRIOR) else _PRIOR[-1] / (1 + rank) for rank in range(width)]
        # Path probability of expanded nodes by level, and of their children by level and rank.
        self._above, self._below = np.zeros(0), np.zeros((0, width))
        self._curves: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._steps: dict[int, np.ndarray] = {}
        self._waited, self._wait = 0, _FIRST_WAIT
        # Tokens per row and seconds of the last rounds with a draft.
        self._emitted = self._spent = 0.0
        # Drafts accepted, and what was expected by each exponent.
        self._accepted, self._promised = 0.5 * _HALVES, _HALVES * 0.5**_EXPONENTS
        self._exponent, self._chosen = 1.0, None

    def plan(self, batch: int, context: int, depth: int) -> int:
        self._batch, self._depth, self._level, self._chosen = batch, depth, 0, None
        if depth == 0 or self.budget == 1:
            return 0
        if len(self._above) < depth:
            missing = depth - len(self._above)
            self._above = np.pad(self._above, (0, missing))
            self._below = np.pad(self._below, ((0, missing), (0, 0)))
        self._verify, self._seconds = self._costs(batch, context, depth)
        self._chances, self._children = self._expected(depth)
        # The mean row's candidates, level by level, negative: the best come first when sorted. The root is certain.
        self._pool, self._frontier = [np.full(self.budget, 0.0)], np.ones(1)
        self._pool[0][0] = -1.0
        # What rounds with a draft came to counts more than the mean candidate: unsure ones end early, sure ones go on.
        if self.deeper() or self._emitted * self._verify[0] > self._spent:
            return depth
        self._waited += 1
        look = (self._seconds[1, 0] - self._seconds[0, 0]) / (_LOOK_SHARE * self._verify[0])
        if self._waited < max(self._wait, look):
            return 0
        self._waited, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return depth

    def _costs(self, batch: int, context: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to verify each of `sizes`, and of a round with 0 .. `depth` levels and each of them; looked up anew
        every eighth of a doubling of the context only."""
        octave = int(8 * math.log2(context + 1))
        if (batch, octave, depth) not in self._curves:
            verify = self.costs.verify(self.sizes, batch, context)
            draft = self.costs.draft(np.arange(depth + 1), self.width, batch)
            self._curves[batch, octave, depth] = verify, draft[:, None] + verify
        return self._curves[batch, octave, depth]

    def _expected(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """The chance to get from the root along best children to each depth `[depth]`, and from there to each of the
        children, by rank, `[depth, k]`. What a level lacks, the one above it says."""
        chances, children, chance, expected = [], [], 1.0, self._prior
        for above, below in zip(self._above[:depth].tolist(), self._below[:depth].tolist()):
            weight = above + _PRIOR_WEIGHT
            expected = [(seen + _PRIOR_WEIGHT * prior) / weight for seen, prior in zip(below, expected)]
            chances.append(chance)
            children.append([chance * share for share in expected])
            chance *= expected[0]
        return np.array(chances), np.array(children)

    def add(self, level: Level) -> None:
        probabilities, batch = level.probabilities**self._exponent, self._batch
        self._above[self._level] += (level.above**self._exponent * (probabilities[..., 0] > 0)).sum() / batch
        self._below[self._level, : probabilities.shape[-1]] += probabilities.sum((0, 1)) / batch
        self._level += 1
        best = np.sort(-probabilities.reshape(len(probabilities), -1), 1)[:, : self.budget - 1]
        # A batch is looked at as its mean row.
        mean = best[0] if batch == 1 else best.sum(0) / batch
        self._pool.append(mean)
        self._frontier = -mean[: min(self.width, _FRONTIER)]

    def deeper(self) -> bool:
        level, levels = self._level, self._depth - self._level
        if levels == 0:
            return False
        # What the levels below may add: best children of best children, and all children of the last.
        below = np.multiply.outer(self._children[level:], self._frontier / -self._chances[level]).reshape(levels, -1)
        pool = np.concatenate(self._pool)
        # Row j: the pool after j more levels.
        table = np.empty((levels + 1, len(pool) + below.size))
        table[:, : len(pool)] = pool
        np.multiply(self._drafted(levels), below, out=table[:, len(pool) :].reshape(levels + 1, *below.shape))
        table.sort(1)
        rates = self._tokens(table) / self._seconds[level:]
        # Where drafting is free, it goes on: what it shows cannot be worse.
        return bool(rates[1:].max() >= rates[0].max())

    def _drafted(self, levels: int) -> np.ndarray:
        """Which levels are there after 0 .. `levels` more, `[levels + 1, levels, 1]`."""
        if levels not in self._steps:
            self._steps[levels] = np.tri(levels + 1, levels, -1)[..., None]
        return self._steps[levels]

    def _tokens(self, best: np.ndarray) -> np.ndarray:
        """Expected tokens with each of `sizes`, given negative path probabilities, the root's and the best first."""
        return -best[..., : self.budget].cumsum(-1)[..., self.sizes - 1]

    def choose(self, probabilities: np.ndarray) -> Choice:
        batch = len(probabilities)
        best = np.zeros((batch, max(self.budget, probabilities.shape[1] + 1)))
        best[:, 0] = -1.0
        best[:, 1 : probabilities.shape[1] + 1] = -(probabilities**self._exponent)
        best.sort(1)
        best = best[:, : self.budget]
        if batch == 1 or self.costs.padding >= 1:
            tokens, seconds = self._tokens(best).sum(0) / batch, self._seconds[self._level]
            place = int((tokens / seconds).argmax())
            columns = int(self.sizes[place])
            nodes = np.minimum((best < 0).sum(1), columns)
            spent = seconds[place]
        else:
            columns, nodes, spent = self._share(-best[:, 1:], self._seconds[self._level, 0] - self._verify[0])
        taken = -best[:, 1:][np.arange(1, best.shape[1]) < nodes[:, None]]
        self._chosen = taken ** (1 / self._exponent), spent
        if columns > 1:
            self._wait = _FIRST_WAIT
        return Choice(nodes, columns)

    def _share(self, best: np.ndarray, draft: float) -> tuple[int, np.ndarray, float]:
        """Width, nodes and seconds where padding is cheap: the best candidates of the whole batch, however many a row has."""
        batch, count = best.shape
        order = (-best).ravel().argsort(kind="stable")
        rank = order % count
        fits = rank < self.sizes[:, None] - 1  # [sizes, B C]
        taken = np.pad(fits.cumsum(1), ((0, 0), (1, 0)))
        tokens = np.pad((fits * best.ravel()[order]).cumsum(1), ((0, 0), (1, 0)))
        useful = int((best > 0).sum())
        prefix = np.unique(np.linspace(0, useful, _TOTALS).round().astype(int))
        taken, tokens = taken[:, prefix], tokens[:, prefix]
        real = np.interp(1 + taken / batch, self.sizes, self._verify)
        seconds = draft + real + self.costs.padding * (self._verify[:, None] - real)
        tokens = 1 + tokens / batch
        width, end = divmod(int((tokens / seconds).argmax()), len(prefix))
        chosen = order[: prefix[end]][fits[width, : prefix[end]]]
        nodes = 1 + np.bincount(chosen // count, minlength=batch)
        # No wider than the longest row needs.
        columns = int(self.sizes[np.searchsorted(self.sizes, nodes.max())])
        return columns, nodes, seconds[width, end]

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        # Rounds without a draft show nothing, and forget nothing.
        if self._level:
            self._above *= _MEMORY
            self._below *= _MEMORY
        if self._chosen is None:
            return
        taken, spent = self._chosen
        self._emitted = _RATE_MEMORY * self._emitted + sum(emitted) / len(emitted)
        self._spent = _RATE_MEMORY * self._spent + spent
        # The prior is not forgotten.
        self._accepted += (1 - _RATE_MEMORY) * (0.5 * _HALVES - self._accepted) + sum(emitted) - len(emitted)
        self._promised += (1 - _RATE_MEMORY) * (_HALVES * 0.5**_EXPONENTS - self._promised)
        self._promised += (taken ** _EXPONENTS[:, None]).sum(1)
        # Larger exponents promise less.
        self._exponent = float(np.interp(-self._accepted, -self._promised, _EXPONENTS))
