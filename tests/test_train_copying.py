"""`examples/train_copying.py`: what it shows attention is what is copied."""

import sys
from pathlib import Path

import pytest
import torch
from oracle import build_model, tiny_config
from transformers import AutoTokenizer

from hf_treespec.demo import checkpoint


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_copying as copying  # noqa: E402


WINDOW = 64


@pytest.fixture(scope="module")
def rows():
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("tiny-target"))
    code = (
        "def add(a, b):\n    total = a + b\n    return total\n\nprint(add(2, 3))\nfor name in names:\n    print(name)"
    )
    text = "The sea was calm. She walked along the shore and counted ships.\nNobody came that day, nor the next."
    documents = {kind: [code] for kind in copying.CODE} | {kind: [text] for kind in copying.TEXT}
    return copying.Copying(documents, tokenizer, share=0.5, seed=0).rows(4)


def test_sources_are_what_comes_next(rows):
    ids, copied, sources = rows
    assert ids.shape == (4, copying.LENGTH + 1) and copied.shape == sources.shape == (4, copying.LENGTH)
    known = sources >= 0
    assert known.sum() > 500 and (copied | ~known).all()
    assert torch.equal(ids.gather(1, sources.clamp(min=0))[known], ids[:, 1:][known])
    # Copied is more than is shown: the end of an answer stands nowhere before.
    assert (ids[:, 1:][copied & ~known] == 1).all()


def test_columns_are_those_of_the_blocks(rows):
    shown = copying.columns(rows[2], WINDOW)
    assert shown.shape == (4, copying.LENGTH // WINDOW, WINDOW)
    count = 0
    for row, places in zip(shown.flatten(1).tolist(), rows[2].tolist()):
        for own, (column, place) in enumerate(zip(row, places)):
            inside = place >= 0 and own - WINDOW < place <= own
            assert column == (place - own // WINDOW * WINDOW + WINDOW if inside else -1)
            count += inside
    assert count > 400


def test_the_mean_of_two_runs(tmp_path):
    halves, names = [], ("one", "other")
    for seed, name in enumerate(names):
        model = build_model(tiny_config(), seed=seed)
        model.save_pretrained(tmp_path / name)
        halves.append(model)
    mean = copying.mean_of([tmp_path / name for name in names])
    for got, *parts in zip(*(model.parameters() for model in (mean, *halves))):
        torch.testing.assert_close(got, sum(parts) / 2)
