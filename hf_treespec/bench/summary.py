"""What the runs of a benchmark come to: speeds, accepted lengths and gains, with 95 % bootstrap intervals over turns."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from ..intervals import Interval, bootstrap, median_ratio, ratio_of_sums
from .measure import OBSERVED
from .runs import Run
from .ways import PLAIN, STOCK, Cell, has_controller, parse_shape


@dataclass(frozen=True)
class Summary:
    """One way in one cell.

    Attributes:
        shape: depth, top_k and budget; `None` where nothing is drafted.
        tokens_per_second: of the whole call, prefill included; the median over turns.
        decode_tokens_per_second: without the prefill.
        accepted_length: tokens per round, the bonus token included.
        speed_gains: factors of `tokens_per_second` over `"stock"`, `"budget=1"`, and for what drafts over the
            `"matched chain"` of as many nodes and the `"best chain"`, the same drafter's fastest here; with a controller
            also over `"best fixed"`, the fastest way without one. The best is chosen by what was measured, which favours
            it a little.
        implied_gain: the factor over `budget=1` that the seconds in drafting and verification imply, were the rest of a
            round free; `None` where nothing is drafted.
        step_costs: seconds of drafting and of verification in a round, in verifications of `budget=1`.
        outside_forwards: share of the calls' seconds, behind the prefill, outside the models' forwards; `None` where they
            were not timed.
        length_gain: accepted length over the matched chain's, in %.
        accepted_lengths: how many rounds emitted how many tokens.
        time: milliseconds per token by phase, and of the host around them (`"host"`); on an accelerator of the observed
            turn, whose phases wait for it.
        distinct_experts: per mixture layer and verification.
        peak_bytes: the highest of all turns.
        same_text: share of turns whose texts are those of `budget=1`.
        repeated_share: of tokens inside an 8-gram which their text held before.
    """

    cell: Cell
    drafter: str
    way: str
    shape: tuple[int, int, int] | None
    tokens_per_second: float
    decode_tokens_per_second: float
    accepted_length: Interval
    speed_gains: dict[str, Interval]
    implied_gain: float | None
    step_costs: dict[str, float]
    outside_forwards: float | None
    length_gain: Interval | None
    accepted_lengths: dict[int, int]
    time: dict[str, float]
    distinct_experts: float | None
    peak_bytes: int
    same_text: float
    repeated_share: float

    @property
    def round_overhead(self) -> float | None:
        """Share of the calls' time, behind the prefill, in neither drafting nor verification."""
        if not self.time:
            return None
        return 1 - (self.time["draft"] + self.time["verify"]) / sum(self.time.values())

    @property
    def is_chain(self) -> bool:
        return self.shape is not None and self.shape[1] == 1

    @property
    def is_tree(self) -> bool:
        return self.shape is not None and self.shape[1] > 1


def pool_sets(runs: list[Run]) -> list[Run]:
    """The runs as if all sets were one; its turns are those of all of them."""
    sets = {name: place for place, name in enumerate(dict.fromkeys(run.prompt_set for run in runs))}
    return [
        replace(run, prompt_set=", ".join(sets), repetition=len(sets) * run.repetition + sets[run.prompt_set])
        if run.repetition != OBSERVED
        else replace(run, prompt_set=", ".join(sets), repetition=-1 - sets[run.prompt_set])
        for run in runs
    ]


