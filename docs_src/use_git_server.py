import sys

from openenv.core.tools import GitServerClient

url, username, password, workspace = sys.argv[1:]  # http://gitea:3000, a user's name and password, a folder
client = GitServerClient(url, username, password, workspace)
if not client.wait_for_ready(timeout=30):
    sys.exit(f"{url} does not answer")
print([repository["name"] for repository in client.list_repositories()])
path = client.clone_to_workspace("calculator", commit="main")
start = client.get_current_commit("calculator")
# ... an agent changes files in `path` and commits ...
print(client.execute_git_command("status --short", "calculator"))
client.reset_workspace("calculator", start)
print(client.get_current_commit("calculator") == start)
