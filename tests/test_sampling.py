"""Sampling: a request's text depends on its prompt and seed alone, and is distributed as the target says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import CHAIN, TREE, make_assistant, run
from heads import make_checkpoint, make_dspark_checkpoint
from oracle import generator, left_pad, random_texts
from transformers import AutoModelForCausalLM, GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper

import hf_treespec
from hf_treespec import TokenTree, ops
from hf_treespec.oracle import oracle_logits
from hf_treespec.processors import bind
from hf_treespec.sampling import SEED_RANGE, gumbel_noise, perturbed, resolve_seeds
from hf_treespec.selection import TokenSelector
from hf_treespec.texts import Texts


PROMPTS = random_texts(generator(3), (9, 14, 1, 22))
SEEDS = [5, -(2**62), 5, 2**63 - 1]
PLAIN = {"budget": 1}


def sample(model, prompts=PROMPTS, new_tokens: int = 24, **options):
    return run(model, prompts, new_tokens, **{"do_sample": True, "top_k": 0, "seeds": SEEDS, **options})


@pytest.fixture(scope="module")
def plain(model):
    return sample(model, tree_config=PLAIN)[1]


# Noise


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(8), torch.arange(8) * 1000, 200_000).double()
    assert noise.isfinite().all()
    # Mean Euler's constant, variance pi^2 / 6, and the distribution function at a few places.
    assert abs(noise.mean() - 0.5772) < 0.005 and abs(noise.var() - 1.6449) < 0.01
    for place in (-1.5, 0.0, 1.0, 4.0, 8.0):
        expected = torch.exp(-torch.exp(torch.tensor(-place, dtype=torch.float64)))
        spread = (expected * (1 - expected) / noise.numel()).sqrt()
        assert abs((noise <= place).double().mean() - expected) < 5 * spread + 1e-6
    # Extreme hash values stay finite.
    assert noise.max() > 12 and noise.min() < -2.5


def test_noise_is_the_same_for_the_same_key_and_unrelated_otherwise():
    seeds, positions = torch.tensor([[1, 1], [2, -1]]), torch.tensor([[0, 1], [0, 0]])
    noise = gumbel_noise(seeds, positions, 50_000)  # [2, 2, V]
    for row in range(2):
        for column in range(2):
            alone = gumbel_noise(seeds[row, column], positions[row, column], 50_000)
            assert torch.equal(noise[row, column], alone)
    # Part of a larger vocabulary draws the same.
    assert torch.equal(gumbel_noise(seeds, positions, 100), noise[..., :100])
    correlation = torch.corrcoef(noise.flatten(0, 1)) - torch.eye(4)
    assert correlation.abs().max() < 0.02
    # Nor is one text's noise another's in another order.
    ordered = noise.flatten(0, 1).sort(1).values
    assert (ordered[:1] != ordered[1:]).float().mean() > 0.9


def test_noise_is_pinned():
    """Seeds outlive versions: these values may never change."""
    noise = gumbel_noise(torch.tensor([0, 42, SEED_RANGE[0]]), torch.tensor([0, 7, 2**31]), 3)

    torch.testing.assert_close(noise, torch.tensor(PINNED), rtol=1e-5, atol=1e-6)


PINNED = [
    [0.06274944, -0.49831182, 0.90116280],
    [2.62770414, 0.16489062, -0.21605654],
    [0.49782515, 0.80952626, 0.67015648],
]


def test_banned_tokens_are_never_drawn():
    rng = generator(0)
    draws = 0
    for step in range(25):
        scores = torch.randn(40_000, 6, generator=rng)
        banned = torch.rand(scores.shape, generator=rng) < 0.6
        banned[torch.arange(len(scores)), torch.randint(6, (len(scores),), generator=rng)] = False
        values = torch.tensor([float("-inf"), float("nan"), float("inf")])[
            torch.randint(3, scores.shape, generator=rng)
        ]
        scores = torch.where(banned, values, scores)
        seeds = torch.full((len(scores),), step)
        drawn = perturbed(scores, gumbel_noise(seeds, torch.arange(len(scores)), 6)).argmax(-1)
        assert not banned.gather(1, drawn[:, None]).any()
        draws += len(scores)
    assert draws == 10**6


# Distribution


def markov(rows: int, tree: TokenTree, table: torch.Tensor, seeds, position: int):
    """What the acceptance function emits for `rows` copies of a tree over a Markov chain `table` `[V, V]`."""
    fork = SimpleNamespace(
        tree=tree,
        rows=None,
        lengths=torch.full((rows,), position),
        max_length=position,
        cache=SimpleNamespace(token_ids=torch.zeros(rows, position, dtype=torch.long)),
    )
    texts = Texts(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, dtype=torch.long), 4)
    steps = [bind(TemperatureLogitsWarper(0.7)), bind(TopKLogitsWarper(2))]
    predicted = TokenSelector(texts, steps, seeds)(table[tree.tokens], fork).tokens
    path, lengths = ops.accept(tree.tokens, tree.paths, tree.valid, predicted)
    return predicted.gather(1, path.clamp(min=0)), lengths


@pytest.mark.parametrize("kind", ["good", "terrible"])
def test_distribution_against_enumeration(kind):
    """Chi-square of next-token and two-token frequencies, 100,000 draws, for good drafts and for the worst ones."""
    rows, table = 100_000, torch.randn(5, 5, generator=generator(1))
    kept = table >= table.topk(2).values[:, -1:]
    probabilities = (table / 0.7).masked_fill(~kept, float("-inf")).softmax(-1).double()
    ranked = table.argsort(descending=kind == "good")
    first, second = ranked[0, 0], ranked[0, 1]
    # Both children of the root, and a child below the better one.
    tokens = torch.stack([torch.tensor(0), first, second, ranked[first, 0]]).expand(rows, 4)
    tree = TokenTree.from_parents(tokens, torch.tensor([0, 0, 0, 1]).expand(rows, 4), max_depth=2)
    seeds = torch.arange(rows) * 7919
    emitted, lengths = markov(rows, tree, table, seeds, 3)
    assert (lengths == 1).all() == (kind == "terrible")
    # Where only one token was emitted, the second comes from the next round.
    root = TokenTree.chain(emitted[:, :1])
    following = markov(rows, root, table, seeds, 4)[0][:, 0]
    following = torch.where(lengths > 1, emitted[:, 1], following)
    pairs = torch.bincount(emitted[:, 0] * 5 + following, minlength=25).double()
    joint = (probabilities[0][:, None] * probabilities).flatten()
    assert_fits(pairs.view(5, 5).sum(1), probabilities[0] * rows)
    assert_fits(pairs, joint * rows)


def assert_fits(counts, expected) -> None:
    """Chi-square at p > 0.001; what cannot happen never does."""
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # Upper 0.1 % points for 1, 2, 3 degrees of freedom; top_k=2 leaves two tokens, or four pairs.
    assert statistic < [10.83, 13.82, 16.27][int(possible.sum()) - 2]


# Texts


def test_sampled_texts_are_the_oracles(model, plain):
    """Oracle logits, temperature and noise by hand: the same token at every place."""
    for prompt, text, seed in zip(PROMPTS, plain, SEEDS):
        logits = oracle_logits(model, text[None, :-1])[0, len(prompt) - 1 :]
        positions = torch.arange(len(prompt), len(text))
        drawn = logits + gumbel_noise(torch.full_like(positions, seed), positions, logits.shape[-1])
        gap = drawn.amax(-1) - drawn.gather(1, text[len(prompt) :, None])[:, 0]
        assert gap.max() < 1e-4
    # The third prompt and the first share a seed, and nothing else.
    assert not torch.equal(plain[0][-20:], plain[2][-20:])


@pytest.mark.parametrize("tree", [CHAIN, TREE, {"budget": 16}], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.95}, {"temperature": 1.5, "min_p": 0.05, "typical_p": 0.9}],
    ids=["plain", "usual", "hot"],
)
def test_trees_write_the_plain_text(model, drafter, tree, options):
    plain = sample(model, **options, tree_config=PLAIN)[1]
    output, texts = sample(model, **options, tree_config=tree, assistant_model=drafter)
    assert torch.equal(torch.cat(texts), torch.cat(plain))
    assert len(output.tree_stats["accepted_lengths"]) >= 2


def test_alone_in_batches_and_in_any_order(model, drafter, plain):
    options = {"tree_config": TREE, "assistant_model": drafter}
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(sample(model, [prompt], seeds=SEEDS[row : row + 1], **options)[1][0], plain[row])
    order = [2, 0, 3, 1, 0]
    texts = sample(model, [PROMPTS[i] for i in order], seeds=[SEEDS[i] for i in order], **options)[1]
    assert all(torch.equal(text, plain[i]) for text, i in zip(texts, order))


def test_rows_that_leave_early(model, drafter):
    ends = {"eos_token_id": [3, 11, 29, 47], "pad_token_id": 0}
    outputs = [sample(model, tree_config=tree, assistant_model=drafter, **ends)[0] for tree in (PLAIN, TREE)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert len(set((outputs[0].sequences[:, max(map(len, PROMPTS)) :] == 0).sum(1).tolist())) > 1


def test_seeds_come_from_the_default_generator(model, drafter):
    def draw(tree, seeds=None):
        torch.manual_seed(3)
        output, texts = sample(model, tree_config=tree, assistant_model=drafter, seeds=seeds)
        return output.tree_stats["seeds"], texts

    seeds, texts = draw(PLAIN)
    assert len(set(seeds)) == len(PROMPTS) and all(type(seed) is int for seed in seeds)
    for other in (draw(TREE), draw(CHAIN, seeds)):
        assert other[0] == seeds and torch.equal(torch.cat(other[1]), torch.cat(texts))
    torch.manual_seed(4)
    assert sample(model, tree_config=PLAIN, seeds=None, new_tokens=2)[0].tree_stats["seeds"] != seeds
    assert run(model, PROMPTS, 2, tree_config=PLAIN)[0].tree_stats["seeds"] is None


# Drafting with the same noise


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5}], ids=["plain", "warped"])
def test_the_target_accepts_every_token_it_drafted_itself(model, options):
    tree = {"budget": 6, "top_k": 1}
    output, _ = sample(model, tree_config=tree, assistant_model=model, **options)
    assert output.tree_stats["accepted_lengths"] == {6: len(PROMPTS) * 4}


@pytest.mark.parametrize("kind", ["deepseek_v4", "llama"])
def test_any_assistant(model, plain, kind):
    texts = sample(model, tree_config=TREE, assistant_model=make_assistant(kind))[1]
    assert torch.equal(torch.cat(texts), torch.cat(plain))


@pytest.mark.parametrize("make", [make_checkpoint, make_dspark_checkpoint], ids=["mtp", "dspark"])
def test_draft_heads(make, tmp_path):
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(make(tmp_path)).eval())
    outputs = [sample(target, tree_config=tree)[0] for tree in (PLAIN, {"budget": 6})]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[1].tree_stats["nodes"] > outputs[1].tree_stats["rounds"]


# Several sequences of one prompt


@pytest.mark.parametrize("kind", ["deepseek_v4", "llama", None], ids=str)
def test_num_return_sequences(model, target, kind):
    """Rows are those of the repeated prompt, and every model reads each prompt once."""
    model, assistant = (target, None) if kind is None else (model, make_assistant(kind))
    options = {"tree_config": TREE, "assistant_model": assistant}
    prompts, seeds = PROMPTS[:2], [1, 2, 3, 4, 5, 6]
    expected = sample(model, [prompt for prompt in prompts for _ in range(3)], seeds=seeds, **options)[0]
    models = [model] if assistant is None else [model, assistant]
    read = dict.fromkeys(range(len(models)), 0)

    def count(module, args, kwargs):
        # Prefill forwards are those that keep one row of logits per prompt.
        if isinstance(kwargs.get("logits_to_keep"), torch.Tensor):
            read[models.index(module)] += kwargs["input_ids"].numel()

    handles = [module.register_forward_pre_hook(count, with_kwargs=True) for module in models]
    options |= {"do_sample": True, "top_k": 0, "seeds": seeds, "max_new_tokens": 24, "num_return_sequences": 3}
    output = model.generate(**left_pad(prompts), **options, return_dict_in_generate=True)
    for handle in handles:
        handle.remove()
    assert torch.equal(output.sequences, expected.sequences)
    # The drafter goes on from copies of its state: it drafts as well as from states of its own.
    assert output.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"]
    # In the target's forward, rows share a width.
    width = max(map(len, prompts)) - 1
    assert read == dict.fromkeys(read, len(prompts) * width)


def test_copies_of_a_prompt_differ(model):
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 16, "tree_config": PLAIN}
    sequences = model.generate(PROMPTS[0][None], **options)
    assert len(set(map(tuple, sequences.tolist()))) >= 15


# What is refused


@pytest.mark.parametrize(
    ("seeds", "names"),
    [
        ([1], ["1 values", "2 sequences"]),
        ([1, 2, 3], ["3 values"]),
        ([1, 2.0], ["integers", "2.0"]),
        ([1, True], ["integers"]),
        (7, ["list", "7"]),
        ([1, 2**63], ["int64"]),
        (torch.tensor([1.0, 2.0]), ["integers"]),
    ],
    ids=str,
)
def test_seeds_that_do_not_fit(model, seeds, names):
    with pytest.raises(ValueError) as raised:
        sample(model, PROMPTS[:2], tree_config=PLAIN, seeds=seeds)
    assert all(name in str(raised.value) for name in ["`seeds`", *names])


def test_seeds_that_nothing_would_use(model):
    inputs = left_pad(PROMPTS[:1])
    with pytest.raises(ValueError, match="`seeds`.*`tree_config`"):
        model.generate(**inputs, seeds=[1], do_sample=True, max_new_tokens=2)
    with pytest.raises(ValueError, match="`seeds`.*`do_sample`"):
        model.generate(**inputs, seeds=[1], do_sample=False, max_new_tokens=2, tree_config=PLAIN)


def test_seeds_as_a_tensor_and_greedy_copies(model):
    for seeds in (torch.tensor([3, -4]), np.array([3, -4]), [np.int64(3), -4]):
        assert resolve_seeds(seeds, 2).tolist() == [3, -4]
    with pytest.raises(ValueError, match="num_return_sequences"):
        config = GenerationConfig(num_return_sequences=3)
        model.generate(PROMPTS[0][None], generation_config=config, tree_config=PLAIN, max_new_tokens=2)
