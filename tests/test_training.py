"""Training heads: what the losses compare is what drafting computes, and a few steps make a useless head useful."""

import pytest
import torch
from decoding import run
from heads import dspark_settings, shrink_layers
from oracle import build_model, generator, random_texts, tiny_config

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.drafting.dspark import DSparkTreeGenerator
from hf_treespec.drafting.mtp import MTPTreeGenerator
from hf_treespec.heads import attach_head
from hf_treespec.training import losses, train
from hf_treespec.training.train import new_head, train_head


PLAIN = {"tree_config": {"budget": 1}}


@pytest.fixture(scope="module")
def target():
    model = build_model(tiny_config())
    shrink_layers(model)
    return hf_treespec.enable(model)


def fresh_head(target, kind: str):
    head = new_head(target, kind, dspark_settings(target.config), seed=1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator(len(name))))
    return head.eval()


def drafted_logits(target, head, text, depth: int) -> list[torch.Tensor]:
    """Logits along a chain of given tokens: the last `depth` of `text` are drafted behind the others."""
    from test_mtp import MadeUpRounds

    kinds = {"mtp": MTPTreeGenerator, "dspark": DSparkTreeGenerator}
    seen = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        kind = kinds[head.kind]
        add = kind._add_candidates

        def force(self, logits, valid):
            seen.append(logits[0, 0])
            forced = torch.full_like(logits, -1e4)
            forced[0, 0, text[len(text) - depth + len(seen) - 1] if len(seen) <= depth else 0] = 0.0
            add(self, forced, valid)

        monkeypatch.setattr(kind, "_add_candidates", force)
        config = TreeConfig(budget=depth + 1, top_k=1)
        rounds = MadeUpRounds(target, head, config, [text[: len(text) - depth]], 64, drafter=kind)
        with torch.no_grad():
            rounds.drafter.propose(None, text[len(text) - depth - 1][None], depth)
    return seen


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_the_loss_sees_what_drafting_computes(target, kind, monkeypatch):
    """The logits of every step behind one anchor of a whole text are those of the drafter at that place."""
    head, depth = fresh_head(target, kind), 4 if kind == "mtp" else 5
    text = random_texts(generator(4), (31,))[0]
    expected = drafted_logits(target, head, text, depth)
    compared = []

    def compare(logits, target):
        compared.append(logits)
        return logits.sum() * 0

    monkeypatch.setattr(losses, "_divergence", compare)
    learner = train._Learner(target, head)
    with torch.no_grad():
        features = learner._see([(text.tolist(), 0), (text.tolist()[:7], 0)])
        if kind == "mtp":
            losses.mtp_loss(target, head, features, depth)
        else:
            monkeypatch.setattr(
                torch, "rand", lambda *shape, **_: torch.tensor([[0.0], [0.999]])[: shape[0], : shape[1]]
            )
            root = len(text) - depth - 1
            monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, (root - 0.5) / (len(text) - 6)))
            losses.dspark_loss(target, head, features, 1, generator(1))
    for step, logits in enumerate(expected):
        # Of MTP every position is an anchor; a step has one position less than the one before.
        found = compared[step][len(text) - depth - 2 if kind == "mtp" else 0]
        difference = float((found - logits).abs().max() / logits.abs().max())
        assert difference <= 1e-5, (step, difference)


@pytest.mark.parametrize("kind", ["mtp", pytest.param("dspark", marks=pytest.mark.slow)])
def test_training_pays(target, kind, tmp_path, monkeypatch):
    """A few steps on the model's own text, interrupted and resumed, lengthen what is accepted of unseen text."""
    rows = [(text.tolist(), 12) for text in run(target, random_texts(generator(7), (12,) * 40), 24, **PLAIN)[1]]
    unseen = random_texts(generator(8), (12,) * 8)
    _, expected = run(target, unseen, 24, **PLAIN)
    head, resumed = (new_head(target, kind, dspark_settings(target.config), seed=1) for _ in range(2))

    def rounds() -> int:
        attach_head(target, head)
        output, written = run(target, unseen, 24, tree_config={"budget": 5, "top_k": 1})
        assert torch.equal(torch.cat(written), torch.cat(expected))
        return output.tree_stats["rounds"]

    before = rounds()
    monkeypatch.setattr(train, "SAVE_EVERY", 10)
    options = {"steps": 40, "batch_size": 8, "max_length": 64, "learning_rate": 5e-3, "seed": 0}
    history = train_head(target, head, rows, tmp_path / "whole.pt", **options)
    after = rounds()
    assert after < {"mtp": 0.8, "dspark": 0.92}[kind] * before, (before, after)
    assert all(p.grad is None and p.requires_grad for p in target.parameters())

    def interrupt(self, texts, step) -> torch.Tensor:
        if step == 25:
            raise KeyboardInterrupt
        return loss(self, texts, step)

    loss = train._Learner.loss
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(train._Learner, "loss", interrupt)
        train_head(target, resumed, rows, tmp_path / "state.pt", **options)
    assert all(p.requires_grad for p in target.parameters())
    assert train_head(target, resumed, rows, tmp_path / "state.pt", **options) == history
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, head.state_dict()[name]), name
    hf_treespec.enable(hf_treespec.disable(target))


def test_long_prompts_leave_something_to_train_on(target, tmp_path):
    """Texts are cut at their front: of prompts alone there would be no loss, and the head would come out as NaN."""
    rows = [(text.tolist(), 40) for text in random_texts(generator(5), (44,) * 6)]
    assert train._cut(*rows[0], 16) == (rows[0][0][-16:], 12)
    assert train._cut(*rows[0], 64) == rows[0]
    head = new_head(target, "mtp", {}, seed=1)
    options = {"steps": 1, "batch_size": 4, "max_length": 16, "learning_rate": 1e-3, "seed": 0}
    (loss,) = train_head(target, head, rows, tmp_path / "state.pt", **options)
    assert 0 < loss < 20 and all(parameter.isfinite().all() for parameter in head.parameters())


class WantsScale:
    """A learner that would have a head's logits `factor` times as large as they are."""

    def __init__(self, head, factor: float) -> None:
        self.head, self.wanted = head, factor * head.norm.weight.mean()

    def loss(self, texts, step) -> torch.Tensor:
        return (self.head.norm.weight.mean() - self.wanted).abs()


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_logits_are_scaled_to_fit(target, kind, monkeypatch):
    head = fresh_head(target, kind)
    logits = []
    monkeypatch.setattr(losses, "_divergence", lambda found, wanted: logits.append(found) or found.sum() * 0)
    texts = [(text.tolist(), 4) for text in random_texts(generator(4), (20, 31))]
    for factor in (1.0, 0.6):
        train._fit_scale(head, WantsScale(head, factor), texts)
        train._Learner(target, head).loss(texts, 0)
    steps = len(logits) // 2
    for before, after in zip(logits[:steps], logits[steps:]):
        torch.testing.assert_close(after, 0.6 * before, rtol=1e-4, atol=1e-6)
