from opencode_env import OpenCodeConfig, OpenCodeSessionFactory, OpenCodeTask
from opencode_env.sandbox.base import SandboxHandle
from openenv.core.harness import VerifyResult
from openenv.sandboxes import LocalSandboxes
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import write_file


def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
    done = sandbox.exec("grep -qx hello hello.txt", cwd="/home/user/workdir")
    return VerifyResult(env_reward=float(done.exit_code == 0), done=True)


with ScriptedModel(write_file("opencode", "hello.txt", "hello\n")) as model:
    factory = OpenCodeSessionFactory(
        config=OpenCodeConfig(base_url=model.url, model=model.name),
        sandbox_backend=LocalSandboxes(),
        mode="transparent_proxy",
        verifier=verifier,
    )
    session = factory.create(OpenCodeTask(instruction="Write hello.txt.", setup_shell="git init -q ."))
    try:
        print(session.wait_for_completion(), session.verify([]).env_reward)
        print([len(record["completion_token_ids"]) for record in session.fetch_proxy_trace()])
    finally:
        session.close()
