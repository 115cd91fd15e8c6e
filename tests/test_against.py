"""Two versions take turns on the same cases."""

import re

import pytest
from typer.testing import CliRunner

from hf_treespec.bench import against


@pytest.mark.slow
@pytest.mark.skipif(not (against.ROOT / ".git").exists(), reason="needs a clone")
def test_this_version_against_its_last_commit(monkeypatch):
    timed = []

    def seconds(self, case: str, original=against.Version.seconds) -> float:
        timed.append((self.root == against.ROOT, case))
        return original(self, case)

    monkeypatch.setattr(against.Version, "seconds", seconds)
    options = ["HEAD", "--pairs", "1", "--tokens", "40", "--steps", "1", "--new-tokens", "6"]
    result = CliRunner().invoke(against.app, options)
    assert result.exit_code == 0, result.output
    rows = re.findall(
        r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \[[\d.]+, [\d.]+\] \|$", result.output, re.MULTILINE
    )
    assert [row[0] for row in rows] == list(against.CASES)
    for _, before, now, ratio in rows:
        assert float(ratio) == pytest.approx(float(now) / float(before), rel=0.05)
    assert timed == [(here, row[0]) for row in rows for here in (True, False)]


def test_what_cannot_be_compared_is_said():
    result = CliRunner().invoke(against.app, ["no-such-revision"])
    assert result.exit_code == 2 and "no-such-revision" in result.output
    result = CliRunner().invoke(against.app, ["HEAD", "--case", "encode"])
    assert result.exit_code == 2 and "prefill" in result.output


ELSEWHERE = """print('"/elsewhere/hf_treespec/__init__.py"')"""


@pytest.mark.parametrize("script,message", [(ELSEWHERE, "instead of the package"), ("1 / 0", "ended")])
def test_a_version_that_does_not_run_is_noticed(tmp_path, monkeypatch, script, message):
    (tmp_path / "cases.py").write_text(script)
    monkeypatch.setattr(against.against_cases, "__file__", str(tmp_path / "cases.py"))
    version = against.Version(against.ROOT, {})
    with pytest.raises(RuntimeError, match=message):
        version.check()
    version.close()
