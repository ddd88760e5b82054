"""Labels and names of models and benchmarks: the first = ends the label, unless it belongs to a path."""

import pytest

from poly_epo_jax.evaluate.benchmarks import benchmark_label, label_of, split_label


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a=/path/with=sign", ("a", "/path/with=sign")),
        ("/path/with=sign", ("", "/path/with=sign")),
        ("./a=b", ("", "./a=b")),
        ("a=~/runs/x=y", ("a", "/home/me/runs/x=y")),
        ("~/runs/x", ("", "/home/me/runs/x")),
        ("Qwen/Qwen3-4B", ("", "Qwen/Qwen3-4B")),
    ],
)
def test_labels_and_names(name: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert split_label(name) == expected
    assert label_of(name) == (expected[0] or expected[1].split("/")[-1])


def test_labels_of_benchmarks():
    assert benchmark_label("hard=/data/a=b.jsonl") == "hard"
    assert benchmark_label("/data/a=b.jsonl") == "a=b"
    assert benchmark_label("openai/gsm8k:main:test") == "gsm8k"
