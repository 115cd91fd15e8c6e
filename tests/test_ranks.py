"""Two processes: ranks that hold one model together (tensor and expert parallel) write the text of one process, whatever
is planted to part them; ranks with a model each run equally many forwards (`synced_gpus`)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from heads import make_checkpoint
from oracle import generator, random_texts
from ranks_script import run_case
from test_distributed import ENVIRONMENT
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec import TokenTree
from hf_treespec.ranks import Ranks


SCRIPT = Path(__file__).with_name("ranks_script.py")
PROMPTS = [text.tolist() for text in random_texts(generator(3), (11, 5, 1))]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.9}
PLAIN = {"tree_config": {"budget": 1}}
# Drafted by the checkpoint's head, unless an assistant is there.
TREE = {"tree_config": {"budget": 6, "depth": 3}}
NGRAM = {"tree_config": {"budget": 5, "drafter": "ngram"}}
SEEDS = {"seeds": [1, 2, 3]}
TOGETHER = [
    {**GREEDY, **TREE},
    {**SAMPLED, **SEEDS, **TREE, "draft": True},
    {**SAMPLED, **SEEDS, **TREE, "static": True, "max_new_tokens": 16},
    {**GREEDY, **NGRAM, "max_time": 3600},
    {**GREEDY, **TREE, "draft": True, "batch": True},
    {**GREEDY, **TREE, "draft": True, "batch": True, "static": True, "max_new_tokens": 16},
    {**SAMPLED, **SEEDS, **TREE, "batch": True},
    # The experts counted are those of all ranks.
    {**GREEDY, "tree_config": {**TREE["tree_config"], "record_rounds": True}},
    # What a controller chooses is rank 0's choice.
    {**GREEDY, "tree_config": {"budget": 6, "depth": 3, "controller": "libra"}, "draft": True},
    # Seeds that are drawn are rank 0's, which draws after `torch.manual_seed(0)`.
    {**SAMPLED, **TREE},
]
TOGETHER = [{"prompts": PROMPTS, **case} for case in TOGETHER]
# `tp_plan="auto"` adds in another order: of each kind of round one.
TENSOR = TOGETHER[:3]
# One rank reads one chunk and writes 2 tokens, the other one several and 52 more; a prompt of one token has no chunk.
SHORT = {"max_new_tokens": 2, "prompts": [PROMPTS[1]], "prefill_chunk_size": 4}
LONG = {"max_new_tokens": 54, "prompts": [PROMPTS[0], PROMPTS[2]], "prefill_chunk_size": 4}
ONE = {**SHORT, "prompts": [PROMPTS[2]]}
SYNCED = [
    ({**SHORT, **PLAIN}, {**LONG, **PLAIN}),
    ({**LONG, **TREE, "max_new_tokens": 12}, {**ONE, **TREE}),
    ({**ONE, **TREE, "draft": True}, {**LONG, **TREE, "draft": True, "max_new_tokens": 12}),
]
SYNCED = [[{"do_sample": False, **case} for case in pair] for pair in SYNCED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks"))


def launch(folder, cases: dict[str, list], output: Path) -> subprocess.Popen:
    path = output.with_suffix(".cases.json")
    path.write_text(json.dumps(cases), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    return subprocess.Popen(
        [*command, str(folder), str(path), str(output)],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """What two processes wrote."""
    output = tmp_path_factory.mktemp("written") / "texts.json"
    process = launch(folder, {"expert": TOGETHER, "tensor": TENSOR, "synced": SYNCED}, output)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pair(folder):
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())
    return target, AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "plan, number",
    [(plan, n) for plan, cases in (("expert", TOGETHER), ("tensor", TENSOR)) for n in range(len(cases))],
)
def test_ranks_that_hold_one_model_write_what_one_process_writes(written, pair, plan, number):
    torch.manual_seed(0)
    assert written[plan][number] == run_case(*pair, **TOGETHER[number] | {"static": False})


@pytest.mark.parametrize("number", range(len(SYNCED)))
def test_ranks_in_step_write_what_each_writes_alone(written, pair, number):
    assert written["synced"][number] == [run_case(*pair, **case) for case in SYNCED[number]]


@pytest.mark.parametrize("chain", [True, False])
def test_a_tree_is_agreed_on_without_waiting_for_the_device(monkeypatch, chain):
    """Nothing can be read from a meta tensor."""
    monkeypatch.setattr(dist, "broadcast", lambda *args, **options: None)
    tokens = torch.zeros(2, 3, dtype=torch.long, device="meta")
    tree = TokenTree.chain(tokens) if chain else TokenTree.from_parents(tokens, tokens, 2, tokens.bool())
    agreed = Ranks(None).agree_on_tree(tree, 6)
    assert agreed.is_chain == chain and agreed.paths.shape == (2, 3, 3) and agreed.valid.dtype == torch.bool


def test_synced_gpus_needs_a_process_group(pair):
    with pytest.raises(ValueError, match="no process group is initialised"):
        run_case(*pair, **SYNCED[0][0], synced_gpus=True)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(folder, tmp_path):
    output, deadline = tmp_path / "texts.json", time.monotonic() + 300
    process = launch(folder, {"expert": [{**TOGETHER[0], "max_new_tokens": 4000}]}, output)
    while not Path(f"{output}.started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ()["RANK"] == "1"]
    victim.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and f"Signal 9 (SIGKILL) received by PID {victim.pid}" in said
