"""Fixtures for cloud providers: sandboxes behind doubles of the clouds; `make test-clouds` has the clouds' packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_boxes import Boxes, cloud_boxes


@pytest.fixture(scope="session")
def certificate_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the certificate of all doubles is: some packages read it once."""
    return tmp_path_factory.mktemp("certificate")


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory, certificate_folder: Path) -> Iterator[Boxes]:
    """The sandboxes of a double; none is left when the tests of a module end."""
    with cloud_boxes(tmp_path_factory.mktemp("cloud"), certificate_folder) as boxes:
        yield boxes
