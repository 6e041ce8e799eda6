"""What `from openenv.core import GenericEnvClient` costs in this interpreter; prints one JSON object.

Run in a fresh process. It imports nothing else that is not loaded already, since that would hide part of the cost.
"""

import os
import sys
import time


def main() -> None:
    """Import the client and print CPU seconds, loaded modules and memory."""
    before = time.process_time()
    from openenv.core import GenericEnvClient  # the statement that is measured

    cpu_s = time.process_time() - before
    modules = len(sys.modules)
    with open("/proc/self/statm", encoding="ascii") as statm:
        rss_mb = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    name = GenericEnvClient.__name__
    print(f'{{"cpu_s": {cpu_s:.4f}, "modules": {modules}, "rss_mb": {rss_mb:.1f}, "name": "{name}"}}')


if __name__ == "__main__":
    main()
