from pathlib import Path

from openenv.sandboxes import LocalSandboxes, Mount, SandboxSpec
from openenv.sandboxes.base import Limits

spec = SandboxSpec(
    limits=Limits(memory_mb=256, pids=64, cpus=1.0, disk_mb=128),
    mounts=(Mount(Path("/usr/share/doc"), "/opt/doc"),),  # read-only
    envs={"TASK": "7"},
    timeout_s=120,  # then the sandbox ends, even if this process is dead
)
with LocalSandboxes().open(spec) as sandbox:
    print(sandbox.exec("test -d /opt/doc && echo task $TASK").stdout, end="")
    hungry = sandbox.exec(["python3", "-c", "x = bytearray(10**9)"])
    print(hungry.exit_code, hungry.oom)
    slow = sandbox.exec("(setsid sleep 60 &); echo begun; sleep 60", timeout=0.5)
    print(slow.exit_code, slow.timed_out, slow.stdout, end="")
