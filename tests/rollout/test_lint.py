"""Lint: why a check is weak, the same check as a `Check`, and tasks that are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.errors import TrustError
from openenv.rollout import Check, Task, read_task
from openenv.rollout.verify.lint import require_trust

FILES = {
    "tests/test_square.py": "import pytest\nimport numpy as np\nfrom square import square\n",
    "check.py": "import json\nfrom square import square\nassert square(2) == 4\n",
    "cases/1.in": "3\n",
    "cases/1.out": "9\n",
}


def task(*checks: str | Check, **fields: Any) -> Task:
    return Task.model_validate(
        {"instruction": "Write square.py", "verify": checks, "verify_files": FILES, "task_id": "sq", **fields}
    )


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ('[ "$(sh square.sh 7)" = 49 ]', {"run": "sh square.sh 7", "judge": '[ "$(cat "$OUTPUT/stdout")" = 49 ]'}),
        ("! test $(./a.out) = 3", {"run": "./a.out", "judge": '! test "$(cat "$OUTPUT/stdout")" = 3'}),
        (
            "./a.out < cases/1.in | diff - cases/1.out",
            {"run": "./a.out < cases/1.in", "judge": 'cat "$OUTPUT/stdout" | diff - cases/1.out'},
        ),
        (
            'gcc -o sq sq.c && [ "$(./sq 7)" = 49 ]',
            {
                "run": "gcc -o sq sq.c >&2 || exit 1; ./sq 7; true",
                "judge": '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && [ "$(cat "$OUTPUT/stdout")" = 49 ]',
            },
        ),
        ("[ $(./a.out | wc -l) -ge 3 ]", {"run": "./a.out", "judge": '[ "$(cat "$OUTPUT/stdout" | wc -l)" -ge 3 ]'}),
        (
            "cc -o sq sq.c && ! ./sq | grep -q error",
            {
                "run": "cc -o sq sq.c >&2 || exit 1; ./sq; true",
                "judge": '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && ! cat "$OUTPUT/stdout" | grep -q error',
            },
        ),
        (
            "./a.out > out.txt && cmp out.txt cases/1.out",
            {
                "run": "./a.out > out.txt",
                "judge": '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && cmp "$OUTPUT/files/out.txt" cases/1.out',
                "keep": ["out.txt"],
            },
        ),
        ("python3 -m pytest -q tests", {"pytest": "tests", "of": "square"}),
        ("pytest -x tests/test_square.py", {"pytest": "tests/test_square.py", "of": "square", "options": "-x"}),
        ("pytest", {"pytest": "tests/test_square.py", "of": "square"}),
        ("python3 check.py", {"python": "check.py", "of": "square"}),
        ("python3 -c 'import square'", {"python": "-c 'import square'", "of": "square"}),
        (
            "grep -qx 42 answer.txt",
            {"run": "true", "judge": 'grep -qx 42 "$OUTPUT/files/answer.txt"', "keep": ["answer.txt"]},
        ),
        *(
            (line, {"run": "true", "judge": judge, "keep": [keep]})
            for line, judge, keep in (
                (
                    "! grep -qi 'to do' a.py",
                    """grep -q . "$OUTPUT/files/a.py" && ! grep -qi 'to do' "$OUTPUT/files/a.py\"""",
                    "a.py",
                ),
                ("[[ $(cat a.txt) == 42 ]]", '[ "$(cat "$OUTPUT/files/a.txt")" = 42 ]', "a.txt"),
                ('x=$(cat a.txt); [ "$x" = 42 ]', '[ "$(cat "$OUTPUT/files/a.txt")" = 42 ]', "a.txt"),
                (
                    "if [ -e a.txt ]; then grep -q x a.txt; else false; fi",
                    '[ -e "$OUTPUT/files/a.txt" ] && grep -q x "$OUTPUT/files/a.txt"',
                    "a.txt",
                ),
                ("cd out && grep -q x a.txt", 'grep -q x "$OUTPUT/files/out/a.txt"', "out/a.txt"),
                ("sed -n 2p a.txt | grep -qx b", 'sed -n 2p "$OUTPUT/files/a.txt" | grep -qx b', "a.txt"),
            )
        ),
        ("make test", None),
        ("echo $((x)); ./a.out", None),
        ("[[ x ]]", None),
    ],
)
def test_the_same_check_is_derived_where_it_can_be(line: str, suggestion: dict[str, object] | None) -> None:
    [reading] = read_task(task(line))
    assert reading.suggestion == suggestion
    if suggestion is not None:  # it is a check of a task file, and judged
        [better] = read_task(task(verify=[suggestion]))
        assert (better.trust, better.suggestion) == ("judged", None)


