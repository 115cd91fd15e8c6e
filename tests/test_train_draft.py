"""`examples/train_draft.py` on a handful of texts: what it keeps of the target, and a draft that loads and drafts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec.demo import checkpoint


EXAMPLES = Path(__file__).parents[1] / "examples"


def call(*arguments) -> None:
    subprocess.run([sys.executable, EXAMPLES / "train_draft.py", *map(str, arguments)], check=True)


@pytest.mark.slow
def test_a_draft_is_trained_and_drafts(tmp_path):
    folder = checkpoint("tiny-target")
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(7, 4000, (70, 24), generator=torch.Generator().manual_seed(0))
    rows = [{"ids": row[: 10 + number % 15].tolist(), "prompt_length": 4} for number, row in enumerate(ids)]
    texts, seen = tmp_path / "texts.jsonl", tmp_path / "seen.pt"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call("watch", "--target", folder, "--texts", texts, "--out", seen)
    watched = torch.load(seen)
    # A text says the same with others behind it as alone.
    row = watched[3]
    with torch.no_grad():
        expected = target(torch.tensor([row["ids"]]), use_cache=False).logits[0].log_softmax(-1).topk(48)
    assert torch.allclose(row["log_probabilities"].float(), expected.values, atol=1e-2)
    assert sorted(len(row["ids"]) for row in watched) == sorted(len(row["ids"]) for row in rows)

    call("train", "--seen", seen, "--target", folder, "--out", tmp_path / "draft", "--steps", 2)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.dtype == torch.float32 and draft.config.vocab_size == target.config.vocab_size
    plain = target.generate(ids[:1, :8], max_new_tokens=6, do_sample=False)
    options = {"assistant_model": draft, "tree_config": {"budget": 4}, "max_new_tokens": 6}
    assert torch.equal(hf_treespec.enable(target).generate(ids[:1, :8], **options), plain)
