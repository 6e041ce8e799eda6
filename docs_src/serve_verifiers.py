from openenv.adapters.verifiers import verifiers_environment

Backwards = verifiers_environment(
    {
        "taskset": {"id": "backwards"},  # an installed package with a taskset
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
)
