"""What workers find is what the pytest that started them reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.side_by_side import RETIRES_AT_BYTES

ROOT = Path(__file__).parents[1]
FILES = {
    "pytest.ini": "[pytest]\naddopts = --import-mode=importlib -p no:schemathesis\n"
    "asyncio_default_fixture_loop_scope = function",
    "cases/conftest.py": "import pytest\n@pytest.fixture(scope='session')\ndef three():\n    return 3",
    "cases/test_a.py": "import pytest\ndef test_right(three):\n    assert three == 3\n"
    "def test_wrong(three):\n    assert three == 4\n"
    "def test_left_out():\n    pytest.skip('needs a moon')",
    "cases/below/test_b.py": "def test_right(three):\n    assert three == 3",
    "cases/test_c.py": "import not_there",
    "cases/test_d.py": "import os\ndef test_ends_its_process():\n    os._exit(0)",
    "cases/test_e.py": "def test_after_it():\n    pass",
    "cases/test_ignored.py": "def test_wrong():\n    assert False",
    "others/conftest.py": "import pytest\n@pytest.fixture\ndef four():\n    return 4",
    "others/test_f.py": "def test_right(four):\n    assert four == 4",
}
LATE_FAULT = "import atexit, os\ndef test_right():\n    atexit.register(os._exit, 3)"


def outcome(folder: Path, *words: str, workers: int = 1) -> tuple[int, str, set[str]]:
    """Exit code, output, and what failed, of a run."""
    plugin = ("-p", "tests.support.side_by_side", "--workers", str(workers))
    command = [sys.executable, "-m", "pytest", *plugin, "-rs", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    file = folder / ".pytest_cache/v/cache/lastfailed"
    return done.returncode, done.stdout, set(json.loads(file.read_text())) if file.exists() else set()


@pytest.mark.parametrize("workers", [1, 3])
def test_every_file_is_run_and_every_fault_reported(workers: int, tmp_path: Path) -> None:
    """Mutants: a worker that ends in the middle of a file takes it with it, or ends the run; a file that cannot be
    imported is left out; fixtures of a folder are not found by its second file, or after another folder's; a worker
    that takes files from the end leaves them in the queue."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code, output, failed = outcome(tmp_path, "cases", "others", "--ignore=cases/test_ignored.py", workers=workers)
    assert code == 1
    assert "2 failed, 4 passed, 1 skipped, 1 error in" in output
    assert "needs a moon" in output
    assert failed == {"cases/test_a.py::test_wrong", "cases/test_c.py", "cases/test_d.py"}


def test_a_fault_at_a_workers_end_is_reported(tmp_path: Path) -> None:
    """Mutant: exit codes are not looked at."""
    (tmp_path / "pytest.ini").write_text(FILES["pytest.ini"])
    (tmp_path / "test_end.py").write_text(LATE_FAULT)
    code, output, failed = outcome(tmp_path)
    assert (code, failed) == (1, {"test_end.py"})
    assert "1 failed, 1 passed in" in output
    assert "a worker ended with 3" in output


def test_a_worker_that_holds_much_has_a_successor(tmp_path: Path) -> None:
    """Mutants: it goes on; the files that it did not take are left out."""
    (tmp_path / "pytest.ini").write_text(FILES["pytest.ini"])
    for name, kept in (("a", RETIRES_AT_BYTES), ("b", 0), ("c", 0)):
        text = f"import os\nKEPT = b'x' * {kept}\ndef test_right():\n    open('{name}', 'w').write(str(os.getpid()))"
        (tmp_path / f"test_{name}.py").write_text(text)
    assert outcome(tmp_path)[0] == 0
    first, second, third = ((tmp_path / name).read_text() for name in "abc")
    assert (first == second, second == third) == (False, True)
