"""The `hf-treespec` command."""

import json
import time
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .bench.command import bench
from .bench.simulate import simulate
from .budgeting.commands import profile, train_controller
from .command_line import Chat, DeviceMap, Drafter, Dtype, check_dtype, load, load_target, readable_errors, ships_head


# Imports of torch, transformers and our modules that need them stand inside the commands: `--help` is instant.

app = typer.Typer(
    help="Lossless tree-structured speculative decoding for DeepSeek-V4 in Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


app.command()(bench)
app.command()(simulate)


class Format(str, Enum):
    """How a report is printed."""

    TABLE = "table"
    JSON = "json"


MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")]
Budget = Annotated[
    int | None, typer.Option(help="Nodes verified per round, the root included; 1 is plain decoding, 8 the default.")
]
Depth = Annotated[int | None, typer.Option(help="Drafted levels below the root.")]
TopK = Annotated[int | None, typer.Option(help="Children per expanded node; 1 drafts a chain.")]


app.command()(profile)
app.command()(train_controller)


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Target; by default the tiny one in the package.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; by default the tiny one.")] = None,
    max_new_tokens: MaxNewTokens = 96,
    budget: Budget = None,
    # On a CPU a drafted level of the shipped pair costs a quarter of a target step: deeper trees do not pay.
    depth: Depth = 3,
    top_k: TopK = None,
) -> None:
    """Decode prompts in four ways, compare text and speed, and draw a draft tree. Works offline."""
    with readable_errors():
        from .config import TreeConfig
        from .demo import run

        run(Console(), model, assistant, max_new_tokens, TreeConfig(8 if budget is None else budget, depth, top_k))


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="DeepSeek-V4 target: a local folder or an id on the Hub.")],
    assistant: Annotated[
        str | None,
        typer.Option(
            help="Draft model of the same vocabulary. Without one, the head in the target's checkpoint drafts."
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help='File: JSON lines {"prompt": ...} or {"turns": [...]}, or .txt lines.'
        ),
    ] = None,
    drafter: Drafter = "auto",
    max_new_tokens: MaxNewTokens = 128,
    budget: Budget = None,
    depth: Depth = None,
    top_k: TopK = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    chat: Chat = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines here instead of printing the texts.")] = None,
) -> None:
    """Generate greedily with draft trees. Of a prompt with several turns the first is asked."""
    with readable_errors():
        from .config import TreeConfig
        from .prompts import read_prompts

        rows = [{"prompt": text} for text in prompt or []] + (read_prompts(prompts) if prompts else [])
        if not rows:
            raise ValueError("There is nothing to do: pass `--prompt TEXT` or `--prompts FILE`.")
        if output and prompts and output.resolve() == prompts.resolve():
            raise ValueError(f"`--output` {str(output)!r} is the file of the prompts; name another.")
        drafts = bool(assistant) or drafter == "ngram" or budget != 1 and ships_head(model)
        if budget is None:
            budget = 8 if drafts else 1
        if budget > 1 and not drafts:
            raise ValueError(
                f"`--budget {budget}`, but {model!r} ships no draft head: pass `--assistant`, `--drafter ngram`, or "
                "`--budget 1`."
            )
        options = {"tree_config": TreeConfig(budget, depth, top_k, drafter), "max_new_tokens": max_new_tokens}
        if assistant:
            options["assistant_model"] = load(assistant, dtype, device_map)
        target, tokenizer = load_target(model, dtype, device_map)
        batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        _generate(target, tokenizer, batches, chat, options, output)


