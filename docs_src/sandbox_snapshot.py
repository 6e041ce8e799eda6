from openenv.sandboxes import LocalSandboxes

backend = LocalSandboxes()
with backend.open() as first:
    first.exec("mkdir repo; echo built > repo/log")  # the slow part
    snapshot = first.snapshot()
with snapshot:
    for number in range(3):
        with backend.open(from_snapshot=snapshot) as sandbox:
            print(sandbox.exec(f"echo {number} >> repo/log; tr '\\n' ' ' < repo/log").stdout)
