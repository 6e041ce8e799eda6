"""`single-turn`: one question, one answer, without tools. It suits small models and tasks with a single file.

Its sandbox needs Python.
"""

# Forms of the reply:
#
#   the task's metadata       the model is asked for        the reply, or its first code block, is
#   {"answer": "answer.txt"}  the content of that file      written to the file
#   no "answer"               a shell script                run in the work folder

from __future__ import annotations

import json
import posixpath
import shlex

from openenv.rollout.tasks.task import Task, as_texts
from openenv.sandboxes.base import Sandbox

from .base import Agent, AgentRun, Launch

_MAX_FILE_CHARACTERS = 2000
_MAX_FILES_CHARACTERS = 6000
"""Larger files are left out of the prompt: the context of small models has a few thousand tokens."""

# Runs inside the sandbox, with its Python: standard library only, and syntax that any Python 3 has.
_PROGRAM = """
import json, re, subprocess, sys, urllib.error, urllib.request

with open(sys.argv[1]) as file:
    plan = json.load(file)
headers = {"Authorization": "Bearer " + plan["key"], "Content-Type": "application/json"}
body = json.dumps({"model": plan["model"], "messages": [{"role": "user", "content": plan["prompt"]}]}).encode()
try:
    with urllib.request.urlopen(urllib.request.Request(plan["url"], body, headers)) as response:
        reply = json.load(response)["choices"][0]["message"]["content"] or ""
except urllib.error.HTTPError as exc:
    sys.exit("the model refused the request: " + exc.read().decode("utf-8", "replace"))
print(reply)
block = re.search(r"^[ ]*```[^\\n]*\\n(.*?)^[ ]*```", reply, re.DOTALL | re.MULTILINE)
text = block.group(1) if block else reply.strip() + "\\n"
if plan["answer"]:
    with open(plan["answer"], "w") as file:
        file.write(text)
else:
    # The checks judge what a script did; only a missing answer of the model makes this agent fail.
    subprocess.run(["/bin/sh"], input=text.encode())
"""


class SingleTurn(Agent):
    """Ask the model once, and write its answer to a file or run it as a script."""

    name = "single-turn"

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the program and its request."""
        answer = run.task.metadata.get("answer")
        plan = {
            "url": f"{run.base_url}/chat/completions",
            "key": run.api_key,
            "model": run.model,
            "prompt": prompt_of(run.task),
            "answer": None if answer is None else posixpath.join(run.workdir, str(answer)),
        }
        folder = f"{run.home}/single_turn"
        sandbox.write_text(f"{folder}/agent.py", _PROGRAM)
        sandbox.write_text(f"{folder}/plan.json", json.dumps(plan))
        line = f"exec python3 {shlex.quote(folder)}/agent.py {shlex.quote(folder)}/plan.json"
        return Launch(argv=("/bin/sh", "-c", line), cwd=run.workdir)


def prompt_of(task: Task) -> str:
    """Return the instruction, the task's small text files, and the form of the reply."""
    parts = [task.instruction.strip()]
    remaining = _MAX_FILES_CHARACTERS
    for path, text in as_texts(task.files).items():
        if text and len(text) <= min(remaining, _MAX_FILE_CHARACTERS) and "\0" not in text:
            parts.append(f"{path}:\n```\n{text.rstrip()}\n```")
            remaining -= len(text)
    answer = task.metadata.get("answer")
    if answer is None:
        parts.append("Reply with one shell script in a code block. It runs in the work folder and does all of this.")
    else:
        parts.append(f"Reply with the content of {answer} in a code block, and with nothing else.")
    return "\n\n".join(parts)
