"""The `evaluate` modules against values computed by hand, imported and loaded from their folders."""

import sys

import evaluate
import pytest
import torch
from oracle import build_model, tiny_config

import hf_treespec
from hf_treespec import metrics
from hf_treespec.oracle import oracle_logits
from hf_treespec.sampling import gumbel_noise


NAMES = {
    "accepted_length": "AcceptedLength",
    "answer_match": "AnswerMatch",
    "losslessness": "Losslessness",
    "speedup": "Speedup",
}


def compute(name: str, **inputs) -> dict:
    return getattr(metrics, NAMES[name])(keep_in_memory=True).compute(**inputs)


def test_the_folders_load_offline(monkeypatch, tmp_path):
    """`evaluate` copies a module's code into a cache and imports that."""
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path))
    inputs = {
        "accepted_length": {"emitted_tokens": [4], "rounds": [2]},
        "answer_match": {"predictions": ["it is 3"], "references": ["3"]},
        "losslessness": {"predictions": [[1, 2]], "references": [[1, 2]]},
        "speedup": {"seconds": [1.0], "baseline_seconds": [2.0]},
    }
    assert set(inputs) == set(NAMES) == set(metrics._EXPORTS.values())
    for name, class_name in NAMES.items():
        loaded = evaluate.load(metrics.metric_folder(name), keep_in_memory=True)
        assert type(loaded).__name__ == class_name
        assert loaded.compute(**inputs[name]) == compute(name, **inputs[name])
        assert loaded.inputs_description.strip().startswith("Args:")
        for argument in inputs[name]:
            assert f"{argument} (`list" in loaded.inputs_description


def test_every_metric_has_a_card():
    for name in NAMES:
        card = (metrics.Path(metrics.metric_folder(name)) / "README.md").read_text(encoding="utf-8")
        assert f"# {name}" in card and f'metric_folder("{name}")' in card


def test_unknown_names():
    with pytest.raises(ValueError, match="'bleu'.*'speedup'"):
        metrics.metric_folder("bleu")
    with pytest.raises(AttributeError, match="Bleu"):
        _ = metrics.Bleu


def test_without_evaluate_the_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    monkeypatch.delitem(sys.modules, "hf_treespec.metrics.speedup.speedup", raising=False)
    with pytest.raises(ImportError, match=r"`Speedup` needs `evaluate`: `pip install 'hf-treespec\[metrics\]'`"):
        _ = metrics.Speedup


def test_accepted_length():
    # 12 tokens in 5 rounds. Resampled: (2, 2), (2, 3), (3, 3) rounds and so on, i.e. 2.0 to 8 / 3.
    found = compute("accepted_length", emitted_tokens=[4, 8], rounds=[2, 3])
    assert found["accepted_length"] == pytest.approx(2.4) and found["without_bonus"] == pytest.approx(1.4)
    assert (found["low"], found["high"]) == (pytest.approx(2), pytest.approx(8 / 3))
    assert found["prompts"] == 2


def test_speedup_is_the_median_of_ratios():
    # Ratios 2, 3 and 10; the ratio of the medians would be 4 / 2.
    found = compute("speedup", seconds=[1.0, 3.0, 2.0], baseline_seconds=[2.0, 9.0, 20.0])
    assert found == {"speedup": 3.0, "low": 2.0, "high": 10.0, "pairs": 3}
    same = compute("speedup", seconds=[0.5, 0.7], baseline_seconds=[0.5, 0.7])
    assert (same["speedup"], same["low"], same["high"]) == (1.0, 1.0, 1.0)


def test_losslessness_without_a_model():
    # Same; differs behind 2 of 3 tokens; ends behind 1 of 4.
    found = compute(
        "losslessness", predictions=[[1, 2, 3], [1, 2, 9], [5]], references=[[1, 2, 3], [1, 2, 3], [5, 6, 7, 8]]
    )
    assert found["identical"] == pytest.approx(1 / 3)
    assert found["token_identity"] == pytest.approx((3 + 2 + 1) / (3 + 3 + 4))
    assert found["first_differences"] == [None, 2, 1]
    assert found["gaps"] == [None, None, None]


