from openenv.sandboxes import E2BSandboxBackend

sandboxes = E2BSandboxBackend(template="base")  # the key is in E2B_API_KEY
with sandboxes.open() as sandbox:
    result = sandbox.exec("echo out; echo err >&2; exit 3", timeout=20)
    print(result.exit_code, result.stdout.strip(), result.stderr.strip())
    job = sandbox.start_bg("sleep 600")
    job.kill()
    print(job.wait())
