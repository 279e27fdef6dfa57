"""The native library where it can be built, where it cannot, and when it is there already."""

from __future__ import annotations

import ctypes
import errno
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.model.attention import TorchAttention
from app.model.cpu import kv_cache, library
from app.model.forward import TransformersForward


def test_without_a_compiler_plain_torch_serves(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    build = library.library.__wrapped__
    for module in (library, kv_cache):
        monkeypatch.setattr(module, "library", build)
    engine = build_sync_engine(EngineConfig(model=ModelConfig(path=str(demo_path), device="cpu")))
    forward = engine.runner.forward  # type: ignore[attr-defined]
    assert type(forward) is TransformersForward
    assert type(forward.attention) is TorchAttention
    assert "no C++ compiler found" in caplog.text


def test_a_failing_compiler_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: "/bin/false")
    assert library.library.__wrapped__() is None
    assert "cannot be built" in caplog.text


def compiler_that(makes: str, folder: Path) -> Path:
    """A compiler that only notes its calls and makes "$2" by a command."""
    compiler = folder / "c++"
    compiler.write_text(f"""#!/bin/sh
echo "$*" >> {folder / "calls"}
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then {makes}; fi; shift; done
""")
    compiler.chmod(0o755)
    return compiler


def test_it_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that only notes its calls. Every test of native code uses what the real one builds."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    compiler, calls = compiler_that(': > "$2"', tmp_path), tmp_path / "calls"
    built = library._built(str(compiler))
    assert library._built(str(compiler)) == built
    assert list(built.parent.glob("*.so")) == [built]
    first, *units, linked, last = calls.read_text().splitlines()
    assert first == last == "--version"
    assert all("-c -o" in call for call in units)
    assert sorted(call.rsplit("/", 1)[1] for call in units) == ["library.cpp", "stored.cpp", "typed.cpp", "typed.cpp"]
    assert linked.count(".o") == 4


def test_of_several_that_need_it_at_once_one_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of one machine start together, and a build takes all cores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = compiler_that('sleep 0.1; : > "$2"', tmp_path)
    with ThreadPoolExecutor(4) as threads:
        built = {future.result() for future in [threads.submit(library._built, str(compiler)) for _ in range(4)]}
    assert len(built) == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([call for call in calls if call != "--version"]) == 5  # four units and one link


def test_without_locks_it_is_built_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **_: object) -> object:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("app.disk.take_lock", fail)
    assert library._built(str(compiler_that(': > "$2"', tmp_path))).is_file()


@pytest.mark.skipif(library.library() is None, reason="there is no C++ compiler")
def test_what_was_built_for_other_machines_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that this machine can run, by a compiler that gives what the real one has built for this machine."""
    here = frozenset(library._cpu().split())
    level = next((level for level in library.LEVELS if level.cpu_flags <= here), None)
    if level is None:
        pytest.skip("this machine is of none of these kinds")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real, own = library._compiler(), library.library()
    assert real is not None
    assert own is not None
    for each in library.LEVELS:
        subprocess.run([real, *each.options, "-fsyntax-only", "-x", "c++", "/dev/null"], check=True)
    made = compiler_that(f'cp {own._name} "$2"', tmp_path)
    monkeypatch.setattr(library.shutil, "which", lambda name: str(made))
    [built] = library.build_for([level])
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    code = library.library.__wrapped__()
    assert code is not None
    assert code._name == str(built)
    assert code.carousel_is_fast_in_f32() == library.library().carousel_is_fast_in_f32()  # type: ignore[union-attr]


def test_a_machine_takes_the_best_library_that_it_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "carousel").mkdir()
    for level in library.LEVELS:
        library._path_for(level).touch()
    for level in library.LEVELS:
        monkeypatch.setattr(library, "_cpu", lambda level=level: f"flags : {' '.join(level.cpu_flags)}")
        assert library._built_elsewhere() == library._path_for(level)
    monkeypatch.setattr(library, "_cpu", lambda: "flags : fma sse4_2")
    assert library._built_elsewhere() is None


@pytest.mark.skipif(library.library() is None, reason="there is no C++ compiler")
def test_libraries_in_one_process_share_nothing_of_their_own() -> None:
    """A symbol of the kind that is unique in a process would be one for all builds: which thread has which tiles."""
    code = library.library()
    assert code is not None
    symbols = subprocess.run(["nm", "-D", "--defined-only", code._name], check=True, capture_output=True, text=True)
    kinds = {name: kind for _, kind, name in map(str.split, symbols.stdout.splitlines())}
    assert "u" not in kinds.values()
    assert {name for name in kinds if not name.startswith("_Z")} == {
        f"carousel_{pattern.format(suffix)}" for pattern in library._FUNCTIONS for suffix in library.DTYPES.values()
    }


def as_strides(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Strides", (ctypes.Structure,), {"_fields_": fields})


STRIDES = tuple((field[0], field[1]) for field in library.Strides._fields_)


@pytest.mark.skipif(library.library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    "wrong",
    [
        STRIDES[:-1],
        (*STRIDES, ("more", ctypes.c_int64)),
        (*STRIDES[:-2], STRIDES[-1], STRIDES[-2]),
        (*STRIDES[:-1], (STRIDES[-1][0], ctypes.c_int32)),
        (*STRIDES[:-1], ("renamed", ctypes.c_int64)),
    ],
    ids=["a field less", "a field more", "in another order", "of another type", "of another name"],
)
def test_a_structure_that_the_native_code_has_otherwise_is_refused(
    wrong: tuple[tuple[str, Any], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(kind for kind in library.STRUCTURES if kind is not library.Strides)
    monkeypatch.setattr(library, "STRUCTURES", (*others, as_strides(*STRIDES)))
    assert library.library.__wrapped__() is not None
    monkeypatch.setattr(library, "STRUCTURES", (*others, as_strides(*wrong)))
    with pytest.raises(
        RuntimeError, match=r"lay out Strides differently.* C\+\+ has 'Strides 48 .* Python has 'Strides"
    ):
        library.library.__wrapped__()
    monkeypatch.setattr(library, "STRUCTURES", others)
    with pytest.raises(RuntimeError, match=r"lay out Strides differently.* Python has None"):
        library.library.__wrapped__()


def test_a_structure_is_filled_by_the_names_of_all_its_fields() -> None:
    assert library.MlpWeights(gate_up=1, down=2).down == 2
    for wrong in ({"gate_up": 1}, {"gate_up": 1, "down": 2, "more": 3}):
        with pytest.raises(AssertionError, match="MlpWeights has"):
            library.MlpWeights(**wrong)
    assert struct.calcsize("=" + library.Adjustments.packing()) == ctypes.sizeof(library.Adjustments)
