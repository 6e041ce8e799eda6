from openenv.core.tools import PyExecutor

with PyExecutor(additional_imports=["json"]) as executor:
    executor.run("def square(n):\n    return n * n")
    print(executor.run("print('begin')\nsquare(12)").stdout.split())
    failed = executor.run("print('before')\n1 / 0")
    print(failed.exit_code, failed.stdout.strip(), failed.stderr.splitlines()[-1])
    print(executor.run("import os").stderr.splitlines()[-1][:38])
