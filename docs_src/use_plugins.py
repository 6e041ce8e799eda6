from word_client import WordEnv

from openenv.providers import provider_named
from openenv.sandboxes import backend

with backend("process", i_know_there_is_no_isolation=True).open() as sandbox:
    print(sandbox.exec("echo in the sandbox").stdout.strip())

with provider_named("process", target="word_app:app") as provider, WordEnv(provider.base_url).sync() as env:
    print(env.reset(seed=5).done)
