from word_client import WordEnv
from word_env import WordAction

with WordEnv(base_url="http://localhost:8000").sync() as env:
    env.reset(seed=5)
    env.step(WordAction(guess="cable"))
    token = env.detach()  # disconnects; the session stays

# In another process, on another machine:
with WordEnv(base_url="http://localhost:8000", resume_token=token).sync() as env:
    print(env.step(WordAction(guess="eagle")).reward, env.state().step_count)