@pytest.mark.parametrize(
    "line",
    [
        # of several decisions, all but the last would be in `run`, beside the agent's code
        'grep -qx X a.txt && git show HEAD:f | grep -qx Y && [ "$(git show HEAD:f | wc -l)" = 3 ]',
        "grep -qx X a.txt && ./a.out | grep -qx Y",
        "./a.out --check && ./a.out | diff - cases/1.out",
        "test -s a.txt && ./a.out > out.txt && cmp out.txt cases/1.out",
        "grep -q x a.txt > /dev/null && ./a.out > out.txt && cmp out.txt cases/1.out",
        "make test && ./a.out | diff - cases/1.out",
        "! gcc -o sq sq.c && [ $(./sq) = 3 ]",
        # one that is hidden in the command that prints
        '[ "$(git show HEAD:f | grep -qx Y && echo ok)" = ok ]',
        '[ "$(./a.out && echo ok)" = ok ]',
        '[ "$(! ./a.out)" = ok ]',
        "(./a.out || echo failed) | grep -qx ok",
        "if ./a.out; then echo ok; fi | grep -q ok",
        """sh -c './a.out && echo ok' | grep -q ok""",
        """python3 -c 'from square import square; print("ok" if square(2) == 4 else "bad")' | grep ok""",
        """node -e 'if (require("./square")(2)) console.log("ok")' | grep ok""",
        'echo "$(./a.out && echo ok)" | grep ok',
        "python3 check.py | grep -q passed",
        "pytest tests | grep -q passed",
        # other files than the line sees
        "cd app && ./a.out | diff - expected.txt",
        'cd app && [ "$(./a.out | diff - expected.txt)" = "" ]',
        '[ -f "$(./a.out)" ]',
        '[ "$(./a.out)" = "$(cat expected.txt)" ]',
    ],
)
def test_a_decision_is_never_moved_beside_the_agents_code(line: str) -> None:
    [reading] = read_task(task(line))
    assert (reading.trust, reading.suggestion) == ("shared", None)


def test_a_reading_says_what_may_run() -> None:
    reasons = [reading.reason for reading in read_task(task("python3 check.py", "./a.out", "grep x y", "[[ x ]]"))]
    assert "imports square" in reasons[0]
    assert "./a.out" in reasons[1]
    assert "only reads data" in reasons[2]
    assert "not in the list of safe forms: '[[ x ]]'" in reasons[3]


def test_a_task_with_a_weaker_check_than_it_asks_for_is_refused_with_the_line_and_the_better_form() -> None:
    weak = task("grep -q x a.txt", "python3 check.py", min_trust="isolated")
    with pytest.raises(TrustError, match=r"(?s)Check 2 of task 'sq' is shared.*check.py.*imports square.*\"of\""):
        require_trust(weak, None)
    with pytest.raises(TrustError, match=r"(?s)Check 1 .* is isolated, and judged is required.*OUTPUT/files/a.txt"):
        require_trust(weak, "judged")
    with pytest.raises(TrustError, match="`run`, which runs the agent's part"):
        require_trust(task("make test"), "isolated")


def test_a_task_whose_checks_reach_the_minimum_passes() -> None:
    judged = Check(run="./a.out", judge='grep -q x "$OUTPUT/stdout"')
    require_trust(task("grep -q x a.txt", judged, min_trust="isolated"), "shared")
    require_trust(task(judged, min_trust="judged"), "judged")
    require_trust(task("make test"), None)
    require_trust(task(), "judged")


def test_sandboxes_without_isolation_reach_nothing() -> None:
    judged = Check(run="./a.out", judge='grep -q x "$OUTPUT/stdout"')
    with pytest.raises(TrustError, match="isolate nothing"):
        require_trust(task(judged), "isolated", isolated=False)
    require_trust(task(judged), "shared", isolated=False)


def test_an_initial_file_as_the_expected_one_is_compared_in_the_judges_sandbox() -> None:
    [reading] = read_task(task("cmp out.txt data/want.txt", files={"data/want.txt": "42\n"}))
    assert reading.trust == "shared"
    assert reading.suggestion == {
        "run": "true",
        "judge": 'cmp "$OUTPUT/files/out.txt" data/want.txt',
        "keep": ["out.txt"],
    }
