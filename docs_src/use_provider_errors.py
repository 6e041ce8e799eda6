import sys

from openenv.errors import ServerDied, ServerNotReady
from openenv.providers import ProcessProvider

for program, patience_s in (("import no_such_module", 60), ("import time; time.sleep(60)", 1)):
    provider = ProcessProvider(command=[sys.executable, "-c", program])
    provider.start()
    try:
        provider.wait_for_ready(timeout_s=patience_s)
    except ServerDied as exc:  # at once, and a RuntimeError
        print(exc.log.splitlines()[-1])
    except ServerNotReady as exc:  # a TimeoutError
        print(type(exc).__name__, exc.code)
