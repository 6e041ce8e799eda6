from fastapi import Depends, HTTPException, Request
from word_env import WordAction, WordGame, WordObservation

from openenv import create_app
from openenv.server.access import AccessPolicy, Role

policy = AccessPolicy(orchestrator="trainer-1c7f", agent=["agent-9a2b", "agent-44d0"], observer="dashboard-e03c")
app = create_app(WordGame, WordAction, WordObservation, access=policy, redact_errors=True)


def orchestrators_only(request: Request) -> None:
    if policy.identify(request.scope) is not Role.ORCHESTRATOR:
        raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})


@app.get("/words", dependencies=[Depends(orchestrators_only)])  # guard your own routes
def words() -> list[str]:
    return ["cable", "eagle"]
