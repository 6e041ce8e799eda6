"""What `openenv serve` leaves out while it loads: nothing that a user could miss."""

from __future__ import annotations

import json
from typing import Any

import pytest

APP = """
from openenv import Action, Environment, Observation, State
from openenv.server.app import create_app

class Walk(Environment[Action, Observation, State]):
    def reset(self, **kwargs):
        return Observation()
    def step(self, action, **kwargs):
        return Observation()
    @property
    def state(self):
        return State()

app = create_app(Walk, Action, Observation, env_name="walk")
app.contact = {"name": "us", "email": "us@example.com"}
"""
QUICKLY = "from openenv.cli.serve import import_fastapi; import_fastapi()\n"


def printed(run_script: Any, program: str) -> Any:
    return json.loads(run_script(f"import json\n{program}").splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_description_of_the_api_is_the_same(run_script: Any) -> None:
    show = f"{APP}\nprint(json.dumps(app.openapi()))"
    assert printed(run_script, QUICKLY + show) == printed(run_script, show)


def test_models_declared_afterwards_are_built_at_once(run_script: Any) -> None:
    program = """
import pydantic
class Point(pydantic.BaseModel):
    x: int
print(json.dumps(Point.__pydantic_complete__))"""
    assert printed(run_script, QUICKLY + program) is True


def test_addresses_of_users_models_are_still_checked(run_script: Any) -> None:
    pytest.importorskip("email_validator")
    program = """
import pydantic
class Person(pydantic.BaseModel):
    address: pydantic.EmailStr
try:
    Person(address="nowhere")
except pydantic.ValidationError as exc:
    print(json.dumps(exc.errors()[0]["loc"]))"""
    assert printed(run_script, QUICKLY + program) == ["address"]


def test_a_fastapi_that_is_there_already_is_left_as_it_is(run_script: Any) -> None:
    program = (
        "import sys, fastapi, fastapi.openapi.models as models\n"
        + QUICKLY
        + "print(json.dumps(models.Contact.__pydantic_complete__))"
    )
    assert printed(run_script, program) is True


def test_one_command_loads_no_other(run_script: Any) -> None:
    program = """
import sys
from openenv.cli.__main__ import build
build(["mcp", "--help"])
print(json.dumps([name for name in sys.modules if name.startswith("openenv.cli.")]))"""
    loaded = set(printed(run_script, program))
    assert loaded <= {"openenv.cli.__main__", "openenv.cli.command", "openenv.cli.mcp"}
