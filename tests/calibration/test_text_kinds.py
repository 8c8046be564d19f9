from __future__ import annotations

import pytest

from depthdecay.calibration.text_kinds import kind_of


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Here is one:\n```python\nprint(1 + 2)\n```", "code"),
        ("def add(a, b):\n    total = a + b\n    return total\n\nclass Sum:\n    pass\n", "code"),
        ("First, 12 * 3 = 36. Then 36 + 4 = 40, so each of the five has 40 / 5 = 8 apples.", "sums"),
        ("The sky is blue because air scatters the light of the sun, and it does so with short waves most.", "chat"),
        (
            "Der Himmel ist blau, weil die Luft das Licht der Sonne streut.",
            "other languages",
        ),
        ("天空之所以是蓝色的,是因为空气散射阳光。", "other languages"),
        ("", "chat"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert kind_of(text) == kind
