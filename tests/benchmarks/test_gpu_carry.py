"""What is carried to a GPU machine, and what planning there is measured with."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import carry, planning


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("flashinfer/prefill.py", True),
        ("flashinfer/experimental/a/b.py", True),
        ("flashinfer/experimental/a/b.cu", False),
        ("flashinfer/data/include/flashinfer/attention/prefill.cuh", True),
        ("flashinfer/data/cccl/libcudacxx/include/cuda/std/array", True),
        ("flashinfer/data/cutlass/examples/01/a.cu", False),
        ("flashinfer/data/csrc/batch_prefill_paged_kernel_inst.jinja", True),
        ("flashinfer/data/csrc/batch_mla_run.cu", True),
        ("flashinfer/data/csrc/tvm_ffi_utils.h", True),
        ("flashinfer/data/csrc/kda/large.cu", False),
        ("flashinfer/data/csrc/cake_sampling/large.cu", False),
    ],
)
def test_what_is_carried_of_flashinfer(name: str, carried: bool) -> None:
    assert carry.is_carried(name) == carried


def test_archives_and_their_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: the heads are carried; the whole wheel is; what is too large is no fault; a library that FlashInfer does
    not look for is carried; a FlashInfer that plans otherwise is."""
    folders = {file.relative_to(carry.ROOT).parts[0] for file in carry.tracked(heads=False)}
    assert {"paceline", "tests", "benchmarks", "pyproject.toml"} <= folders
    assert "heads" not in folders
    monkeypatch.setattr(carry, "tracked", lambda heads: [carry.LOCK])  # packing all of it takes seconds
    wheels, there = tmp_path / "wheels", tmp_path / "there"
    sources = {f"flashinfer/{file}": "" for file, *_ in carry.CALLED}
    for file, kind, method, names in carry.CALLED:
        sources[f"flashinfer/{file}"] += f"class {kind}:\n def {method}(self, *, {', '.join(names)}): ...\n"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "flashinfer_python-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/data/csrc/kda/large.cu", "text")
        for name, source in sources.items():
            wheel.writestr(name, source)
    for name in ("one/one.so", "one/part.o", "two/half.so"):
        (compiled := tmp_path / "compiled" / name).parent.mkdir(parents=True, exist_ok=True)
        compiled.touch()
    asked = ["--into", str(there), "--wheels", str(wheels), "--kernels", str(tmp_path / "compiled")]
    assert carry.main(asked) == 0
    with tarfile.open(there / "site.tar.xz") as site:
        assert site.getnames() == ["flashinfer/data/aot/one/one.so", "flashinfer/decode.py", "flashinfer/prefill.py"]
    with tarfile.open(there / "tree.tar.xz") as tree:
        assert tree.getnames() == [carry.LOCK.name]
    for imported, code in (("flashinfer.prefill", 0), ("nowhere", 1)):
        monkeypatch.setattr(carry, "IMPORTED", (imported,))
        monkeypatch.setattr(carry, "VERSIONS", "")
        assert carry.main([*asked, "--try", sys.executable]) == code
    assert carry.main([*asked, "--limit-mib", "0.01"]) == 1
    assert "more than can be carried" in capsys.readouterr().err
    with zipfile.ZipFile(wheels / "flashinfer_python-0-py3-none-any.whl", "w") as wheel:
        for name, source in sources.items():
            wheel.writestr(name, source.replace(", uniform_q_len", ""))
    assert carry.main(asked) == 1
    assert "lacks BatchPrefillWithPagedKVCacheWrapper.plan uniform_q_len" in capsys.readouterr().err


def test_every_package_is_locked() -> None:
    assert len(carry.locked(carry.LOCK.read_text(encoding="utf-8"))) == len(carry.PACKAGES)
    with pytest.raises(ValueError, match="names no nobody"):
        carry.locked("a==1\n", ["a", "nobody"])


def test_planning_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    planning.main(["--device", "cpu", "--batches", "1", "3", "--drafts", "2", "--context", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["B=1", "B=3"]
