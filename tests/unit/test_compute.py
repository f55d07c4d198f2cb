"""What the compute thread calls its work."""

from __future__ import annotations

from node.model.compute import job_name


def _work_outer_step() -> None: ...


def test_work_without_a_name_is_called_by_its_type() -> None:
    class Job:
        def __call__(self) -> None: ...

    assert job_name(Job()) == "Job"
    assert job_name(_work_outer_step) == "outer step"
