"""Git: find a commit or a lost text in a drawn history."""

from __future__ import annotations

import shlex
from datetime import date, timedelta
from random import Random

from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import ANSWER, NAMES, WORDS, answer_line, write_line


class _History:
    """Shell lines that make a repository, commit by commit."""

    def __init__(self, random: Random) -> None:
        self.lines = ["set -e", "git init -q .", "git config commit.gpgsign false"]
        self._random = random
        self._authors = random.sample(NAMES, 4)
        self._day = date(2026, 1, 1)

    def commit(self, subject: str) -> None:
        """Commit all changes, by one of the authors, on the next day."""
        self._day += timedelta(days=1)
        author = self._random.choice(self._authors)
        # Fixed dates and names give the same commit IDs in every sandbox.
        when = f"{self._day}T12:00:00Z"
        who = f"-c user.name={author} -c user.email={author.lower()}@example.org"
        self.lines.append("git add -A")
        self.lines.append(f"GIT_COMMITTER_DATE={when} git {who} commit -q --date={when} -m {shlex.quote(subject)}")

    def note(self) -> None:
        """Commit something without importance."""
        word, other = self._random.sample(WORDS, 2)
        self.lines.append(f"echo '{other}' >> notes.txt")
        self.commit(f"notes: {word} and {other}")

    def notes(self) -> None:
        """Commit two to seven notes."""
        for _ in range(self._random.randint(2, 7)):
            self.note()


def _culprit(random: Random) -> tuple[_History, str, str]:
    """Ask for the commit that changed a setting."""
    history = _History(random)
    names = random.sample(WORDS, 4)
    values = {name: random.randint(100, 999) for name in names}
    target = random.choice(names)
    history.lines.extend(f"echo '{name} = {value}' >> settings.ini" for name, value in values.items())
    history.commit("settings: initial values")
    history.notes()
    for name in random.sample(names, 4):
        # Subjects do not name the setting: only the changes do.
        subject = f"settings: tune for {random.choice(WORDS)} ({random.randint(100, 999)})"
        new = random.randint(1000, 9999)
        history.lines.append(f"sed -i 's/^{name} = .*/{name} = {new}/' settings.ini")
        history.commit(subject)
        if name == target:
            answer = f"{subject}\n{values[name]}"
        history.notes()
    question = (
        f"One commit changed the value of `{target}` in settings.ini. Write two lines into {ANSWER}: the subject of "
        "that commit, and the value before it."
    )
    return history, question, answer


def _lost(random: Random) -> tuple[_History, str, str]:
    """Ask for the last content of a deleted file."""
    history = _History(random)
    name, *others = random.sample(WORDS, 3)
    history.notes()
    for other in (name, *others):
        history.lines.append(f"echo '{' '.join(random.sample(WORDS, 5))}' > {other}.txt")
    history.commit("texts: three of them")
    history.notes()
    answer = " ".join(random.sample(WORDS, 5))
    history.lines.append(f"echo '{answer}' > {name}.txt")
    history.commit("texts: better words")
    history.notes()
    history.lines.append("rm " + " ".join(f"{each}.txt" for each in (name, *others)))
    history.commit("texts: no longer needed")
    history.notes()
    return history, f"{name}.txt was deleted. Write the last content that it had in a commit into {ANSWER}.", answer


def _draw(random: Random) -> Task:
    history, question, answer = random.choice((_culprit, _lost))(random)
    return Task(
        instruction=f"The work folder is a git repository. {question}",
        setup=("\n".join(history.lines),),
        verify=(answer_line(answer),),
        solution=(write_line(answer),),
    )


GIT = TaskSet("git", "a commit or a lost text in a git history", "isolated", _draw, needs=("git",))
