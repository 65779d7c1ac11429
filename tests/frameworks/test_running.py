"""What runs the jobs: it fails where it should. This needs no framework, and is not left out."""

from __future__ import annotations

import pytest

from tests.frameworks import running
from tests.frameworks.running import told_by


def test_a_missing_package_is_a_failure_that_says_what_to_install() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"not installed: no-such-framework; pip install '\.\[frameworks\]'"
    ):
        told_by("leftover", needs=("pytest", "no-such-framework"))


def test_a_process_that_is_left_behind_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GONE_WITHIN_S", 0.1)
    with pytest.raises(AssertionError, match="leaves processes behind"):
        told_by("leftover")


def test_a_job_that_fails_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="ends with 2"):
        told_by("that_is_not_there")
