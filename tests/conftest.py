"""What every test gets: one thread, fixed seeds, hypothesis profiles, and a failure for GPU tests without a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# `make test` repeats itself exactly; `make test-all` searches (--hypothesis-profile=search). No deadline: the first
# example of a test pays for torch's lazy initialisation.
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.load_profile("repeat")

SEED = 20261130


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test was asked for (the default run deselects them): without a GPU that is a failure, not a skip."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.fail("marked gpu, and this machine has no CUDA device: run without -m gpu, or on a GPU", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The workers share two cores; and sums do not depend on how many threads split them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    torch.manual_seed(SEED)