@app.command()
def train_head(
    model: Annotated[str, typer.Option(help="DeepSeek-V4 target: a local folder or an id on the Hub.")],
    kind: Annotated[str, typer.Option(help="'mtp' or 'dspark'.")],
    data: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Prompts, as `generate --prompts` takes them.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the head; the model's own puts it beside the model.")],
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Keeps texts and training state, to go on from.", show_default="OUTPUT/training"),
    ] = None,
    initial: Annotated[
        str | None, typer.Option(help="Checkpoint whose head is trained on, instead of a new one.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per step.")] = 8,
    max_new_tokens: MaxNewTokens = 128,
    max_length: Annotated[int, typer.Option(min=16, help="Texts are cut to their last tokens.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 2e-3,
    block_size: Annotated[int | None, typer.Option(min=1, help="DSpark: tokens per block.", show_default="5")] = None,
    noise_token_id: Annotated[
        int | None, typer.Option(help="DSpark: fills the block.", show_default="the last id")
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(min=1, help="DSpark: rank of the Markov term.", show_default="64")
    ] = None,
    target_layer_ids: Annotated[
        str | None, typer.Option(help="DSpark: layers it sees, comma-separated.", show_default="the last three")
    ] = None,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option(help="Multiply in bf16 while training.")] = False,
    teacher_temperature: Annotated[
        float, typer.Option(min=0.1, help="Of the model's distributions; below 1 favours its first choices.")
    ] = 0.5,
    dtype: Annotated[str, typer.Option(help="Of the model, as in `from_pretrained`.")] = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Train a draft head for a model on what the model itself writes behind your prompts. Resumes when run again."""
    with readable_errors():
        from .config import HEADS
        from .training.run import run

        if kind not in HEADS:
            raise ValueError(f"`--kind` is {kind!r}; allowed values are {HEADS}.")
        settings = {
            "dspark_block_size": block_size,
            "dspark_noise_token_id": noise_token_id,
            "dspark_markov_rank": markov_rank,
            "dspark_target_layer_ids": _layer_ids(target_layer_ids),
        }
        given = ["--" + key.removeprefix("dspark_").replace("_", "-") for key in settings if settings[key] is not None]
        if given and (kind == "mtp" or initial is not None):
            place = "an MTP head has none" if kind == "mtp" else f"the head of {initial!r} has its own"
            raise ValueError(
                f"{', '.join(given)}: {place}; drop what is given, or train a new head of `--kind dspark`."
            )
        work_dir = output / "training" if work_dir is None else work_dir
        sizes = (max_new_tokens, max_length, steps, batch_size, learning_rate, seed, bf16, teacher_temperature)
        run(Console(), *load_target(model, dtype, device_map), kind, data, output, work_dir, initial, settings, *sizes)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="DeepSeek-V4 checkpoint: a local folder or an id on the Hub.")],
    format: Annotated[Format, typer.Option(help="Tables for reading, or JSON.")] = Format.TABLE,
) -> None:
    """Show what a checkpoint holds, and what it needs. Reads config and index alone; downloads no weights."""
    with readable_errors():
        from .inspection import inspect_checkpoint
        from .inspection_tables import report_tables

        report = inspect_checkpoint(path)
        if format is Format.JSON:
            typer.echo(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
            return
        for table in report_tables(report):
            Console().print(table)
        for warning in report.warnings:
            Console().print(f"! {warning}", style="yellow", markup=False, highlight=False)


@app.command()
def check(
    model: Annotated[str, typer.Option(help="DeepSeek-V4 target: a local folder or an id on the Hub.")],
    prompts: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help='As `generate --prompts`; rows may have an "answer".'),
    ],
    assistant: Annotated[
        str | None, typer.Option(help="Draft model; without one, the head in the target's checkpoint.")
    ] = None,
    drafter: Drafter = "auto",
    max_new_tokens: MaxNewTokens = 128,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take from the file.")] = 32,
    budget: Budget = None,
    depth: Depth = None,
    top_k: TopK = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Rows of the batches compared with single rows.")] = 8,
    chat: Chat = None,
    dtype: Dtype = "auto",
    fp32: Annotated[
        bool, typer.Option("--fp32/--no-fp32", help="Also in fp32, which tells faults from rounding; takes memory.")
    ] = True,
    device_map: DeviceMap = None,
    minimum_length: Annotated[
        float | None,
        typer.Option(min=1.0, help="Accepted length to reach.", show_default="40 % of the head's published drafts"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for `check.md` and `check.json`.")] = None,
) -> None:
    """Check that a model with its drafter writes what plain decoding writes. Exit code 1 if it does not."""
    with readable_errors():
        from transformers import AutoConfig

        from . import __version__
        from .check_report import to_dict, to_markdown
        from .config import TreeConfig
        from .inspection import version_of
        from .prompts import read_prompts

        tree_config = TreeConfig(8 if budget is None else budget, depth, top_k, drafter)
        check_dtype(dtype)
        if drafter != "ngram" and not assistant and not ships_head(model):
            raise ValueError(f"{model!r} ships no draft head: pass `--assistant`, or `--drafter ngram`.")
        rows = read_prompts(prompts)[:limit]
        sizes = (max_new_tokens, batch_size, minimum_length)
        own = str(AutoConfig.from_pretrained(model).dtype).removeprefix("torch.") if dtype == "auto" else dtype
        dtypes = ["float32"] if fp32 and own == "float32" else ["float32", dtype] if fp32 else [dtype]
        checks = [_check(model, assistant, name, device_map, rows, tree_config, chat, sizes) for name in dtypes]
        settings = {
            "model": model,
            "drafter": assistant or ("prompt lookup" if drafter == "ngram" else "the checkpoint's head"),
            "tree_config": tree_config.to_dict(),
            "prompts": f"{len(rows)} of {prompts.name}",
            "max_new_tokens": max_new_tokens,
            "hf-treespec": __version__,
            **{name: version_of(name) for name in ("torch", "transformers")},
        }
        report, data = to_markdown(settings, checks), to_dict(settings, checks)
        Console().print(report, markup=False, highlight=False, soft_wrap=True)
        if output:
            output.mkdir(parents=True, exist_ok=True)
            (output / "check.md").write_text(report, encoding="utf-8")
            (output / "check.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not data["passed"]:
        raise typer.Exit(1)


@app.command()
def env(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile the Triton kernels for absent GPUs; what they cost.")
    ] = False,
) -> None:
    """Show versions and hardware, for bug reports."""
    if kernels:
        with readable_errors():
            return _kernel_costs()

    from .environment import environment

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in environment().items():
        table.add_row(name, value)
    Console().print(table)


def _kernel_costs() -> None:
    """A table of what the kernels cost, beside their budgets; exit code 1 where one is exceeded."""
    from .bench import kernel_costs
    from .ops.backend import kernels_installed

    if not kernels_installed():
        raise ValueError("`--kernels` needs Triton: `pip install 'hf-treespec[triton]'`.")
    headings = ("architecture", "kernel", "launch", "registers", "of", "spilled", "shared", "of", "matrix", "")
    table, failed = Table(*headings, title="Compiled, not run"), False
    for cost in kernel_costs.measure():
        budget = kernel_costs.SHARED_LIMITS.get(cost["architecture"])
        registers = "-" if budget is None else str(kernel_costs.REGISTERS[cost["kernel"]])
        found = ", ".join(kernel_costs.faults(cost))
        failed = failed or bool(found)
        row = [cost["registers"], registers, cost["spilled"], cost["shared"], "-" if budget is None else budget]
        cells = map(str, [*row, cost["matrix"] or "-", found])
        table.add_row(cost["architecture"], cost["kernel"], cost["launch"], *cells)
    Console(width=140).print(table)
    raise typer.Exit(int(failed))


def _check(
    model: str, assistant: str | None, dtype: str, device_map, rows: list[dict], tree_config, chat, sizes: tuple
):
    """Checks a model in one dtype; it is gone from memory before the next one is loaded."""
    from tqdm.auto import tqdm
    from transformers.utils.logging import is_progress_bar_enabled

    from .check import check_decoding

    def progress(items, name: str):
        return tqdm(items, desc=f"{dtype}, {name}", leave=False, disable=not is_progress_bar_enabled())

    target, tokenizer = load_target(model, dtype, device_map)
    draft = load(assistant, dtype, device_map) if assistant else None
    prompts = [row["prompt"] for row in rows]
    answers = [None if row.get("answer") is None else str(row["answer"]) for row in rows]
    max_new_tokens, batch_size, minimum_length = sizes
    return check_decoding(
        target,
        tokenizer,
        prompts,
        tree_config,
        draft,
        chat,
        max_new_tokens,
        batch_size,
        answers,
        minimum_length,
        progress=progress,
    )


def _layer_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"`--target-layer-ids` is {text!r}; it must be layer numbers from 0, comma-separated.")
    return [int(part) for part in parts]


def _generate(target, tokenizer, batches: list[list[dict]], chat: bool | None, options: dict, output: Path | None):
    from tqdm.auto import tqdm
    from transformers.utils.logging import is_progress_bar_enabled

    totals = {"prompts": 0, "seconds": 0.0, "rounds": 0, "emitted_tokens": 0, "nodes": 0}
    quiet = len(batches) == 1 or not is_progress_bar_enabled()
    with output.open("w", encoding="utf-8") if output else nullcontext() as file:
        for rows in tqdm(batches, unit="batch", disable=quiet):
            texts, stats = _generate_batch(target, tokenizer, [row["prompt"] for row in rows], chat, options)
            for row, text in zip(rows, texts):
                if file:
                    file.write(json.dumps({**row, "text": text}, ensure_ascii=False) + "\n")
                else:
                    tqdm.write(f"--- {row.get('id', row['prompt'])}\n{text}\n")
            if file:
                file.flush()
            totals["prompts"] += len(rows)
            for name in stats.keys() & totals.keys():
                totals[name] += stats[name]
    Console().print(_summary(totals))


def _generate_batch(target, tokenizer, prompts: list[str], chat: bool | None, options: dict):
    """The texts of one batch, and its `tree_stats` with the `seconds` it took."""
    from .modeling import device_of
    from .prompts import encode_prompts

    inputs = {name: ids.to(device_of(target)) for name, ids in encode_prompts(tokenizer, prompts, chat).items()}
    start = time.perf_counter()
    result = target.generate(
        **inputs, do_sample=False, return_dict_in_generate=True, pad_token_id=tokenizer.pad_token_id, **options
    )
    seconds = time.perf_counter() - start
    texts = tokenizer.batch_decode(result.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts, {**result.tree_stats, "seconds": seconds}


def _summary(totals: dict[str, Any]) -> Table:
    tokens, rounds = totals["emitted_tokens"], totals["rounds"]
    table = Table(show_header=False, title="Measured in this run (prefill included)", title_justify="left")
    table.add_row("prompts", str(totals["prompts"]))
    table.add_row("new tokens", str(tokens))
    table.add_row("accepted length", f"{tokens / rounds:.2f} ({tokens / rounds - 1:.2f} without the bonus token)")
    table.add_row("nodes verified per round", f"{totals['nodes'] / rounds:.2f}")
    table.add_row("tokens/s", f"{tokens / totals['seconds']:.1f}")
    return table
