"""lm-eval's `HFLM` on a model with a default `tree_config`: its answers are those of plain decoding and of stock."""

import json
from pathlib import Path

import pytest
from oracle import build_model, tiny_config
from test_cli import SPECIAL_TOKENS, byte_tokenizer
from transformers.generation.utils import GenerationMixin

import hf_treespec
from hf_treespec import TreeConfig


# An extra of its own (`lm-eval`): some of what it needs is built from source when it is installed.
lm_eval = pytest.importorskip("lm_eval", reason="needs `pip install 'hf-treespec[lm-eval]'`")

QUESTIONS = ["two and two", "one and one", "a longer question than the others", "three", "nine less four"]
CONTINUE = """
task: tiny_continue
output_type: generate_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "Q: {{{{question}}}} A:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e", "Q:"], max_gen_toks: 24, do_sample: {sampled}{more}}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """
task: tiny_choose
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "Q: {{{{question}}}} A:"
doc_to_choice: [" yes", " no", " perhaps"]
doc_to_target: 0
"""


@pytest.fixture(scope="module")
def pair():
    tokenizer = byte_tokenizer()
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    target = hf_treespec.enable(build_model(tiny_config(**special)))
    assert SPECIAL_TOKENS[2] == tokenizer.eos_token
    return target, tokenizer


@pytest.fixture()
def tasks(tmp_path, monkeypatch):
    """Two local tasks; nothing of lm-eval's own is indexed."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": "x"}) + "\n" for q in QUESTIONS))
    for name, text in (("continue", CONTINUE), ("choose", CHOOSE)):
        values = {"data": data, "sampled": "false", "more": ""}
        Path(tmp_path, f"{name}.yaml").write_text(text.format(**values))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(model, tokenizer, tasks) -> dict[str, list]:
    """What the model answered in each task, one entry per question."""
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    results = lm_eval.simple_evaluate(
        model=wrapped,
        tasks=["tiny_continue", "tiny_choose"],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}


def test_hflm_uses_the_default(pair, tasks, monkeypatch):
    """Generation goes through trees, batched with left padding and lm-eval's own stopping criteria; likelihoods, which
    need no generation, are stock's."""
    model, tokenizer = pair
    stock = evaluate(model, tokenizer, tasks)
    answers, calls, generate = {}, [], GenerationMixin.generate

    def watched(self, *args, **kwargs):
        calls.append(kwargs.get("custom_generate") is not None)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    for name, config in (
        ("plain", TreeConfig(budget=1)),
        ("tree", TreeConfig(budget=8, drafter="ngram")),
        ("again", TreeConfig(budget=1)),
    ):
        hf_treespec.set_default(model, config)
        answers[name] = evaluate(model, tokenizer, tasks)
    hf_treespec.set_default(model, None)
    assert calls and all(calls)
    assert answers["tree"] == answers["plain"] == answers["again"]
    assert answers["plain"]["tiny_choose"] == stock["tiny_choose"]
    texts = [resps[0][0] for resps in answers["tree"]["tiny_continue"]]
    assert len(texts) == len(QUESTIONS) and len(set(texts)) > 1 and all("e" not in text for text in texts)
