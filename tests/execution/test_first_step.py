"""The first step on a machine: what is compiled, by whom, and what is said about it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import optimi_func
from optimi_func.classes import base
from optimi_func.core.runtime import runtime
from optimi_func.execution import cpp, store

# A compiler that writes down what it is asked for, and its own number. It waits before it
# compiles our functions if there is a file `wait`.
COMPILER = """#!/bin/sh
echo "$$ $*" >> {folder}/calls
case "$*" in *functions.cpp*) while [ -e {folder}/wait ]; do sleep 0.01; done;; esac
exec g++ "$@"
"""
ON_LINUX = pytest.mark.skipif(not cpp._IS_PLAIN, reason="Inductor compiles them here")


class Machine:
    """A machine on which nothing has been compiled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = folder / "g++"
        self.compiler.write_text(COMPILER.format(folder=folder))
        self.compiler.chmod(0o700)
        (folder / "tmp").mkdir()
        self.variables = os.environ | {
            "CXX": str(self.compiler),
            "TMPDIR": str(folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            store.VARIABLE: str(folder / "store"),
        }

    def run(self, program: str, **variables: str) -> tuple[str, list[str]]:
        """Return what a new process prints, and the lines on its stderr."""
        done = subprocess.run(
            [sys.executable, "-Werror", "-c", program],
            env=self.variables | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.splitlines()

    def calls(self) -> list[list[str]]:
        """Return the words of each call of the compiler that compiles something."""
        path = self.folder / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        return [x.split() for x in calls if ".cpp" in x]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


STEP = """
import torch, optimi_func
from optimi_func.execution import cpp
p = torch.nn.Parameter(torch.ones(9000))
p.grad = torch.ones(9000)
optimi_func.AdamW([p], lr=0.1{options}).step()
print(p.sum().item())
"""


@ON_LINUX
@pytest.mark.full
def test_a_first_step_compiles_two_files_and_says_so_once(machine: Machine) -> None:
    """Our functions and a kernel: no vectors are tried out, no headers precompiled."""
    cold, said = machine.run(STEP.format(options=""))
    assert ["functions.cpp" in x for x in machine.calls()] == [True, False]
    (line,) = said
    assert "compiling an optimizer step" in line and str(machine.folder / "store") in line
    assert machine.run(STEP.format(options="")) == (cold, [])
    assert len(machine.calls()) == 2 and not list((machine.folder / "tmp").iterdir())


def test_an_eager_step_compiles_nothing_and_says_nothing(machine: Machine) -> None:
    """Nor does it start a thread."""
    program = STEP.format(options=", compile=False") + "print(cpp._threads)"
    said, lines = machine.run(program)
    assert said.endswith("[]") and lines == []
    assert not (machine.folder / "calls").exists()


BEGUN = """
import os, pathlib, time, torch, optimi_func
optimi_func.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
while "functions.cpp" not in pathlib.Path({calls!r}).read_text():
    time.sleep(0.01)
"""


def begun(machine: Machine) -> str:
    """Return a program that goes on when its compiler has begun, which waits."""
    (machine.folder / "wait").touch()
    return BEGUN.format(calls=str(machine.folder / "calls"))


@ON_LINUX
def test_a_process_that_exits_ends_its_compiler(machine: Machine) -> None:
    """So that nothing goes on, and no file is left."""
    _, (line,) = machine.run(begun(machine))
    assert "compiling" in line
    ((number, *_),) = machine.calls()
    assert not Path("/proc", number).exists()
    assert not list((machine.folder / "tmp").iterdir())
    assert not list((machine.folder / "store").glob("*.so"))


@ON_LINUX
def test_a_fork_compiles_for_itself(machine: Machine) -> None:
    """The thread and its lock are the parent's."""
    program = begun(machine)
    program += """
from optimi_func.execution import cpp, store
child = os.fork()
if not child:
    store.LONGEST_WAIT = 0.0  # The parent holds the lock of the entry.
    os.remove(GATE)
    os._exit(cpp.native() is None)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cpp.native() is not None)
""".replace("GATE", repr(str(machine.folder / "wait")))
    program = "import warnings\nwarnings.simplefilter('ignore')\n" + program
    assert machine.run(program)[0] == "0 True"
    assert len(machine.calls()) == 2


def test_the_functions_need_nothing_of_torchs_compiler(machine: Machine) -> None:
    """Two threads that import parts of it would wait for each other."""
    program = "import sys\nfrom optimi_func.execution import cpp\nassert cpp.native()\n"
    program += "print([x for x in sys.modules if x.startswith('torch._inductor')])"
    if cpp._IS_PLAIN:
        assert machine.run(program, **{store.QUIET: "1"}) == ("[]", [])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A process without the functions, with an empty store. Lists the threads it starts."""
    begun: list[str] = []

    class Counted(threading.Thread):
        def start(self) -> None:
            begun.append(self.name)

    for name in "functions", "errors":
        monkeypatch.setattr(runtime, name, [])
    for name in "_threads", "_compilers":
        monkeypatch.setattr(cpp, name, [])
    monkeypatch.setattr(runtime, "tries_again", Event())
    monkeypatch.setattr(cpp, "_exits", Event())
    monkeypatch.setattr(cpp, "Thread", Counted)
    monkeypatch.setattr(cpp.atexit, "register", lambda function: None)
    monkeypatch.setattr(runtime, "said", set())
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    return begun


@ON_LINUX
def test_one_thread_begins(fresh: list[str]) -> None:
    for _ in range(2):
        cpp.start()
    assert fresh == ["optimi_func C++"]


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "_version", lambda *given: "")


IDLE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch.compile is switched off": lambda patch: patch.setenv("TORCHDYNAMO_DISABLE", "1"),
    "warm --check": lambda patch: patch.setattr(store, "missing", {}),
    "no compiler": no_compiler,
    "loaded": lambda patch: patch.setattr(runtime, "functions", ["functions"]),
    "failed": lambda patch: patch.setattr(runtime, "errors", [OSError()]),
    "another system": lambda patch: patch.setattr(cpp, "_IS_PLAIN", False),
}


@pytest.mark.parametrize("why", IDLE)
def test_no_thread_begins(why: str, fresh: list[str], monkeypatch: Any) -> None:
    IDLE[why](monkeypatch)
    cpp.start()
    assert fresh == []


@pytest.mark.parametrize(
    ("options", "device", "begins"),
    [
        ({}, "cpu", True),
        ({"compile": True}, "cpu", True),
        ({"compile": False}, "cpu", False),
        ({"foreach": True}, "cpu", False),
        ({}, "meta", False),
    ],
)
def test_optimizers_on_cpu_that_compile_begin(
    options: dict[str, Any], device: str, begins: bool, monkeypatch: Any
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(base, "start", lambda: begun.append(True))
    p = torch.nn.Parameter(torch.ones(2, device=device))
    optimi_func.SGD([p], lr=0.1, **options)
    assert begun == [True] * begins


def test_an_optimizer_of_fake_parameters_begins_nothing(monkeypatch: Any) -> None:
    def start() -> None:
        raise AssertionError

    monkeypatch.setattr(base, "start", start)
    with FakeTensorMode():
        optimi_func.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@ON_LINUX
def test_what_the_compiler_says_is_the_error(
    fresh: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    program = tmp_path / "c++"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo out of luck; exit 1; }\n')
    program.chmod(0o700)
    monkeypatch.setattr(store, "compiler", lambda: [str(program), "1", {}])
    assert cpp.native() is None
    assert "out of luck" in str(cpp.failure()) and "functions.cpp" in str(cpp.failure())
    assert not list((tmp_path / "store").glob("*.so"))
    monkeypatch.undo()
    cpp.retry()


@ON_LINUX
def test_nothing_is_compiled_while_the_interpreter_exits(
    fresh: list[str], monkeypatch: Any
) -> None:
    cpp._stop()
    assert cpp.native() is None and "exits" in str(cpp.failure())


@ON_LINUX
def test_an_interrupt_ends_the_compiler(
    fresh: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    made: list[Any] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self in made:
                return super().wait(timeout)
            made.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(cpp, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpp._call(["sleep", "600"], str(tmp_path))
    assert made[0].returncode == -15 and not cpp._compilers


@ON_LINUX
def test_a_process_without_more_threads_compiles_later(
    fresh: list[str], monkeypatch: Any
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cpp.Thread, "start", start)
    cpp.start()
    assert cpp._threads == [] and cpp.failure() is None
