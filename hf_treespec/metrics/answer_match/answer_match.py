r"""Answer match: the last `\boxed{...}`, else the last number of a text, against that of a reference."""

import re
from decimal import Decimal

import datasets
import evaluate
import torch

from hf_treespec.intervals import bootstrap


_DESCRIPTION = r"""
Share of texts whose final answer is the reference's. The answer is what the last `\boxed{...}` holds, without one the last
number. Numbers match by value (`1,200` and `1200.0`), anything else without regard to white space.
"""
_INPUTS = r"""
Args:
    predictions (`list[str]`): the texts.
    references (`list[str]`): the right answers, or texts that end in them.

Returns:
    `answer_match` (0 to 1) with its 95 % bootstrap interval `low` and `high` over texts, and `matches` (`list[bool]`).

Raises:
    ValueError: without texts, or for a reference that holds neither a number nor a `\boxed{...}`.
"""
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\.?\d)")


def final_answer(text: str) -> str | None:
    r"""The answer that a text ends in: of the last `\boxed{...}`, else the last number, else `None`.

    Numbers lose `$`, thousands separators and trailing zeros, so equal values are equal strings.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        whole = _NUMBER.fullmatch(boxed.strip())
        return _normalise(whole[0]) if whole else "".join(boxed.split())
    numbers = _NUMBER.findall(text)
    return _normalise(numbers[-1]) if numbers else None


def _last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds; braces inside are balanced."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def _normalise(number: str) -> str:
    value = Decimal(number.replace("$", "").replace(",", ""))
    return "0" if value == 0 else format(value.normalize(), "f")


class AnswerMatch(evaluate.Metric):
    """Share of texts that end in the right answer."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float | list[bool]]:
        if not len(predictions):
            raise ValueError("`predictions` is empty; pass at least one text.")
        expected = [final_answer(reference) for reference in references]
        if None in expected:
            index = expected.index(None)
            raise ValueError(
                rf"Reference {index}, {references[index]!r}, holds neither a number nor a `\boxed{{...}}`."
            )
        matches = [final_answer(text) == answer for text, answer in zip(predictions, expected)]
        scores = torch.tensor(matches, dtype=torch.double)
        share = bootstrap(lambda index: scores[index].mean(1), len(scores))
        return {"answer_match": share.value, "low": share.low, "high": share.high, "matches": matches}
