"""Fixtures for cloud providers: sandboxes behind doubles of the clouds; `make test-clouds` has the clouds' packages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud_boxes import Boxes, cloud_boxes


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """The sandboxes of a double; none is left when the tests of a module end."""
    with cloud_boxes(tmp_path_factory.mktemp("cloud")) as boxes:
        yield boxes
