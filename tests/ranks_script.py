"""Run by torchrun on two processes; each part is what `test_ranks.py` says about it.

    torchrun --nproc-per-node 2 tests/ranks_script.py FOLDER CASES.json OUTPUT.json

CASES holds a list of cases for each of `expert`, `tensor` (the ranks hold one model together) and `synced` (each has one
of its own, but forwards wait for one another). OUTPUT gets what was written.
"""

import json
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rounds import graphs_everywhere
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_treespec
from hf_treespec.budgeting.fallback import Fallback
from hf_treespec.budgeting.libra import LibraController
from hf_treespec.drafting.calibration import AcceptanceCalibration
from hf_treespec.stopping import MaxTimeCriteria


PLANS = {
    "expert": {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)},
    "tensor": {"distributed_config": DistributedConfig(tp_plan="auto")},
    "synced": {},
}


def run_case(
    model, assistant, prompts: list[list[int]], batch=False, draft=False, static=False, **options
) -> list[list[int]]:
    """What `generate`, or with `batch` `generate_batch`, writes behind `prompts`; with `draft` the assistant drafts, with
    `static` the rounds have fixed shapes and are replayed. Where rounds are recorded, also the experts they read."""
    if draft:
        options["assistant_model"] = assistant
    with graphs_everywhere() if static else nullcontext([]) as recorders:
        if batch:
            written = [output.generated_tokens for output in model.generate_batch(prompts, **options).values()]
        else:
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            options |= {"attention_mask": (ids > 0).long(), "return_dict_in_generate": True}
            output = model.generate(ids, **options)
            written = output.sequences[:, width:].tolist()
            if "distinct_experts" in output.tree_stats:
                written.append([output.tree_stats["distinct_experts"]])
        assert all(recorder.replays > 1 for recorder in recorders) and len(recorders) == static
    return written


@contextmanager
def planted_divergence(rank: int):
    """Other seeds, clocks, calibration and budgets on every rank."""
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:

        def plant(owner, name: str, other) -> None:
            patch.setattr(owner, name, partialmethod(other, getattr(owner, name)))

        plant(MaxTimeCriteria, "__call__", lambda self, own, *args, **kwargs: own(self, *args, **kwargs) | (rank > 0))
        plant(AcceptanceCalibration, "estimate", lambda self, own, *args: own(self, *args) ** (1 + 3 * rank))
        plant(Fallback, "speculates", lambda self, own, batch: own(self, batch) and rank == 0)
        plant(LibraController, "plan", lambda self, own, *args: max(1, own(self, *args) - rank))
        plant(LibraController, "deeper", lambda self, own: own(self) and rank == 0)
        yield


@contextmanager
def sharded_weights(*modules):
    """Every forward of these modules waits for the same one on all ranks, as it does where they share weights."""

    def wait(number: int):
        def hook(module, args):
            numbers = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(numbers, torch.tensor([float(number)]))
            assert len({float(number) for number in numbers}) == 1, "ranks run different forwards"

        return hook

    with ExitStack() as hooks:
        for number, module in enumerate(modules):
            hooks.callback(module.register_forward_pre_hook(wait(number)).remove)
        yield


def run_together(model, assistant, rank: int, cases: list[dict]) -> list:
    """Cases on ranks that hold `model` together; all must write the same."""
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing is sharded"
    # On all ranks, before a forward that others would wait in.
    with pytest.raises(ValueError, match="`deterministic` needs experts"):
        run_case(model, assistant, **cases[0] | {"tree_config": {"budget": 1, "deterministic": True}})
    with planted_divergence(rank):
        written = [run_case(model, assistant, **case) for case in cases]
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, written)
    assert all(text == written for text in texts), f"rank {rank} wrote another text"
    return written


def run_synced(model, assistant, rank: int, cases: list[list[dict]]) -> list:
    """Each case has an entry per rank; the texts of all ranks."""
    written = []
    for case in cases:
        with sharded_weights(model, assistant, model.get_input_embeddings(), model.lm_head):
            written.append(run_case(model, assistant, **case[rank], synced_gpus=True))
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, written)
    return [list(case) for case in zip(*texts)]


def main(folder: str, cases: str, output: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assistant = AutoModelForCausalLM.from_pretrained(folder).eval()
    written = {}
    for part, listed in json.loads(Path(cases).read_text(encoding="utf-8")).items():
        model = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder, **PLANS[part]).eval())
        Path(f"{output}.started").touch()
        run = run_synced if part == "synced" else run_together
        written[part] = run(model, assistant, rank, listed)
    if rank == 0:
        Path(output).write_text(json.dumps(written), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
