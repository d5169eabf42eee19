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


# --- the time of `make test` (design: testing.md): each folder has a share, and `--shares` fails above it ---------------

# Minutes of two workers, so that the sum of a folder's tests may be twice that.
SHARES = {
    "unit": 0.5, "backends": 0.5, "flow": 2.5, "cut": 2.5, "hybrid": 1.5, "drop_in": 1.0, "fp8": 0.5, "distributed": 1.25,
    "bench": 0.75,
}  # fmt: skip
WORKERS = 2
_spent: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shares", action="store_true", help="fail when a folder's tests take longer than their share")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "flow"  # tests/test_footguns.py
    _spent[folder] = _spent.get(folder, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--shares"):
        return
    terminalreporter.section("time by folder, in seconds of one worker")
    for folder, seconds in sorted(_spent.items()):
        allowed = SHARES.get(folder, 1.0) * 60 * WORKERS
        late = "  TOO LONG" if seconds > allowed else ""
        terminalreporter.write_line(f"{folder:12} {seconds:7.1f} of {allowed:.0f}{late}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--shares") or hasattr(session.config, "workerinput"):
        return
    late = [f for f, seconds in _spent.items() if seconds > SHARES.get(f, 1.0) * 60 * WORKERS]
    if late and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
