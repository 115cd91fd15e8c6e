"""Generate with draft trees on several processes, each with the whole model and a share of the prompts.

    torchrun --nproc-per-node 8 generate_distributed.py --model MODEL --prompts prompts.jsonl --output texts.jsonl
    accelerate launch --config_file configs/one_node_8_gpus.yaml generate_distributed.py --model ... (as above)

Texts are written in the order of the prompts. Run again after an interruption, with any number of processes: it goes on
behind what is there. The first process reads the prompts and writes the output; the others need neither file.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec.prompts import encode_prompts, read_prompts


def main(
    model: Annotated[str, typer.Option(help="DeepSeek-V4 target: a local folder or an id on the Hub.")],
    prompts: Annotated[Path, typer.Option(help='JSON lines {"prompt": ...} or {"turns": [...]}, or .txt lines.')],
    output: Annotated[Path, typer.Option(help="JSON lines with the texts; an interrupted run goes on here.")],
    assistant: Annotated[str | None, typer.Option(help="Draft model; without one, the target's own head.")] = None,
    budget: Annotated[int, typer.Option(help="Nodes verified per round; 1 is plain decoding.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that a process decodes together.")] = 1,
    batches_per_save: Annotated[int, typer.Option(min=1, help="Batches per process between two writes.")] = 4,
    dtype: Annotated[str, typer.Option(help="As in `from_pretrained`.")] = "auto",
    cpu: Annotated[bool, typer.Option(help="Run on CPU, with gloo between the processes.")] = False,
) -> None:
    """Generate with draft trees, the prompts split between the processes."""
    state = PartialState(cpu=cpu)
    settings = {"model": model, "max_new_tokens": max_new_tokens}
    work = [None, None]
    if state.is_main_process:
        rows = read_prompts(prompts)
        work = [rows, read_output(output, rows, settings)]
    rows, done = broadcast_object_list(work)
    options = {"tree_config": hf_treespec.TreeConfig(budget=budget), "max_new_tokens": max_new_tokens}
    if assistant:
        options["assistant_model"] = load(assistant, dtype, state)
    target = hf_treespec.enable(load(model, dtype, state))
    tokenizer = AutoTokenizer.from_pretrained(model)
    totals = {"prompts": 0, "tokens": 0, "rounds": 0, "seconds": 0.0}
    per_save = state.num_processes * batch_size * batches_per_save
    with tqdm(total=len(rows), initial=len(done), unit="prompt", disable=not state.is_main_process) as bar:
        for start in range(len(done), len(rows), per_save):
            # Near the end some processes get fewer rows, or none.
            with state.split_between_processes(rows[start : start + per_save]) as share:
                texts = list(decode(target, tokenizer, share, batch_size, options, totals))
            done += [{**settings, **row} for row in gather_object(texts)]
            if state.is_main_process:
                write_atomically(output, done)
            bar.update(len(done) - bar.n)
    per_process = gather_object([totals])
    if state.is_main_process:
        report(per_process)
    state.destroy_process_group()


def read_output(output: Path, rows: list[dict], settings: dict) -> list[dict]:
    """What an earlier run wrote.

    Raises:
        ValueError: if that answers other prompts, or was written with other settings.
    """
    if not output.exists():
        return []
    done = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
    for number, (earlier, row) in enumerate(zip(done, rows), start=1):
        expected = {**settings, "prompt": row["prompt"]}
        other = [name for name, value in expected.items() if earlier.get(name) != value]
        if other:
            raise ValueError(
                f"`--output` {output}, line {number}, has another {other[0]}; move it away or name another."
            )
    if len(done) > len(rows):
        raise ValueError(f"`--output` {output} has {len(done)} rows for {len(rows)} prompts; name another file.")
    return done


def load(name: str, dtype: str, state: PartialState):
    """A model on this process's device."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(state.device)


def decode(target, tokenizer, rows: list[dict], batch_size: int, options: dict, totals: dict) -> Iterator[dict]:
    """The rows with their texts; adds to this process's totals."""
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        inputs = encode_prompts(tokenizer, [row["prompt"] for row in batch])
        inputs = {name: ids.to(target.device) for name, ids in inputs.items()}
        begin = time.perf_counter()
        result = target.generate(
            **inputs, do_sample=False, return_dict_in_generate=True, pad_token_id=tokenizer.pad_token_id, **options
        )
        totals["seconds"] += time.perf_counter() - begin
        totals["prompts"] += len(batch)
        totals["tokens"] += result.tree_stats["emitted_tokens"]
        totals["rounds"] += result.tree_stats["rounds"]
        texts = tokenizer.batch_decode(result.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        yield from ({**row, "text": text} for row, text in zip(batch, texts))


def write_atomically(path: Path, rows: list[dict]) -> None:
    """Writes beside the file and renames, so that a reader or a killed run never leaves half a file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def report(per_process: list[dict]) -> None:
    """Throughput of every process; waiting for the others is not counted."""
    for rank, totals in enumerate(per_process):
        if totals["prompts"]:
            speed, length = totals["tokens"] / totals["seconds"], totals["tokens"] / totals["rounds"]
            print(
                f"rank {rank}: {totals['prompts']} prompts, {totals['tokens']} tokens, {speed:.1f} tokens/s, "
                f"accepted length {length:.2f}"
            )
        else:
            print(f"rank {rank}: nothing to do")


@record
def run() -> None:
    """Command line. `record` hands a process's own error to the launcher, which shows it and ends the others."""
    typer.run(main)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run()
