"""The commands `hf-treespec profile` and `hf-treespec train-controller`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..command_line import DeviceMap, Drafter, Dtype, load, numbers, readable_errors, ships_head


Model = Annotated[str, typer.Option(help="DeepSeek-V4 target: a local folder or an id on the Hub.")]
Assistant = Annotated[
    str | None, typer.Option(help="Draft model; without one, the head in the target's checkpoint drafts.")
]
Budget = Annotated[int, typer.Option(min=2, help="Nodes per row, at most, the root included.")]
Depth = Annotated[int | None, typer.Option(help="Drafted levels, at most.", show_default="by budget")]
TopK = Annotated[int | None, typer.Option(help="Children per expanded node.", show_default="by budget")]


def profile(
    model: Model,
    assistant: Assistant = None,
    drafter: Drafter = "auto",
    budget: Budget = 8,
    depth: Depth = None,
    top_k: TopK = None,
    batches: Annotated[str, typer.Option(help="Rows decoded together, comma-separated.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache, comma-separated.")] = "256,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per point, of which the median counts.")] = 25,
    output: Annotated[Path | None, typer.Option(help="JSON file.", show_default="in the cache folder")] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Measure what rounds cost with this model, drafter and machine. `generate` then chooses budgets by it."""
    with readable_errors():
        from tqdm.auto import tqdm

        from ..config import TreeConfig
        from .profiling import profile as measure
        from .profiling import rounds_to_time
        from .tables import table_path

        config = TreeConfig(budget, depth, top_k, drafter)
        sizes, lengths = numbers(batches, "--batches"), numbers(contexts, "--contexts")
        for option, values in (("--batches", sizes), ("--contexts", lengths)):
            if min(values) < 1:
                raise ValueError(f"`{option}` has {min(values)}; allowed are 1 and above.")
        target, draft, key = _load(model, assistant, drafter, dtype, device_map)
        path = output or table_path(key)
        # Before minutes of measuring.
        path.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=rounds_to_time(config, repeats) * len(sizes) * len(lengths), unit="round") as bar:
            table = measure(target, config, key, draft, sizes, lengths, repeats, bar.update)
        table.save(path)
        _show(Console(), table, path)


def train_controller(
    model: Model,
    prompts: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="As `generate --prompts`.")],
    assistant: Assistant = None,
    drafter: Drafter = "auto",
    objective: Annotated[
        str, typer.Option(help="'tokens', as published, or 'speed': tokens per second by the cost table.")
    ] = "speed",
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take from the file.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt.")] = 128,
    rounds: Annotated[
        Path | None, typer.Option(help="Keeps the recorded rounds; they are read from here if it exists.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="safetensors file.", show_default="in the cache folder")] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Train SpecKV's controller for a model and its drafter, for `TreeConfig(controller="speckv")`."""
    with readable_errors():
        from tqdm.auto import tqdm
        from transformers import AutoTokenizer

        from ..config import TreeConfig
        from ..prompts import encode_prompts, read_prompts
        from .rounds import RoundRecords
        from .speckv import LENGTHS, OBJECTIVES, bits_of, controller_path, examples, train

        if objective not in OBJECTIVES:
            raise ValueError(f"`--objective` is {objective!r}; allowed values are {OBJECTIVES}.")
        target, draft, key = _load(model, assistant, drafter, dtype, device_map)
        tokenizer = AutoTokenizer.from_pretrained(model)
        if rounds is not None and rounds.exists():
            records = RoundRecords.load(rounds)
        else:
            chain = TreeConfig(
                max(LENGTHS) + 1, max(LENGTHS), 1, drafter, controller="fixed", fallback=False, record_rounds=True
            )
            options = {"assistant_model": draft, "tree_config": chain, "max_new_tokens": max_new_tokens}
            options |= {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": tokenizer.pad_token_id}
            parts = []
            for row in tqdm(read_prompts(prompts)[:limit], unit="prompt"):
                inputs = encode_prompts(tokenizer, [row["prompt"]])
                inputs = {name: ids.to(target.device) for name, ids in inputs.items()}
                parts.append(target.generate(**inputs, **options).tree_stats["round_records"])
            records = RoundRecords.concatenate(parts)
            records.metadata["bits"] = bits_of(target)
            if rounds is not None:
                records.save(rounds)
        features, rates = examples(records)
        path = output or controller_path(key)
        train(features, rates, objective, bits_of(target)).save(path)
        Console().print(f"{len(rates)} examples of {len(records)} rounds; wrote {path}", soft_wrap=True)


def _load(model: str, assistant: str | None, drafter: str, dtype: str, device_map: str | None):
    """The enabled target, the draft model and the key of their tables."""
    from ..config import HEADS
    from ..heads import head_of
    from ..modeling import enable
    from .tables import drafter_name, table_key

    if drafter != "ngram" and not assistant and not ships_head(model):
        raise ValueError(f"{model!r} ships no draft head: pass `--assistant`, or `--drafter ngram`.")
    target = enable(load(model, dtype, device_map))
    draft = load(assistant, dtype, device_map) if assistant else None
    by_head = draft is None and drafter != "ngram"
    head = head_of(target, drafter if drafter in HEADS else None) if by_head else None
    return target, draft, table_key(target, drafter_name(draft, head))


def _show(console: Console, table, path: Path) -> None:
    points = Table("batch", "context", "nodes: ms", title="verification, with acceptance, commit and the host's work")
    for batch, context in sorted({(point.batch, point.context) for point in table.verify_points}):
        row = [point for point in table.verify_points if (point.batch, point.context) == (batch, context)]
        values = ", ".join(f"{point.nodes}: {1000 * point.seconds:.2f}" for point in row)
        points.add_row(str(batch), str(context), values)
    console.print(points)
    drafts = Table("batch", "levels: ms", title="drafting")
    for batch in sorted({point.batch for point in table.draft_points}):
        row = [point for point in table.draft_points if point.batch == batch]
        drafts.add_row(str(batch), ", ".join(f"{point.levels}: {1000 * point.seconds:.2f}" for point in row))
    console.print(drafts)
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in table.fit["seconds"].items())
    console.print(f"fit: {parts}; a padding node costs {table.padding:.2f} of a real one")
    held_out = table.fit["held_out_error"]
    errors = f"{table.fit['median_error']:.1%} on all points"
    errors += "" if held_out is None else f", {held_out:.1%} on the half that it was not made on"
    runs = min(point.runs for point in table.verify_points)
    console.print(f"median error of the fit: {errors}; points are medians of {runs} runs or more, taken in turns")
    console.print(f"wrote {path}", soft_wrap=True)
