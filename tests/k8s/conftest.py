"""Tests on a real cluster, which `make test-k8s` builds and starts; they are skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from real_cluster import RealCluster, Space


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and give it time."""
    for item in items:
        if item.nodeid.startswith("tests/k8s/"):  # comparing paths takes half a second in each worker
            item.add_marker(pytest.mark.k8s)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> RealCluster:
    """The cluster."""
    from real_cluster import RealCluster

    return RealCluster(Path(os.environ["OPENENV_TEST_CLUSTER"]))


@pytest.fixture
def space(cluster: RealCluster) -> Iterator[Space]:
    """A namespace of the test's own, in which nothing may be left."""
    with cluster.space() as space:
        yield space


@pytest.fixture
def kubeconfig(space: Space, tmp_path: Path) -> Path:
    """A configuration whose namespace is the test's."""
    return space.kubeconfig(tmp_path / "kubeconfig")
