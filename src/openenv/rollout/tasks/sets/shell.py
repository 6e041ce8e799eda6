"""Shell scripts that evaluate an access log, checked with other logs."""

from __future__ import annotations

from collections import Counter
from random import Random

from openenv.rollout.tasks.checks import Case, case_check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import WORDS

# One line of a log, and its four fields: METHOD PATH STATUS BYTES
#   GET /cedar/river 200 1843
_Line = tuple[str, str, int, int]
_METHODS = ("GET", "GET", "GET", "POST", "PUT", "DELETE")
_STATUSES = (200, 200, 200, 201, 301, 404, 404, 500, 503)
_SCRIPT = "report.sh"


def _log(random: Random, paths: list[str]) -> list[_Line]:
    return [
        (random.choice(_METHODS), random.choice(paths), random.choice(_STATUSES), random.randint(1, 9999))
        for _ in range(random.randint(30, 60))
    ]


def _text(lines: list[_Line]) -> str:
    return "".join(f"{method} {path} {status} {size}\n" for method, path, status, size in lines)


class _Report:
    """One question about a log: its text, a script that answers it, and the answer."""

    def __init__(self, random: Random) -> None:
        self.method = random.choice(("GET", "POST", "PUT", "DELETE"))
        self.status = random.choice((200, 201, 301, 404, 500, 503))
        self.count = random.randint(2, 5)
        self.kind = random.choice(("counted", "summed", "frequent", "largest", "failing"))

    def question(self) -> str:
        """Return the description of the report."""
        return {
            "counted": f"the number of {self.method} requests with the status {self.status}",
            "summed": "for each method in alphabetical order a line with the method, a space, and the sum of its bytes",
            "frequent": f"the {self.count} most frequent paths, one per line, as `COUNT PATH`, the most frequent "
            "first; paths with equal counts in alphabetical order",
            "largest": f"the {self.count} largest numbers of bytes of {self.method} requests, one per line, the "
            "largest first; fewer if there are fewer such requests",
            "failing": "in alphabetical order the paths with at least one status of 500 or more, each once",
        }[self.kind]

    def script(self) -> str:
        """Return the reference solution."""
        return {
            "counted": f"awk '$1 == \"{self.method}\" && $3 == {self.status}' | wc -l | tr -d ' '",
            "summed": "awk '{ sum[$1] += $4 } END { for (each in sum) print each, sum[each] }' | sort",
            "frequent": "awk '{ count[$2]++ } END { for (each in count) print count[each], each }' | "
            f"LC_ALL=C sort -k1,1nr -k2,2 | head -n {self.count}",
            "largest": f"awk '$1 == \"{self.method}\" {{ print $4 }}' | sort -nr | head -n {self.count}",
            "failing": "awk '$3 >= 500 { print $2 }' | LC_ALL=C sort -u",
        }[self.kind]

    def answer(self, lines: list[_Line]) -> str:
        """Return the output for a log."""
        if self.kind == "counted":
            rows = [str(sum(line[0] == self.method and line[2] == self.status for line in lines))]
        elif self.kind == "summed":
            methods = sorted({line[0] for line in lines})
            rows = [f"{method} {sum(line[3] for line in lines if line[0] == method)}" for method in methods]
        elif self.kind == "frequent":
            counts = Counter(line[1] for line in lines)
            rows = [f"{counts[path]} {path}" for path in sorted(counts, key=lambda path: (-counts[path], path))]
        elif self.kind == "largest":
            rows = [str(size) for size in sorted((line[3] for line in lines if line[0] == self.method), reverse=True)]
        else:
            rows = sorted({line[1] for line in lines if line[2] >= 500})
        if self.kind in ("frequent", "largest"):
            rows = rows[: self.count]
        return "".join(f"{row}\n" for row in rows)


def _draw(random: Random) -> Task:
    report = _Report(random)
    paths = ["/" + "/".join(random.sample(WORDS, random.randint(1, 2))) for _ in range(8)]
    example, *hidden = (_log(random, paths) for _ in range(4))
    return Task(
        instruction=f"""Each line of access.log has four fields, separated by single spaces: method, path, status and
number of bytes. Write the shell script {_SCRIPT}. It is called as `sh {_SCRIPT} < access.log`, also with other logs. It
prints {report.question()}. It prints nothing else.
""",
        files={"access.log": _text(example)},
        verify=(
            case_check(f"sh {_SCRIPT}", tuple(Case(stdin=_text(log), stdout=report.answer(log)) for log in hidden)),
        ),
        solution=(f"cat > {_SCRIPT} <<'END'\n{report.script()}\nEND",),
        metadata={"answer": _SCRIPT, "kind": report.kind},
    )


SHELL = TaskSet("shell", "a shell script that evaluates an access log", "judged", _draw)
