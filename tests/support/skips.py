"""The reasons for which a test may be skipped; in CI any other fails the session.

A new version of a package, a package that is missing, or a browser that cannot be
installed would otherwise turn a suite off while everything stays green.
"""

import os
import re

import pytest

# What the test machine is, and no installation can change. Each is a pattern of the whole
# reason that pytest reports.
ALLOWED = (
    "needs CUDA",
    "needs a CUDA device",
    "needs two GPUs",
    "needs a machine without CUDA",
    "needs to be root, to give a file away",
    "needs a CPU with AVX512",
    "the header is for x86",
    "the header is for AVX2 and AVX-512",
)
STRICT = bool(os.environ.get("CI"))  # which GitHub sets, and .ci/run


def is_allowed(reason: str) -> bool:
    """Return whether a test may be skipped for this reason."""
    return any(re.fullmatch(allowed, reason) for allowed in ALLOWED)


class Skips:
    """A pytest plugin that notes skips for reasons that are not allowed."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}  # reason: the first test

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        *_, text = report.longrepr if isinstance(report.longrepr, tuple) else ("",)
        reason = str(text).removeprefix("Skipped: ")
        if not is_allowed(reason):
            self.found.setdefault(reason, report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self.found and STRICT and session.exitstatus in passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.found:
            return
        title = "skipped for reasons that tests/support/skips.py does not allow"
        terminalreporter.section(title, red=STRICT, yellow=not STRICT)
        for reason, test in self.found.items():
            terminalreporter.write_line(f"{test}: {reason}")