def test_losslessness_gaps_of_sampled_texts_are_those_behind_the_noise():
    model = hf_treespec.enable(build_model(tiny_config()))
    prompt, seed = [5, 6, 7], 11
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([3]), 97)[0]
    scores = oracle_logits(model, torch.tensor([prompt]))[0, -1] + noise
    best, worst = int(scores.argmax()), int(scores.argmin())
    texts = {"predictions": [[best]], "references": [[worst]]}
    found = compute("losslessness", **texts, model=model, prompts=[prompt], seeds=[seed])
    assert found["gaps"] == [pytest.approx(float(scores[best] - scores[worst]), rel=1e-5)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "seeds": [seed]}
    drawn = model.generate(torch.tensor([prompt]), tree_config={"budget": 1}, **options)
    assert drawn[0, -1] == best


def test_losslessness_gaps_are_the_oracles():
    model = build_model(tiny_config())
    prompt, common = [7, 8, 9], [4, 5]
    logits = oracle_logits(model, torch.tensor([prompt + common]))[0, -1]
    best, second, third = logits.topk(3).indices.tolist()
    texts = {
        "predictions": [[4, 5, second, 1], [4, 5, best], [4]],
        "references": [[4, 5, third], [4, 5, best], [4, 5]],
    }
    found = compute("losslessness", **texts, model=model, prompts=[prompt] * 3)
    assert found["first_differences"] == [2, None, 1]
    # The worse of the two tokens counts; where a text just ends there is no token to ask about.
    assert found["gaps"] == [pytest.approx(float(logits[best] - logits[third]), rel=1e-4), None, float("inf")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 1,200", "1200"),
        ("costs $1,234.50 in all", "1234.5"),
        ("it fell to -3.0 degrees", "-3"),
        ("minus zero: -0.0", "0"),
        (r"\boxed{12} and then 13", "12"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} of 9", r"\frac{1}{2}"),
        (r"\boxed{ 1,000 }", "1000"),
        (r"unfinished \boxed{5", "5"),
        (r"\boxed{(A)} (B)", "(A)"),
        ("x1 is no number", None),
        ("version 1.2.3", None),
        ("none at all", None),
    ],
)
def test_final_answer(text, answer):
    from hf_treespec.metrics.answer_match.answer_match import final_answer

    assert final_answer(text) == answer


def test_answer_match():
    predictions = ["3 apples, so 12", r"\boxed{0.50}", "no idea", "7"]
    found = compute("answer_match", predictions=predictions, references=["#### 12", "0.5", "3", "8"])
    assert found["matches"] == [True, True, False, False]
    assert found["answer_match"] == 0.5
    # Of 4 draws of a fair coin none hits in 6 %, so the interval reaches from 0 to 1.
    assert (found["low"], found["high"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("accepted_length", {"emitted_tokens": [3], "rounds": [0]}, "Prompt 0 has 3 tokens in 0 rounds"),
        ("accepted_length", {"emitted_tokens": [4, 1], "rounds": [2, 2]}, "Prompt 1 has 1 tokens in 2 rounds"),
        ("speedup", {"seconds": [1.0, 0.0], "baseline_seconds": [1.0, 1.0]}, "Pair 1 took 0.0 and 1.0 seconds"),
        ("answer_match", {"predictions": ["1"], "references": ["none"]}, "Reference 0, 'none'"),
        ("losslessness", {"predictions": [[1]], "references": [[1]], "prompts": [[1]]}, "belong together"),
        (
            "losslessness",
            {"predictions": [[1]], "references": [[1]], "prompts": [[1], [2]], "model": 0},
            "2 rows for 1 texts",
        ),
    ],
)
def test_what_metrics_refuse(name, inputs, message):
    with pytest.raises(ValueError, match=message):
        compute(name, **inputs)
