"""The `cost` controller: the most expected tokens per second, by a cost table."""

import math
from itertools import accumulate, chain
from operator import add, itemgetter, truediv

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
_STEP, _STEPS = 0.1, 18
_EXPONENTS = _STEP * np.arange(3, _STEPS + 1)
_HALVES = 2.0
_PROMISED = _HALVES * 0.5**_EXPONENTS
# Nodes of a level that are looked at for the next one.
_FRONTIER = 8
# Rounds without a draft before one is drafted again, and what such a look may cost, as a share of the rounds before it.
_FIRST_WAIT, _LONGEST_WAIT, _LOOK_SHARE = 8, 512, 0.02
# Sizes of trees over a whole batch that are compared per width, as shares of the largest.
_TOTALS = np.linspace(0.0, 1.0, 64)


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
        self._at_sizes = itemgetter(*(self.sizes - 1).tolist())
        self._prior = [_PRIOR[rank] if rank < len(_PRIOR) else _PRIOR[-1] / (1 + rank) for rank in range(width)]
        # Path probability of expanded nodes by level, and of their children by level and rank.
        self._above: list[float] = []
        self._below: list[list[float]] = []
        self._curves: dict[tuple[int, int, int], tuple[np.ndarray, list[list[float]]]] = {}
        self._waited, self._wait = 0, _FIRST_WAIT
        # Tokens per row and seconds of the last rounds with a draft.
        self._emitted = self._spent = 0.0
        # Drafts accepted, and what was expected by each exponent.
        self._accepted, self._promised = _HALVES / 2, _PROMISED.copy()
        self._exponent, self._chosen = 1.0, None

    def plan(self, batch: int, context: int, depth: int) -> int:
        self._batch, self._depth, self._level, self._chosen = batch, depth, 0, None
        if depth == 0 or self.budget == 1:
            return 0
        missing = depth - len(self._above)
        self._above += [0.0] * missing
        self._below += [[0.0] * self.width for _ in range(missing)]
        self._verify, self._seconds = self._costs(batch, context, depth)
        self._chances, self._children = self._expected(depth)
        # The best candidates of the mean row, and those that may be expanded next. The root is certain.
        self._pool, self._frontier = [0.0] * (self.budget - 1), [1.0]
        # What rounds with a draft came to counts more than the mean candidate: unsure ones end early, sure ones go on.
        if self.deeper() or self._emitted * self._verify[0] > self._spent:
            return depth
        self._waited += 1
        # A drafter first reads what was committed without it, which no table holds: that is taken for the other levels.
        look = (self._seconds[depth][0] - self._seconds[0][0]) / (_LOOK_SHARE * self._verify[0])
        if self._waited < max(self._wait, look):
            return 0
        self._waited, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return depth

    def _costs(self, batch: int, context: int, depth: int) -> tuple[np.ndarray, list[list[float]]]:
        """Seconds to verify each of `sizes`, and of a round with 0 .. `depth` levels and each of them; looked up anew
        every eighth of a doubling of the context only."""
        octave = int(8 * math.log2(context + 1))
        if (batch, octave, depth) not in self._curves:
            verify = self.costs.verify(self.sizes, batch, context)
            draft = self.costs.draft(np.arange(depth + 1), self.width, batch)
            self._curves[batch, octave, depth] = verify, (draft[:, None] + verify).tolist()
        return self._curves[batch, octave, depth]

    def _expected(self, depth: int) -> tuple[list[float], list[list[float]]]:
        """The chance to get from the root along best children to each depth, and from there to each of the children, by
        rank. What a level lacks, the one above it says."""
        chances, children, chance, expected = [], [], 1.0, self._prior
        for above, below in zip(self._above[:depth], self._below):
            weight = above + _PRIOR_WEIGHT
            expected = [(seen + _PRIOR_WEIGHT * prior) / weight for seen, prior in zip(below, expected)]
            chances.append(chance)
            children.append([chance * share for share in expected])
            chance *= expected[0]
        return chances, children

    def add(self, level: Level) -> None:
        above, children, candidates = self._mean_row(level)
        self._above[self._level] += above
        below = self._below[self._level]
        below[: len(children)] = map(add, below, children)
        self._level += 1
        self._frontier = sorted(candidates, reverse=True)[: min(self.width, _FRONTIER)]
        self._pool = self._best([*self._pool, *candidates])

    def _mean_row(self, level: Level) -> tuple[float, list[float], list[float]]:
        """A level of a batch is looked at as its mean row: the corrected path probability of what was expanded, that of
        the children by rank, and that of every candidate."""
        probabilities, above = level.probabilities**self._exponent, level.above**self._exponent
        if len(above) == 1:
            # So few numbers that each array operation would cost more than all of them.
            rows = probabilities[0].tolist()
            expanded = (chance for chance, row in zip(above[0].tolist(), rows) if row[0] > 0)
            return sum(expanded), [*map(sum, zip(*rows))], [*chain.from_iterable(rows)]
        batch = len(above)
        best = np.sort(probabilities.reshape(batch, -1), 1)
        mean = [(above * (probabilities[..., 0] > 0)).sum(), probabilities.sum((0, 1)), best.sum(0)]
        return tuple((total / batch).tolist() for total in mean)

    def _best(self, pool: list[float]) -> list[float]:
        """As many candidates as can be taken."""
        return sorted(pool, reverse=True)[: self.budget - 1]

    def deeper(self) -> bool:
        if self._level == self._depth:
            return False
        pool, stopping = self._pool, max(self._rates(self._pool, self._level))
        # What the levels below may add: best children of best children, and all children of the last.
        shares = [chance / self._chances[self._level] for chance in self._frontier]
        for level in range(self._level, self._depth):
            pool = self._best([*pool, *(child * share for child in self._children[level] for share in shares)])
            # Where drafting is free, it goes on: what it shows cannot be worse.
            if max(self._rates(pool, level + 1)) >= stopping:
                return True
        return False

    def _rates(self, pool: list[float], levels: int) -> list[float]:
        """Expected tokens per second with each of `sizes`, given path probabilities, the best first, and the levels."""
        return [*map(truediv, self._at_sizes([*accumulate(pool, initial=1.0)]), self._seconds[levels])]

    def choose(self, probabilities: np.ndarray) -> Choice:
        batch = len(probabilities)
        best = np.sort(probabilities, 1)[:, : -self.budget : -1]
        expected = best**self._exponent
        if batch == 1 or self.costs.padding >= 1:
            mean = (expected[0] if batch == 1 else expected.sum(0) / batch).tolist()
            rates = self._rates(mean + [0.0] * (self.budget - 1 - len(mean)), self._level)
            place = rates.index(max(rates))
            columns, spent = int(self.sizes[place]), self._seconds[self._level][place]
            taken = best[:, : columns - 1]
            nodes = 1 + (taken > 0).sum(1)
        else:
            columns, nodes, spent = self._share(expected, self._seconds[self._level][0] - self._verify[0])
            taken = best[np.arange(1, 1 + best.shape[1]) < nodes[:, None]]
        self._chosen = taken.ravel(), spent
        if columns > 1:
            self._wait = _FIRST_WAIT
        return Choice(nodes, columns)

    def _share(self, best: np.ndarray, draft: float) -> tuple[int, np.ndarray, float]:
        """Width, nodes and seconds where padding is cheap: the best candidates of the whole batch, however many a row has."""
        batch, count = best.shape
        order, useful = (-best).ravel().argsort(kind="stable"), np.count_nonzero(best)
        prefix = (_TOTALS * useful).round().astype(int)
        # Every candidate counts from its rank in its row on, and from the first prefix on that it is in.
        rank, added = order % count, np.repeat(np.arange(1, len(prefix)), np.diff(prefix))
        cells, found = rank[:useful] * len(prefix) + added, np.zeros((2, count + 1, len(prefix)))
        for part, weights in zip(found, (None, best.ravel()[order[:useful]])):
            part[1:] = np.bincount(cells, weights, count * len(prefix)).reshape(count, -1)
        # [sizes, prefixes] each
        nodes, tokens = 1 + found.cumsum(1).cumsum(2)[:, np.minimum(self.sizes - 1, count)] / batch
        real = np.interp(nodes, self.sizes, self._verify)
        seconds = draft + real + self.costs.padding * (self._verify[:, None] - real)
        width, end = divmod(int((tokens / seconds).argmax()), len(prefix))
        chosen = order[: prefix[end]][rank[: prefix[end]] < self.sizes[width] - 1]
        nodes = 1 + np.bincount(chosen // count, minlength=batch)
        # No wider than the longest row needs.
        columns = int(self.sizes[np.searchsorted(self.sizes, nodes.max())])
        return columns, nodes, float(seconds[width, end])

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        # Rounds without a draft show nothing, and forget nothing.
        if self._level:
            self._above = [_MEMORY * above for above in self._above]
            self._below = [[_MEMORY * seen for seen in below] for below in self._below]
        if self._chosen is None:
            return
        taken, spent = self._chosen
        self._emitted = _RATE_MEMORY * self._emitted + sum(emitted) / len(emitted)
        self._spent = _RATE_MEMORY * self._spent + spent
        # The prior is not forgotten.
        self._accepted += (1 - _RATE_MEMORY) * (_HALVES / 2 - self._accepted) + sum(emitted) - len(emitted)
        self._promised += (1 - _RATE_MEMORY) * (_PROMISED - self._promised) + _powers(taken).sum(1)
        # Larger exponents promise less.
        self._exponent = float(np.interp(-self._accepted, -self._promised, _EXPONENTS))


def _powers(chances: np.ndarray) -> np.ndarray:
    """`chances` `[n]` to the power of each of `_EXPONENTS`, `[E, n]`, by multiplication."""
    return np.broadcast_to(chances.astype(np.float64) ** _STEP, (_STEPS, len(chances))).cumprod(0)[-len(_EXPONENTS) :]
