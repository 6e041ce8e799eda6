from concurrent.futures import ThreadPoolExecutor

from openenv.sandboxes import LocalSandboxes, SandboxPool


def work(number: int) -> int:
    with pool.lease() as sandbox:  # ready at once; discarded afterwards
        return int(sandbox.exec(f"expr {number} '*' {number}").stdout)


with SandboxPool(LocalSandboxes(), size=2) as pool, ThreadPoolExecutor(4) as threads:
    print(list(threads.map(work, range(6))))
