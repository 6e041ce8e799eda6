from openenv.verifiers_server import verifiers_environment

Backwards = verifiers_environment(
    {
        "taskset": {"id": "backwards"},  # an installed package with a taskset
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
)
