"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "attention" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_example(number):
    assert "\nassert " in EXAMPLES[number] or "check(" in EXAMPLES[number], "an example must check what it shows"
    exec(compile(EXAMPLES[number], f"{README.name} example {number}", "exec"), {})


def test_none_is_forgotten():
    assert len(EXAMPLES) == 3
