"""The runs of `hf-treespec bench`: ways to decode take turns on the same prompts."""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..intervals import synchronize
from ..modeling import device_of, unwrap
from ..prompts import encode_prompts
from .forwards import ForwardTimer
from .memory import peak_memory
from .replay import repeated_share
from .runs import Run, RunLog
from .ways import Cell, Way


# The observed turn; the others are numbered from 0.
OBSERVED = -1
# Enough for kernels to be compiled and workspaces to be made.
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        prompts: texts by the name of their set.
        max_new_tokens: per prompt.
        ignore_eos: whether texts go on to `max_new_tokens`.
        chat: as in [`encode_prompts`].
    """

    prompts: dict[str, list[str]]
    max_new_tokens: int
    ignore_eos: bool = False
    chat: bool | None = None

    def batch(self, cell: Cell, repetition: int) -> list[str]:
        """The prompts of a turn. Sets are gone through in order, from the start again where they end."""
        texts = self.prompts[cell.prompt_set]
        start = max(0, repetition) * cell.batch
        return [texts[(start + row) % len(texts)] for row in range(cell.batch)]


class _Clock(BaseStreamer):
    """When a call of stock `generate` had its first token."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: Tensor) -> None:
        # The prompt, then the first token; later ones are of no interest.
        if len(self.puts) < 2:
            self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass


class Bench:
    """Decodes a workload in several ways.

    Args:
        target: an enabled model.
        tokenizer: the target's.
        ways: the first turn of each cell warms all of them up.
        workload: what is decoded.
    """

    def __init__(self, target, tokenizer, ways: list[Way], workload: Workload) -> None:
        self.target, self.tokenizer, self.ways, self.workload = target, tokenizer, ways, workload
        self._on_cpu = device_of(target).type == "cpu"
        end = None if workload.ignore_eos else target.generation_config.eos_token_id
        # No token has the number `vocab_size`: texts end at `max_new_tokens` alone.
        self.ends = [target.config.vocab_size] if end is None else [end] if isinstance(end, int) else list(end)

    def run(self, cells: list[Cell], pairs: int, log: RunLog, progress: Callable[[Iterable, str], Iterable]) -> None:
        """Measures what `log` does not hold yet: in every cell an observed turn, and `pairs` timed ones.

        Args:
            progress: wraps an iterable of turns; also takes a name.
        """
        log.keep_complete([way.key for way in self.ways])
        turns = [(cell, repetition) for cell in cells for repetition in range(OBSERVED, pairs)]
        warm = None
        for cell, repetition in progress([turn for turn in turns if not log.holds(*turn)], "turns"):
            if cell != warm:
                short = replace(self.workload, max_new_tokens=_WARM_UP_TOKENS)
                for way in self.ways:
                    self._decode(cell, repetition, way, short)
                warm = cell
            log.add([self._decode(cell, repetition, way, self.workload) for way in self.ways])

    def _decode(self, cell: Cell, repetition: int, way: Way, workload: Workload) -> Run:
        inputs = encode_prompts(self.tokenizer, workload.batch(cell, repetition), workload.chat)
        inputs = {name: value.to(device_of(self.target)) for name, value in inputs.items()}
        options = self._options(cell, workload)
        timer = self._timer(way)
        with peak_memory() as peak, timer.attached():
            start = time.perf_counter()
            if way.tree_config is None:
                sequences, stats = self._stock(inputs, options, repetition)
            else:
                sequences, stats = self._ours(inputs, options, cell, repetition, way)
            synchronize()
            seconds = time.perf_counter() - start
        spent = dict(stats["time"])
        prefill = spent.pop("prefill")
        texts = [self._own(row) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist()]
        tokens = sum(map(len, texts))
        return Run(
            cell.prompt_set,
            cell.batch,
            cell.temperature,
            repetition,
            *way.key,
            seconds,
            prefill,
            tokens,
            stats.get("rounds", tokens),
            stats.get("nodes", tokens),
            stats.get("accepted_lengths", {1: tokens}),
            # Only observed turns wait for a device after every phase.
            spent if self._on_cpu or repetition == OBSERVED else {},
            timer.seconds if timer.models else None,
            stats.get("distinct_experts"),
            peak.bytes,
            hashlib.sha256(repr(texts).encode()).hexdigest()[:16],
            repeated_share(texts),
        )

    def _timer(self, way: Way) -> ForwardTimer:
        """Of the models that a way runs."""
        if not self._on_cpu or way.tree_config is None:
            return ForwardTimer()
        models = [] if way.drafter is None else [way.drafter.model, way.drafter.head]
        return ForwardTimer(unwrap(self.target), *(model for model in models if model is not None))

    def _options(self, cell: Cell, workload: Workload) -> dict[str, Any]:
        options = {"max_new_tokens": workload.max_new_tokens, "pad_token_id": self.tokenizer.pad_token_id}
        options |= {"eos_token_id": self.ends, "do_sample": cell.temperature > 0}
        if cell.temperature > 0:
            # The whole distribution: a generation config may cut it.
            options |= {"temperature": cell.temperature, "top_p": 1.0, "top_k": 0}
        return options

    def _stock(self, inputs: dict[str, Tensor], options: dict[str, Any], repetition: int) -> tuple[Tensor, dict]:
        torch.manual_seed(repetition)
        model, clock, start = unwrap(self.target), _Clock(), time.perf_counter()
        sequences = type(model).generate(model, **inputs, **options, streamer=clock)
        return sequences, {"time": {"prefill": clock.puts[1] - start}}

    def _ours(
        self, inputs: dict[str, Tensor], options: dict[str, Any], cell: Cell, repetition: int, way: Way
    ) -> tuple[Tensor, dict]:
        tree_config = replace(way.tree_config, record_rounds=repetition == OBSERVED)
        if cell.temperature > 0:
            # The same for all ways, so that they write the same.
            options["seeds"] = [(repetition - OBSERVED) * cell.batch + row for row in range(cell.batch)]
        assistant = None if way.drafter is None else way.drafter.model
        output = self.target.generate(
            **inputs, **options, tree_config=tree_config, assistant_model=assistant, return_dict_in_generate=True
        )
        return output.sequences, output.tree_stats

    def _own(self, row: list[int]) -> list[int]:
        """The tokens of a row up to its end."""
        return row[: next((place + 1 for place, token in enumerate(row) if token in self.ends), len(row))]
