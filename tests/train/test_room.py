"""What is free, on machines and in containers."""

from pathlib import Path

import pytest
import torch

from train.room import disk_of, free_memory, peaks, resident


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n"}
SECOND = {"proc/self/cgroup": "0::/jobs/mine\n"}
FIRST = {"proc/self/cgroup": "5:cpu,memory:/mine\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 5000 * 1024),
        ({**MACHINE, **SECOND, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1"}, 5000 * 1024),
        ({**MACHINE, **SECOND, "sys/fs/cgroup/memory.max": "900\n", "sys/fs/cgroup/memory.current": "200"}, 700),
        (
            {
                **MACHINE,
                **SECOND,
                "sys/fs/cgroup/jobs/memory.max": "600\n",
                "sys/fs/cgroup/jobs/memory.current": "550",
                "sys/fs/cgroup/jobs/memory.stat": "anon 500\ninactive_file 30\n",
                "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
                "sys/fs/cgroup/jobs/mine/memory.current": "3",
            },
            80,
        ),
        (
            {
                **MACHINE,
                **FIRST,
                "sys/fs/cgroup/memory/mine/memory.limit_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/mine/memory.usage_in_bytes": "400",
            },
            600,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int | None):
    assert free_memory(write(tmp_path, files)) == expected


def test_this_process_holds_memory_and_there_is_room():
    assert 2**26 < resident() < 2**40
    free = free_memory()
    assert free is None or free > 0


def test_a_folder_that_is_not_there_yet_has_the_disk_of_the_one_above(tmp_path: Path):
    assert disk_of(tmp_path / "a" / "b")[0] == disk_of(tmp_path)[0] == tmp_path.stat().st_dev


def test_the_most_that_was_held_is_remembered():
    block = torch.ones(2**26)
    del block
    most = peaks(torch.device("cpu"))
    assert most.keys() == {"memory"}
    assert most["memory"] > resident() + 2**27
