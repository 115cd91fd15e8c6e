"""The queue: requests enter free rows of one `TreeCache` and leave as their texts end, while the others go on."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..budgeting.live import make_budget
from ..cache import TreeCache
from ..fork import DEFAULT_SPARE
from ..generation import Drafting, TreeStats, decode_rows, draft_depth
from ..modeling import device_of
from ..outputs import Recorder
from ..prefill import DEFAULT_CHUNK_SIZE, prefill
from ..ranks import ranks_of
from ..rounds import Rounds
from ..stopping import end_tokens
from .requests import Request
from .rows import Judgement, RowSelector, RowTexts, row_verifier


class RequestQueue:
    """Requests that go through the rows of one cache.

    A request's prompt is read into a free row; state is keyed by absolute position, so a row that was rewound to 0 is a
    new one. Identical prompts are read once: the others are copies, and as long as some of them wait, one row more is
    kept as their template.

    Args:
        model: the target, enabled.
        requests: in order.
        rows: texts at a time, the template included.
        report: takes every finished request.
        aborted: ids of requests that are to stop, looked at after every round.
        keep: fields of [`Selection`] beside the tokens.
        batch_tokens: tokens of a prefill forward, at most; `None` is 512 per row.
        stats: counts.
        timestamps: whether the time of every token is noted.
        share: whether identical prompts are read once.
    """

    def __init__(
        self,
        model,
        requests: Sequence[Request],
        rows: int,
        report: Callable[[Request], None],
        aborted: Collection[str] = frozenset(),
        keep: frozenset[str] = frozenset(),
        batch_tokens: int | None = None,
        stats: TreeStats | None = None,
        timestamps: bool = False,
        share: bool = True,
    ) -> None:
        drafting = requests[0].prompt.drafting
        self.model, self.drafting, self.report, self.aborted, self.keep = model, drafting, report, aborted, keep
        self.batch_tokens, self.timestamps, self.share = batch_tokens, timestamps, share
        self.stats = TreeStats() if stats is None else stats
        self.ranks = ranks_of(model)
        self.queue = deque(by_prompt(requests) if share else requests)
        texts = [request.prompt.tokens for request in self.queue]
        self.depth, spare = shape(drafting)
        copies = share and rows > 1 and len(set(texts)) < len(texts)
        self.places = min(rows - copies, len(requests))
        # Behind the places of requests: a prompt of which further copies wait.
        self.template = self.places if copies else None
        self.template_tokens: tuple[int, ...] | None = None
        total = self.places + copies
        device = device_of(model)
        capacity = max(request.prompt.length for request in requests) + self.depth + 1
        self.cache = TreeCache(model.config, total, spare, device, drafting.head_layers, capacity=capacity)
        self.cache.configure(drafting.tree_config)
        self.cache.set_head(model.config, drafting.head)
        self.texts = RowTexts(total, max(request.prompt.limit for request in requests), device)
        self.seeds = torch.zeros(total, dtype=torch.long, device=device)
        self.roots = torch.zeros_like(self.seeds)
        self.recorder = Recorder(self.texts, keep)
        self.selector = RowSelector()
        self.active: dict[int, Request] = {}
        self._judgements: dict[int, Judgement] = {}
        self._known: dict = {}
        ends = [end_tokens(request.prompt.criteria, device) for request in requests]
        ends = [end for end in ends if end is not None]
        self.generator = drafting.generator(self.cache, torch.cat(ends).unique() if ends else None)
        if any(request.prompt.config.do_sample for request in requests):
            self.generator.noise = self.selector.noise

    def run(self) -> None:
        """Decodes everything."""
        with self.cache.claimed(self.model), self.generator.attached():
            roots = self._admit()
            if self.active:
                drafting, config = self.drafting, self.drafting.tree_config
                rounds = Rounds(self.model, self.cache, config, self.depth, self.cache.capacity, self.generator.taps)
                budget = make_budget(self.model, config, self.generator, drafting.assistant_model, drafting.head)
                decode_rows(
                    self.model,
                    self.cache,
                    self.texts,
                    roots,
                    self.generator,
                    self.depth,
                    row_verifier(self.selector),
                    self.stats,
                    self.recorder,
                    rounds=rounds,
                    budget=budget,
                    refill=self._refill,
                )

    def _judge(self, request: Request) -> Judgement:
        return request.judged(self.texts, self.seeds, self.cache, self.keep, self._known)

    def _refill(self, roots: torch.Tensor) -> torch.Tensor:
        """After a round: finished and aborted requests leave, others enter. Takes and gives the live rows' roots."""
        texts = self.texts
        if self.timestamps:
            now = time.perf_counter()
            for row, request in self.active.items():
                request.timestamps += [now] * (texts.written[row] - len(request.timestamps))
        live = set(texts.live_rows)
        flags = self._are_aborted([self.active[row] for row in texts.live_rows])
        stopped = [row for row, flag in zip(texts.live_rows, flags) if flag]
        if len(live) == len(self.active) and not stopped:
            return roots
        self.roots[texts.live] = roots
        texts.drop(stopped)
        for row in [row for row in self.active if row not in live] + stopped:
            self._finish(row, "aborted" if row in stopped else None)
        return self._admit()

    def _are_aborted(self, requests: list[Request]) -> list[bool]:
        flags = [request.output.request_id in self.aborted for request in requests]
        return flags if self.ranks is None else self.ranks.agree_on_flags(flags, self.seeds.device)

    def _finish(self, row: int, error: str | None) -> None:
        request, count = self.active.pop(row), self.texts.written[row]
        output = request.output
        output.generated_tokens = self.texts.output[row, :count].tolist()
        if "processed_logprobs" in self.keep:
            output.logprobs = self.recorder.fields()["processed_logprobs"][row, :count].tolist()
        finish(request, self.report, error)

    def _admit(self) -> torch.Tensor:
        """Fills the free rows; gives the live rows' roots."""
        free = [row for row in range(self.places) if row not in self.active]
        waiting = list(self.queue)
        stopped = [request for request, flag in zip(waiting, self._are_aborted(waiting)) if flag]
        for request in stopped:
            self.queue.remove(request)
            finish(request, self.report, "aborted")
        entering = {row: self.queue.popleft() for row in free[: len(self.queue)]}
        if entering:
            with self.stats.timed("prefill"):
                self._read(entering)
            rows = torch.tensor(list(entering), device=self.seeds.device)
            self.seeds[rows] = self.seeds.new_tensor([request.seed for request in entering.values()])
            self.roots[rows] = self.roots.new_tensor([request.prompt.tokens[-1] for request in entering.values()])
            self.texts.enter({row: request.prompt.limit for row, request in entering.items()})
            self.active.update(entering)
            for row, request in entering.items():
                self._judgements[row] = self._judge(request)
                request.output.status = RequestStatus.DECODING
                request.output.lifespan = (time.perf_counter(), -1)
        self.selector.assign(self._judgements, self.texts.live, self.texts.live_rows)
        return self.roots[self.texts.live]

    def _read(self, entering: dict[int, Request]) -> None:
        """Brings the prompts into their rows, all but the last token of each."""
        first: dict[tuple[int, ...], int] = {}
        readers: dict[int, tuple[int, ...]] = {}
        copies: list[tuple[int, int]] = []
        for row, request in entering.items():
            tokens = request.prompt.tokens
            known = tokens == self.template_tokens
            source = self.template if known else first.setdefault(tokens, row) if self.share else row
            if source == row:
                readers[row] = tokens
            else:
                copies.append((source, row))
        last = request.prompt.tokens
        if self.template is not None and self.queue and self.queue[0].prompt.tokens == last != self.template_tokens:
            copies.append((first[last], self.template))
            self.template_tokens = last
        device, total = self.seeds.device, len(self.seeds)
        rows = torch.tensor(list(entering), device=device)
        self.cache.rewind(self.cache.lengths.index_fill(0, rows, 0))
        self.generator.restart(rows)
        if readers:
            lengths = [0] * total
            table = torch.zeros(total, max(map(len, readers.values())), dtype=torch.long)
            for row, tokens in readers.items():
                table[row, : len(tokens)] = torch.tensor(tokens)
                lengths[row] = len(tokens) - 1
            table, read = table.to(device), torch.tensor(lengths, device=device)
            prefill(self.model, self.cache, table, read, self._chunk_size(len(readers)), self.generator)
            self.generator.begin(table, read)
        if copies:
            sources, targets = torch.tensor(copies, device=device).unbind(1)
            self.cache.copy_rows(sources, targets)
            self.generator.copy_rows(sources, targets)

    def _chunk_size(self, rows: int) -> int | None:
        if self.batch_tokens is None:
            return self.drafting.chunk_size
        return min(self.drafting.chunk_size or DEFAULT_CHUNK_SIZE, max(1, self.batch_tokens // rows))


def shape(drafting: Drafting) -> tuple[int, int]:
    """Drafted levels, and spare slots of the rings."""
    depth = draft_depth(drafting.tree_config, drafting.head)
    return depth, max(DEFAULT_SPARE, depth + 1)


def by_prompt(requests: Sequence[Request]) -> list[Request]:
    """In order, identical prompts moved up to the first of them."""
    groups: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        groups.setdefault(request.prompt.tokens, []).append(request)
    return [request for group in groups.values() for request in group]


def finish(request: Request, report: Callable[[Request], None], error: str | None = None) -> None:
    """Ends a request, with an error or without, and reports it."""
    output: GenerationOutput = request.output
    output.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
    output.error = error
    start = output.lifespan[0] if output.lifespan[0] >= 0 else time.perf_counter()
    output.lifespan = (start, time.perf_counter())
    report(request)
