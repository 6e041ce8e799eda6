from openenv.sandboxes import backend

with backend("local").open() as sandbox:
    sandbox.write_text("greet.py", "import sys; print('hello', sys.argv[1]); sys.exit(3)")
    result = sandbox.exec(["python3", "greet.py", "Ada"], timeout=10)
    print(result.exit_code, result.stdout, end="")
    sandbox.exec("sort > sorted.txt", stdin=b"pear\napple\n")
    print(sandbox.read_text("sorted.txt").split())
