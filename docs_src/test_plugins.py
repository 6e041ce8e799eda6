from openenv.providers import ProcessProvider
from openenv.sandboxes import backend
from openenv.testing import check_provider, self_check


def test_the_backend_keeps_the_contract():
    sandboxes = backend("process", i_know_there_is_no_isolation=True)
    results = self_check(sandboxes, only=["exec."])
    assert [result for result in results if result.status == "failed"] == []


def test_the_provider_keeps_the_contract():
    check_provider(lambda: ProcessProvider("word_app:app"))