def summarize(runs: list[Run]) -> list[Summary]:
    """A summary per cell and way, in the order of the runs."""
    cells: dict[Cell, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        cells.setdefault(run.cell, {}).setdefault(run.key, []).append(run)
    return [_summarize(cell, ways, key) for cell, ways in cells.items() for key in ways]


def _summarize(cell: Cell, ways: dict[tuple[str, str], list[Run]], key: tuple[str, str]) -> Summary:
    timed = {name: [run for run in runs if run.repetition >= 0] for name, runs in ways.items()}
    own, (drafter, way) = timed[key], key
    bases = (
        {name: ("", name) for name in (STOCK, PLAIN) if ("", name) in timed} | _chains(timed, key) | _fixed(timed, key)
    )
    matched = bases.get("matched chain")
    observed = [run for run in ways[key] if run.repetition < 0]
    phased, plain_phased = (_phased(ways[name]) for name in (key, ("", PLAIN)))
    plain = {run.repetition: run.text for run in ways["", PLAIN]}
    histogram = Counter()
    for run in own:
        histogram.update(run.accepted_lengths)
    return Summary(
        cell,
        drafter,
        way,
        parse_shape(way),
        median(map(_speed, own)),
        median(run.tokens / max(run.seconds - run.prefill_seconds, 1e-9) for run in own),
        ratio_of_sums(_column(own, lambda run: run.tokens), _column(own, lambda run: run.rounds)),
        {
            name: median_ratio([(_speed(one), _speed(other)) for one, other in zip(own, timed[base], strict=True)])
            for name, base in bases.items()
            if base != key
        },
        None if parse_shape(way) is None else _models(plain_phased, "tokens", ("verify",)) / _models(phased, "tokens"),
        {} if way == STOCK else _step_costs(phased, plain_phased),
        _outside_forwards(phased),
        None if matched in (None, key) else _length_gain(own, timed[matched]),
        dict(sorted(histogram.items())),
        _time_per_token(phased),
        fmean(run.distinct_experts for run in observed) if observed[0].distinct_experts is not None else None,
        max(run.peak_bytes for run in ways[key]),
        sum(run.text == plain[run.repetition] for run in ways[key]) / len(ways[key]),
        sum(run.repeated_share * run.tokens for run in own) / sum(run.tokens for run in own),
    )


def _chains(timed: dict[tuple[str, str], list[Run]], key: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """The matched and the fastest chain of the way's drafter."""
    shape = parse_shape(key[1])
    if shape is None:
        return {}
    chains = {other: parse_shape(other[1]) for other in timed if other[0] == key[0]}
    chains = {other: chain for other, chain in chains.items() if chain[1] == 1}
    equal = [other for other, chain in chains.items() if chain[2] == shape[2]]
    found = {"matched chain": max(equal, key=lambda other: chains[other][0])} if equal else {}
    best = max(chains, key=lambda other: median(map(_speed, timed[other])), default=None)
    return found | ({"best chain": best} if best else {})


def _fixed(timed: dict[tuple[str, str], list[Run]], key: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """The fastest way without a controller, for one that has one."""
    fixed = [other for other in timed if other[0] in ("", key[0]) and not has_controller(other[1])]
    fixed = [other for other in fixed if other[1] != STOCK]
    best = max(fixed, key=lambda other: median(map(_speed, timed[other])))
    return {"best fixed": best} if has_controller(key[1]) else {}


def _length_gain(own: list[Run], chain: list[Run]) -> Interval:
    counts = [_column(runs, count) for runs in (own, chain) for count in (lambda r: r.tokens, lambda r: r.rounds)]
    tokens, rounds, chain_tokens, chain_rounds = counts

    def gain(index: torch.Tensor) -> torch.Tensor:
        tree, other = (a[index].sum(1) / b[index].sum(1) for a, b in ((tokens, rounds), (chain_tokens, chain_rounds)))
        return 100 * (tree / other - 1)

    return bootstrap(gain, len(own))


def _phased(runs: list[Run]) -> list[Run]:
    """The runs whose phases are known: timed ones, else those observed."""
    return [run for run in runs if run.time and run.repetition >= 0] or [run for run in runs if run.repetition < 0]


def _time_per_token(runs: list[Run]) -> dict[str, float]:
    tokens = sum(run.tokens for run in runs)
    seconds = {phase: sum(run.time.get(phase, 0.0) for run in runs) for phase in runs[0].time}
    seconds |= {"host": _decoding(runs) - sum(seconds.values())} if seconds else {}
    return {phase: 1000 * value / tokens for phase, value in seconds.items()}


def _models(runs: list[Run], unit: str, phases: tuple[str, ...] = ("draft", "verify")) -> float:
    """Seconds of phases per token, or per round."""
    spent = sum(run.time.get(phase, 0.0) for run in runs for phase in phases)
    return spent / sum(getattr(run, unit) for run in runs)


def _step_costs(runs: list[Run], plain: list[Run]) -> dict[str, float]:
    step = _models(plain, "rounds", ("verify",))
    return {phase: _models(runs, "rounds", (phase,)) / step for phase in ("draft", "verify")}


def _outside_forwards(runs: list[Run]) -> float | None:
    if any(run.forward_seconds is None for run in runs):
        return None
    return 1 - sum(run.forward_seconds for run in runs) / _decoding(runs)


def _decoding(runs: list[Run]) -> float:
    return sum(run.seconds - run.prefill_seconds for run in runs)


def _speed(run: Run) -> float:
    return run.tokens / run.seconds


def _column(runs: list[Run], value: Callable[[Run], float]) -> torch.Tensor:
    return torch.tensor([value(run) for run in runs], dtype=torch.double)
