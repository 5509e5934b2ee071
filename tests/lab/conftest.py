"""What needs real namespaces is skipped where there can be none, and says why."""

import pytest

from gradsieve._check import BadInput
from gradsieve_lab.netlab.network import check_possible


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        check_possible()
    except BadInput as problem:
        for item in items:
            if item.get_closest_marker("lab"):
                item.add_marker(pytest.mark.skip(reason=str(problem)))
