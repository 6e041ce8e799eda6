import tempfile
from pathlib import Path

from openenv.sandboxes import LocalSandboxes

backend = LocalSandboxes()
with backend.open() as agents, backend.open() as verifiers, tempfile.TemporaryDirectory() as folder:
    job = agents.start_bg("echo 42 > answer.txt; sleep 600")
    while not agents.exists("answer.txt"):
        pass
    agents.stop_processes()  # hidden daemons too
    print(job.wait())
    archive = Path(folder, "work.tar")
    agents.pack(agents.workdir, archive)
    verifiers.unpack(archive, verifiers.workdir)  # runs inside: a hostile archive cannot reach the host
    print(verifiers.exec("grep -c 42 answer.txt").stdout, end="")
