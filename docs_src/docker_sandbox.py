from openenv.sandboxes import DockerSandboxes, SandboxSpec
from openenv.sandboxes.base import Limits

sandboxes = DockerSandboxes("host")  # the host's system, read-only; or any image with /bin/sh and tar
spec = SandboxSpec(limits=Limits(memory_mb=512, pids=64), timeout_s=300)
with sandboxes.open(spec) as sandbox:
    sandbox.write_text("count.py", "print(sum(range(10)))")
    print(sandbox.exec(["python3", "count.py"]).stdout, end="")
    print(sandbox.exec("cat /proc/net/dev | grep -c :").stdout, end="")  # loopback only
    print(sandbox.exec("touch /usr/x").exit_code != 0)
