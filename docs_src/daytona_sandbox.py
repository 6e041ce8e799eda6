from openenv.sandboxes import DaytonaSandboxes

sandboxes = DaytonaSandboxes()  # the key is in DAYTONA_API_KEY
with sandboxes.open() as sandbox:
    result = sandbox.exec("echo out; echo err >&2; exit 3", timeout=20)
    print(result.exit_code, result.stdout.strip(), result.stderr.strip())
