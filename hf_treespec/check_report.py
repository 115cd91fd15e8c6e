"""The report of `hf-treespec check`, in Markdown and as plain data for JSON."""

import math
from dataclasses import asdict
from typing import Any

from .check import Answers, Comparison, DecodingCheck


# Differences listed one by one.
_LISTED = 10


def to_dict(settings: dict[str, Any], checks: list[DecodingCheck]) -> dict[str, Any]:
    """Everything that was found, as plain data. Where one text ends and the other goes on, the gap is `None`."""
    return {
        "passed": not any(check.faults for check in checks),
        "faults": [fault for check in checks for fault in check.faults],
        "settings": settings,
        "checks": [
            {
                "dtype": check.dtype,
                "comparisons": [_comparison(item) for item in check.comparisons],
                "accepted_length": asdict(check.accepted_length),
                "expected_length": check.expected_length,
                "answers": None if check.answers is None else asdict(check.answers),
                "sampler": None if check.sampler is None else asdict(check.sampler),
            }
            for check in checks
        ],
    }


def _comparison(item: Comparison) -> dict[str, Any]:
    differences = [
        {
            "prompt": prompt,
            "equal_tokens": place,
            "gap": gap if math.isfinite(gap) else None,
            "tolerance": tolerance,
            "verdict": "fault" if prompt in item.faults else "near-tie",
        }
        for prompt, (place, gap, tolerance) in enumerate(zip(item.first_differences, item.gaps, item.tolerances))
        if place is not None
    ]
    counts = {"identical": item.identical, "near_ties": len(item.near_ties), "faults": len(item.faults)}
    return {"way": item.way, "reference": item.reference, **counts, "differences": differences}


def to_markdown(settings: dict[str, Any], checks: list[DecodingCheck]) -> str:
    """The report to read."""
    faults = [fault for check in checks for fault in check.faults]
    lines = ["# hf-treespec check", "", *(f"- {name}: {value}" for name, value in settings.items()), ""]
    lines += ["**Passed.**", ""] if not faults else [f"**{len(faults)} faults:**", "", *(f"- {f}" for f in faults), ""]
    for check in checks:
        lines += [*_section(check), ""]
    return "\n".join(lines)


def _section(check: DecodingCheck) -> list[str]:
    lines = [
        f"## {check.dtype}",
        "",
        "| texts of | against | identical | near-ties | faults | largest gap |",
        "|---|---|---|---|---|---|",
    ]
    for item in check.comparisons:
        floor = " (noise floor)" if item is check.comparisons[-1] else ""
        gap = max((gap for gap in item.gaps if gap is not None), default=None)
        counts = f"{item.identical} | {len(item.near_ties)} | {len(item.faults)}"
        lines.append(f"| {item.way}{floor} | {item.reference} | {counts} | {_gap(gap)} |")
    listed = [line for item in check.comparisons for line in _differences(item)]
    if listed:
        more = [f"- and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
        lines += ["", *listed[:_LISTED], *more]
    expected = "" if check.expected_length is None else f"; at least {check.expected_length:.2f} expected"
    without = check.accepted_length.value - 1
    lines += ["", f"Accepted length {check.accepted_length:.2f} ({without:.2f} without the bonus token){expected}."]
    if check.sampler is not None:
        test = check.sampler
        lines += [
            "",
            f"Sampling: {test.draws} first tokens against the target's probabilities, chi-square {test.statistic:.1f} with "
            f"{test.degrees} degrees of freedom, p = {test.p_value:.2g}.",
        ]
    return lines + ([] if check.answers is None else _answer_table(check.answers))


def _gap(gap: float | None) -> str:
    if gap is None:
        return ""
    return f"{gap:.2g}" if math.isfinite(gap) else "one text ends"


def _differences(item: Comparison) -> list[str]:
    """A line per differing text, faults first."""
    return [
        f"- {verdict}: prompt {prompt} of {item.way}, behind {item.first_differences[prompt]} tokens equal to "
        f"{item.reference}'s, gap {_gap(item.gaps[prompt])}, of which rounding explains {item.tolerances[prompt]:.2g}"
        for verdict, prompts in (("fault", item.faults), ("near-tie", item.near_ties))
        for prompt in prompts
    ]


def _answer_table(answers: Answers) -> list[str]:
    against = "the answers given" if answers.given else "plain decoding's answers"
    return [
        "",
        f"Final answers of {answers.prompts} prompts, share that match {against}:",
        "",
        "| budget=1 | tree | difference |",
        "|---|---|---|",
        f"| {answers.plain:.3f} | {answers.tree:.3f} | {answers.difference:+.3f} |",
    ]
