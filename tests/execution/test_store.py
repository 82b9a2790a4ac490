"""The store of compiled steps: what is loaded, what never is, and what a key depends on."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_keys import key_of

import optimi_func
from optimi_func import AdamW, hooks, warm
from optimi_func.core import rule as rules
from optimi_func.core.leaf import init_leaf
from optimi_func.core.packed import Packed
from optimi_func.core.runtime import runtime
from optimi_func.execution import cpp, kernels, store
from optimi_func.execution.kernels import _compile as compile_kernel
from optimi_func.execution.wholes import elementwise
from optimi_func.optimizers.muon import muon

KEY, OTHER = "1" * 64, "2" * 64
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
CODE = b"\x7fELF of a library" * 100


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of this test's own, which nothing has complained about."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(runtime, "said", set())
    return tmp_path / "store"


_loaded: list[bytes] = []


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    _loaded.clear()  # It cannot be loaded, only read.

    def read(name: str) -> None:
        with open(name, "rb") as file:
            _loaded.append(file.read())

    monkeypatch.setattr(store, "CDLL", read)
    path = tmp_path / "library.so"
    path.write_bytes(CODE)
    return str(path)


def said_by(program: str, *flags: str, **variables: str) -> list[str]:
    """Return the words that a new process prints."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


class Asked(Exception):
    """Raised in place of what would be compiled."""


def of_adam() -> tuple[kernels.KernelKey, rules.Scalars]:
    return of(optimi_func.adamw(lr=0.1))


def of(optimizer: Any) -> tuple[kernels.KernelKey, rules.Scalars]:
    """The key and the scalars of a kernel of one parameter."""
    p = torch.ones(4)
    leaf = init_leaf(optimizer.rule, optimizer.init_numbers, p, rules.Storage())
    coeffs, _ = optimizer.advance(1.0, optimizer.rule.running())
    scalars = rules.Scalars(coeffs, rules.Rates(0.1, 0.0, 0.0, 1.0))
    return key_of(optimizer.rule, Packed(scalars), leaf, p), scalars


def entry(place: Path, key: str = KEY) -> Path:
    return place / f"{key}.so"


def test_an_entry_is_found(place: Path, library: str) -> None:
    assert store.find(KEY) is None
    store.keep(KEY, library, [[1, 2], "x"])
    _, facts = store.find(KEY) or ("", None)
    # The loader ignores what stands behind the library.
    assert facts == [[1, 2], "x"] and [x[: len(CODE)] for x in _loaded] == [CODE]
    cut(entry(place))
    assert store.find(KEY) is None and len(_loaded) == 1
    store.keep(KEY, library, None)
    assert place.stat().st_mode & 0o777 == 0o700
    assert entry(place).stat().st_mode & 0o777 == 0o600
    assert [x.name for x in place.iterdir()] == [f"{KEY}.so"]
    assert store.find(OTHER) is None


def cut(path: Path) -> None:
    # Into a new file, because the old one may be loaded.
    path.with_suffix(".cut").write_bytes(path.read_bytes()[:-40])
    path.with_suffix(".cut").chmod(0o600)
    os.replace(path.with_suffix(".cut"), path)


def edited(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"ELF", b"FLE", 1))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def other_facts(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[1, 2]", b"[2, 1]"))


def before_02(path: Path) -> None:
    text = CODE + b"[1, 2]" + (6).to_bytes(4, "big")
    path.write_bytes(text + sha256(KEY.encode() + text).digest())


def swapped(path: Path) -> None:
    store.keep(OTHER, str(path.parents[1] / "library.so"), [1, 2])
    os.replace(entry(path.parent, OTHER), path)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def is_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BROKEN: dict[str, Any] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "edited": edited,
    "longer": longer,
    "other facts": other_facts,
    "without a compiler's name": before_02,
    "of another key": swapped,
    "a link": linked,
    "a pipe": piped,
    "a folder": is_folder,
    "writable for the group": lambda path: path.chmod(0o660),
    "writable for all": lambda path: path.chmod(0o606),
    "in a folder that all may write": lambda path: path.parent.chmod(0o777),
    "in a folder that the group may write": lambda path: path.parent.chmod(0o770),
    "huge": lambda path: os.truncate(path, store.LONGEST + 1),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_as_it_was_written_is_not_loaded(
    how: str, place: Path, library: str
) -> None:
    store.keep(KEY, library, [1, 2])
    assert store.find(KEY) is not None
    BROKEN[how](entry(place))
    assert store.find(KEY) is None
    # A new entry takes its place, except where others could change that too.
    store.keep(KEY, library, [1, 2])
    assert (store.find(KEY) is None) == (how.startswith("in a folder") or how == "a folder")


def test_what_belongs_to_others_is_not_loaded(
    place: Path, library: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    store.keep(KEY, library, None)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    for _ in range(2):
        assert store.find(KEY) is None
    store.keep(OTHER, library, None)
    assert not entry(place, OTHER).exists()
    # It says so once, because each process compiles then.
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and str(place) in said.getMessage()
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to give a file away")
def test_a_file_of_another_user_is_not_loaded(place: Path, library: str) -> None:
    store.keep(KEY, library, None)
    os.chown(entry(place), 12345, 12345)
    assert store.find(KEY) is None
    os.chown(entry(place), 0, 0)
    assert store.find(KEY) is not None
    os.chown(place, 12345, 12345)
    assert store.find(KEY) is None


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(store.tempfile, "mkstemp"), (store.os, "replace"), (Path, "mkdir")],
    ids=["mkstemp", "replace", "mkdir"],
)
def test_a_folder_that_cannot_be_written_costs_only_time(
    owner: Any, name: str, place: Path, library: str, monkeypatch: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    place.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        for _ in range(2):
            store.keep(KEY, library, None)
    # Nothing can be kept of each kernel of a step; it says so once.
    (said,) = caplog.records
    assert "not kept" in said.getMessage() and "No space left" in said.getMessage()
    assert said.levelno == logging.WARNING and store.VARIABLE in said.getMessage()
    assert list(place.iterdir()) == []


def test_what_cannot_be_loaded_is_told_once(
    place: Path, library: str, monkeypatch: Any, caplog: Any
) -> None:
    """Else each process would compile for some seconds, and say that the next will not."""
    store.keep(KEY, library, None)
    monkeypatch.setattr(store, "CDLL", full)
    assert store.find(KEY) is None and store.find(KEY) is None
    (said,) = caplog.records
    assert f"{place} cannot be loaded" in said.getMessage()


def test_a_disk_that_is_full_leaves_no_part(
    place: Path, library: str, monkeypatch: Any
) -> None:
    class Full:
        def __init__(self, *args: Any) -> None:
            os.close(args[0])

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None: ...

        write = full

    place.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr(store, "open", Full, raising=False)
        store.keep(KEY, library, None)
    assert list(place.iterdir()) == []


def test_the_folder_is_where_the_environment_says(monkeypatch: Any, tmp_path: Path) -> None:
    def found(**variables: str) -> Path | None:
        with monkeypatch.context() as patch:
            for name in (store.VARIABLE, "XDG_CACHE_HOME", "HOME"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            return store.folder()

    home = str(tmp_path)
    assert found(HOME=home) == tmp_path / ".cache" / "optimi_func"
    assert found(HOME=home, XDG_CACHE_HOME="/caches") == Path("/caches/optimi_func")
    assert found(HOME=home, XDG_CACHE_HOME="here") == tmp_path / ".cache" / "optimi_func"
    assert found(HOME=home, OPTIMI_FUNC_CACHE="/mine") == Path("/mine")
    assert found(HOME=home, OPTIMI_FUNC_CACHE="~/mine") == tmp_path / "mine"
    assert found(HOME=home, OPTIMI_FUNC_CACHE="0") is None
    assert found(HOME="here") is None  # not a folder of the working directory
    # Without HOME the system knows the user's.
    assert found() is not None


def test_a_part_of_a_killed_writer_is_removed(place: Path, library: str) -> None:
    store.keep(KEY, library, None)
    names = [f"{KEY}.so.abcd1234", f"{OTHER}.so.lock", f"{OTHER}.so.new", "libother.so.1"]
    for name in names:
        (place / name).touch()
        if not name.endswith("new"):
            os.utime(place / name, (0, time.time() - store.OLD - 60))
    store.keep(OTHER, library, None)
    entries = [f"{KEY}.so", f"{OTHER}.so"]
    assert sorted(x.name for x in place.iterdir()) == sorted([*entries, *names[2:]])


# Locks

# A process that holds the lock of an entry, until its input ends or it is killed.
HOLDS = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles the entry KEY, as others see it."""
    place.mkdir(mode=0o700)
    command = [sys.executable, "-c", HOLDS, str(place / f"{KEY}.so.lock")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_who_waits_for_a_killed_process_takes_its_place(other: Any) -> None:
    killing = threading.Timer(0.3, other.kill)
    killing.start()
    with store.alone(KEY):
        assert other.wait(60) != 0  # it was killed, before this process had the lock
        with store.alone(OTHER):  # as compiling a kernel compiles the functions in C++
            pass
    killing.join()


def test_nobody_waits_for_what_is_there(other: Any, library: str) -> None:
    store.keep(KEY, library, None)
    with store.alone(KEY), store.alone(""):
        assert other.poll() is None


def test_waiting_is_limited(other: Any, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(store, "LONGEST_WAIT", 0.1)
    with store.alone(KEY):
        assert other.poll() is None
    assert "is locked for 0 s:" in caplog.text


def no_locks(*args: Any) -> None:
    raise OSError(37, "No locks available")


def test_all_go_on_where_nothing_can_be_locked(place: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store.FileLock, "acquire", no_locks)
        with store.alone(KEY), store.alone(KEY):
            pass
    place.chmod(0o777)
    with store.alone(KEY), store.alone(KEY):
        assert not entry(place, OTHER).exists()
    monkeypatch.setenv(store.VARIABLE, "/dev/null/store")
    with store.alone(KEY), store.alone(KEY):
        pass


WRITES = """
import sys
from optimi_func.execution import store
store.CDLL = lambda path: None
library, facts = sys.argv[1], sys.argv[2]
for i in range(300):
    store.keep("1" * 64, library, facts)
    found = store.find("1" * 64)
    assert found is not None and found[1] in "abcd", found
"""


@pytest.mark.full
def test_processes_that_write_at_a_time_leave_a_whole_entry(
    place: Path, library: str
) -> None:
    command = [sys.executable, "-c", WRITES, library]
    running = [subprocess.Popen([*command, facts]) for facts in "abcd"]
    assert [x.wait(300) for x in running] == [0, 0, 0, 0]
    assert store.find(KEY) is not None
    assert [x.name for x in place.iterdir()] == [f"{KEY}.so"]


# Keys


# An edit for each part of what decides the machine code.
INGREDIENTS: dict[str, Any] = {
    "torch's version": lambda m: m.setattr(torch, "__version__", "2.13.1"),
    "torch's build": lambda m: m.setattr(torch.version, "git_version", "0"),
    "ATen's capability": lambda m: m.setattr(torch.__config__, "show", lambda: "AVX2"),
    "Python": lambda m: m.setattr(sys, "version", "3.99"),
    "the C library": lambda m: m.setattr(os, "confstr", lambda name: "glibc 9"),
    "sources": lambda m: m.setattr(store, "_sources", lambda: "0"),
    "processor": lambda m: m.setattr(store, "_processor", lambda: ["flags: sse"]),
    "a variable of Inductor's": lambda m: m.setenv("ATEN_CPU_CAPABILITY", "avx2"),
    "settings": lambda m: m.setattr(store, "changed_settings", lambda: ["simdlen=256"]),
}


def key() -> str:
    found = store.machine()
    assert found is not None
    return store.key_of(found)


@pytest.mark.parametrize("part", INGREDIENTS)
def test_the_key_depends_on_the_machine(part: str, monkeypatch: Any) -> None:
    before = key()
    assert key() == before
    with monkeypatch.context() as patch:
        INGREDIENTS[part](patch)
        assert key() != before
    assert key() == before


# What a compiler may be, and whether what another has made is loaded with it.
MADE_WITH: dict[str, tuple[Any, bool]] = {
    "another version": (lambda m: m.setattr(store, "_version", lambda *x: "g++ 99"), False),
    "other headers": (lambda m: m.setenv("CPATH", "/elsewhere"), False),
    "none": (lambda m: m.setattr(store, "_version", lambda *x: ""), True),
}


@pytest.mark.parametrize("which", MADE_WITH)
def test_the_compiler_is_a_fact_of_an_entry(
    which: str, place: Path, library: str, monkeypatch: Any
) -> None:
    (change, loaded), before = MADE_WITH[which], key()
    store.keep(before, library, None)
    change(monkeypatch)
    assert key() == before and (store.find(before) is not None) == loaded
    if not loaded:  # It is made again, in its place.
        store.keep(before, library, None)
        assert store.find(before) is not None
        monkeypatch.undo()
        monkeypatch.setenv(store.VARIABLE, str(place))
        assert store.find(before) is None


def test_the_key_does_not_depend_on_folders(monkeypatch: Any) -> None:
    before = key()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv(store.VARIABLE, "/elsewhere")
    assert key() == before


def test_settings_count_by_their_values() -> None:
    """A patch leaves its entry set, to the default."""
    from torch._inductor import config

    before = key()
    with config.patch({"cpp.simdlen": 256}):
        assert key() != before
    with config.patch({"cpp.simdlen": None}):
        assert key() == before
    with config.patch({"cpp.cxx": (None, "cc")}):  # of which entries have the version
        assert key() == before
    assert key() == before


def test_variables_that_came_after_the_settings_make_no_key(monkeypatch: Any) -> None:
    """Inductor has read the others, so an entry would be of a key that is not its own."""

    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
    assert store.machine() is None


def test_each_source_counts(monkeypatch: Any, tmp_path: Path) -> None:
    root = Path(optimi_func.__file__).parent
    copy = tmp_path / "optimi_func"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        return store._sources.__wrapped__()

    before = digest()
    monkeypatch.setattr(store, "__file__", str(copy / "execution" / "store.py"))
    # The copy is newer than this process, which runs other sources.
    assert digest() == ""
    monkeypatch.setattr(store, "_started", float("inf"))
    assert digest() == before
    for name in ("core/leaf.py", "optimizers/lion.py", "execution/cpp/codecs.cpp"):
        path = copy / name
        text = path.read_text()
        path.write_text(text + "\n")
        assert digest() != before, name
        path.write_text(text)
    (copy / "core" / "leaf.py").rename(copy / "core" / "leaves.py")
    assert digest() != before
    shutil.rmtree(copy)
    assert digest() == ""


def test_the_key_depends_on_the_kernel(monkeypatch: Any) -> None:
    """Each field of KernelKey, the scalars' structure and the number of means."""
    seen: list[str] = []

    def find(key: str) -> None:
        seen.append(key)
        raise Asked

    monkeypatch.setattr(store, "find", find)
    base, scalars = of_adam()
    lamb, its = of(optimi_func.lamb(lr=0.1))
    rates = scalars.rates
    hooked = scalars._replace(rates=rates._replace(hooks=(("x", hooks.cautious()),)))
    wide = tuple([(name, torch.float64) for name, _ in base.tensors])
    _, *rest = base.statics
    others = [
        (base._replace(rule=optimi_func.lion(lr=0.1).rule), scalars),
        (base._replace(statics=(True, *rest)), scalars),
        (base._replace(statics=(False, *rest)), scalars),
        (base._replace(write=False), scalars),
        (base._replace(in_place=False), scalars),
        (base._replace(tensors=wide), scalars),
        (base, scalars._replace(coeffs=scalars.coeffs[:-1])),
        (base, scalars._replace(rates=rates._replace(undecayed_lr=(0.1,)))),
        (base, hooked),
        (base._replace(round="hook 0.0"), hooked),
        (lamb, its),
        (lamb._replace(round="after"), its),
    ]
    for key, its in [(base, scalars), *others]:
        with pytest.raises(Asked):
            compile_kernel(key, its)
    assert len(set(seen)) == len(others) + 1


def test_rules_are_told_by_their_digests(place: Path, monkeypatch: Any) -> None:
    adam, other = optimi_func.radam(lr=0.1).rule, optimi_func.adopt(lr=0.1).rule
    assert "" != adam.digest != other.digest != ""
    passes = [elementwise(muon(lr=0.1, nesterov=x).rule, True) for x in (False, True)]
    passes += [elementwise(x, False) for x in (muon(lr=0.1).rule, rules.gradient_rule)]
    assert len({"", *[x.digest for x in passes]}) == 5
    # Functions of a rule without a digest could change between processes.
    seen: list[str] = []
    monkeypatch.setattr(store, "find", seen.append)
    monkeypatch.setattr(kernels, "_compile_now", lambda *x: "compiled")
    key, scalars = of_adam()
    for digest in ("abc", "abd", ""):
        compile_kernel(key._replace(rule=replace(key.rule, digest=digest)), scalars)
    assert "" != seen[0] != seen[1] != seen[2] == ""


# Steps


def step(**options: Any) -> torch.Tensor:
    """Return a parameter after steps by gradients that differ."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 9000))
    given: dict[str, Any] = {"compile": True, **options}
    optimizer = AdamW([p], lr=0.1, **given)
    for i in range(3):
        p.grad = torch.cos(p.detach() + i)
        optimizer.step()
    return p.detach()


@pytest.fixture
def alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store for a process that knows no kernel."""
    monkeypatch.setattr(runtime, "kernels", {})
    monkeypatch.setattr(runtime, "functions", [])
    return place


def are_loaded() -> set[bool]:
    """Return whether this process's kernels came from the store, and forget them."""
    made: Any = kernels.forget().values()
    return {x.made_of[0].startswith(str(store.folder())) for x in made}


@pytest.mark.kernels
def test_a_step_is_loaded_and_a_broken_entry_is_made_again(alone: Path) -> None:
    first = step()
    assert are_loaded() == {False} and len(list(alone.glob("*.so"))) == 2
    assert torch.equal(step(), first) and are_loaded() == {True}
    for path in alone.glob("*.so"):
        cut(path)
    runtime.functions.clear()
    assert torch.equal(step(), first) and are_loaded() == {False}
    assert torch.equal(step(), first) and are_loaded() == {True}
    torch.testing.assert_close(step(compile=False), first)


@pytest.mark.kernels
def test_an_entry_that_computes_something_else_is_not_used(
    alone: Path, monkeypatch: Any
) -> None:
    """As if a key had left something out: the roles of two arguments are swapped."""
    found, kept = store.find, store.keep
    first = step()
    (made,) = kernels.forget().values()
    library, roles, widths = made.made_of  # type: ignore[attr-defined]
    roles[-1], roles[-2] = roles[-2], roles[-1]
    (key,) = {path.stem for path in alone.glob("*.so")} - {cpp.native_key()}
    store.keep(key, library, [roles, widths])
    asked: list[Any] = []
    monkeypatch.setattr(store, "find", lambda key: asked.append(found(key)) or asked[-1])
    monkeypatch.setattr(store, "keep", lambda *x: kept(*x))
    assert torch.equal(step(), first)
    assert None not in asked and are_loaded() == {False}


NEW_PROCESS = """
import sys, hashlib
import torch
from torch.optim.lr_scheduler import LambdaLR
from optimi_func import AdamW

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
with torch.no_grad():
    for i, p in enumerate(model.parameters()):
        p.copy_(torch.cos(torch.arange(p.numel()).view_as(p) + i))
digest = hashlib.sha256()
for dtype, storage in ((torch.float32, None), (torch.bfloat16, "compact")):
    model.to(dtype)
    optimizer = AdamW(model.parameters(), lr=0.1, storage=storage, compile=True)
    schedule = LambdaLR(optimizer, lambda step: 0.9 ** step)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    other = AdamW(list(model.parameters())[:2], lr=0.1, storage=storage)
    other.add_param_group({"params": list(model.parameters())[2:]})
    other.load_state_dict({**optimizer.state_dict(), "param_groups": [
        {**optimizer.state_dict()["param_groups"][0], "params": some}
        for some in ([0, 1], [2, 3])]})
    for p in model.parameters():
        digest.update(p.detach().float().numpy().tobytes())
print(digest.hexdigest(), *[x for x in COMPILERS if x in sys.modules])
"""


@pytest.mark.full
def test_a_new_process_loads_no_compiler(place: Path, tmp_path: Path) -> None:
    """One that compiles, and one that has only the store."""
    script = NEW_PROCESS.replace("COMPILERS", repr(COMPILERS))
    said: list[list[str]] = []
    for i in range(2):
        folder = str(tmp_path / str(i))
        said.append(said_by(script, "-Werror", TORCHINDUCTOR_CACHE_DIR=folder))
    (cold, *loaded), warm = said
    assert warm == [cold] and "torch._dynamo" in loaded
    assert not (tmp_path / "1").exists()


CHECKS = """
import sys
from optimi_func import warm
sys.argv = ["warm", "AdamW", "--check"]
warm.main()
assert not [x for x in COMPILERS if x in sys.modules]
"""


@pytest.mark.full
def test_a_warm_store_serves_where_no_compiler_is(place: Path) -> None:
    """Kernels step there, bit for bit; --check says what is kept, or why not."""
    nowhere = {"CXX": "/nonexistent", "PATH": "/nonexistent"}

    def checked(**variables: str) -> tuple[int, str]:
        program = CHECKS.replace("COMPILERS", repr(COMPILERS))
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    code, said = checked(**nowhere)
    assert (
        code == 1 and said.count("not in the store") == 2 and f"{place}: writable" in said
    )
    assert list(place.glob("*.so")) == []
    cold = said_by(COUNTS)
    assert sorted(cold[:-1]) == ["_build", "_compile_now"]
    assert said_by(COUNTS, **nowhere) == cold[-1:]
    code, said = checked(**nowhere)
    assert code == 0 and said.count(": kept\n") == 2
    for name, value in (("ATEN_CPU_CAPABILITY", "avx2"), ("CPATH", "/x")):
        code, said = checked(**{name: value})
        assert code == 1 and said.count("not in the store") == 2, said


@pytest.mark.full
def test_warm_finds_the_kernels_of_every_kind_that_it_kept(alone: Path) -> None:
    """Adafactor's take whole matrices."""
    assert warm._warm(optimi_func.Adafactor, torch.float32, {}) == []
    assert len(list(alone.glob("*.so"))) == 2


COUNTS = """
import torch
from optimi_func.execution import cpp, kernels
from optimi_func import AdamW
def counted(module, name):
    made = getattr(module, name)
    setattr(module, name, lambda *given: print(name, end=" ") or made(*given))
counted(kernels, "_compile_now")
counted(cpp, "_build")
p = torch.nn.Parameter(torch.ones(9000)); p.grad = torch.ones(9000)
AdamW([p], lr=0.1, compile=True).step()
print(p.sum().item())
"""


@pytest.mark.full
def test_of_processes_that_begin_together_one_compiles(place: Path, tmp_path: Path) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    own: Any = {"env": os.environ | folders, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", COUNTS], **own) for _ in range(3)]
    said = sorted((x.communicate()[0].split() for x in running), key=len)
    assert [len(x) for x in said] == [1, 1, 3] and {x.returncode for x in running} == {0}
    assert len({words[-1] for words in said}) == 1
    assert sorted(said[-1][:2]) == ["_build", "_compile_now"]
    assert len(list(place.glob("*.so"))) == 2


SWITCHED_OFF = """
import sys, warnings, torch
from optimi_func import AdamW
p = torch.nn.Parameter(torch.ones(9000)); p.grad = torch.ones(9000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    AdamW([p], lr=0.1).step()
assert "eagerly" in str(caught[0].message), caught
try:
    AdamW([p], lr=0.1, compile=True).step()
except RuntimeError as error:
    print(error)
assert not [x for x in COMPILERS if x in sys.modules]
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TORCHDYNAMO_DISABLE", "1", "switched off"),
        ("TORCH_COMPILE_DISABLE", "1", "switched off"),
        ("CXX", "/nonexistent", "no C++ compiler '/nonexistent' can be called"),
    ],
)
def test_no_compiler_is_imported_to_say_that_there_is_none(
    variable: str, value: str, said: str
) -> None:
    script = SWITCHED_OFF.replace("COMPILERS", repr(COMPILERS))
    own = {variable: value, store.VARIABLE: "0"}
    assert said in " ".join(said_by(script, **own))


def test_a_stance_and_a_switch_come_before_the_store(monkeypatch: Any) -> None:
    key, scalars = of_adam()

    from torch._inductor import config

    def asked(key: str) -> None:
        if key:
            raise Asked

    monkeypatch.setattr(kernels, "_compile_now", lambda *x: "compiled")
    monkeypatch.setattr(store, "find", asked)
    with pytest.raises(Asked):
        compile_kernel(key, scalars)
    # What a stance does, torch.compile decides.
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            assert compile_kernel(key, scalars) == "compiled"
    with torch._dynamo.config.patch(disable=True), pytest.raises(kernels.SwitchedOffError):
        compile_kernel(key, scalars)
    with config.patch({"cpp.cxx": (None, "/nonexistent")}):
        with pytest.raises(Asked):
            compile_kernel(key, scalars)
        monkeypatch.setattr(store, "find", lambda key: None)
        with pytest.raises(RuntimeError, match="'/nonexistent' can be called"):
            compile_kernel(key, scalars)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(kernels.SwitchedOffError):
        compile_kernel(key, scalars)


def lines(capsys: Any) -> list[str]:
    """Return what has been printed on stderr since the last call."""
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("kept", [True, False])
def test_a_compilation_is_told_once(
    kept: bool, place: Path, monkeypatch: Any, capsys: Any
) -> None:
    """On stderr, which is no terminal here."""
    monkeypatch.setattr(kernels, "_compile_now", lambda *x: "compiled")
    key, scalars = of_adam()
    key = key if kept else key._replace(rule=replace(key.rule, digest=""))
    for _ in range(2):
        assert compile_kernel(key, scalars) == "compiled"
    (said,) = lines(capsys)
    assert said.startswith("optimi_func: compiling an optimizer step for this machine")
    assert (str(place) in said) == kept and f"({store.QUIET}=1 " in said


def test_the_line_can_be_turned_off(place: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(store.QUIET, "1")
    assert store.may_compile("adam", KEY) and lines(capsys) == []
    monkeypatch.setenv(store.QUIET, "0")
    assert store.may_compile("adam", KEY) and len(lines(capsys)) == 1


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_process_without_stderr_compiles(
    stream: str | None, place: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    with open(tmp_path / "stderr", "w") as file:
        monkeypatch.setattr(sys, "stderr", file if stream else None)
    assert store.may_compile("adam", KEY)


def test_nothing_is_told_where_nothing_is_compiled(
    place: Path, library: str, monkeypatch: Any, capsys: Any
) -> None:
    """What is loaded, `warm --check`, and where there is no compiler."""
    store.keep(KEY, library, None)
    assert store.find(KEY) is not None
    with monkeypatch.context() as patch:
        patch.setattr(store, "missing", {})
        assert not store.may_compile("adam", OTHER)
    monkeypatch.setattr(store, "_version", lambda *x: "")
    with pytest.raises(RuntimeError, match="can be called"):
        store.may_compile("adam", OTHER)
    assert lines(capsys) == []


def test_who_waits_for_another_process_is_told_once(
    place: Path, monkeypatch: Any, capsys: Any
) -> None:
    key, scalars = of_adam()
    monkeypatch.setattr(store, "PATIENCE", 0.0)
    monkeypatch.setattr(store, "may_compile", lambda *x: True)
    told, tell = threading.Event(), store.tell
    monkeypatch.setattr(store, "tell", lambda *x: (tell(*x), told.set()))

    def compiled(*given: Any) -> str:
        assert told.wait(60)
        told.clear()
        return "compiled"

    monkeypatch.setattr(kernels, "_compile_now", compiled)
    for _ in range(2):
        compile_kernel(key, scalars)
    (said,) = lines(capsys)
    assert str(place) in said


def test_where_nothing_can_be_kept_no_later_process_is_promised_it(
    tmp_path: Path, monkeypatch: Any, caplog: Any, capsys: Any
) -> None:
    (tmp_path / "file").touch()  # in which no folder can be made, for root neither
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file" / "store"))
    monkeypatch.setattr(runtime, "said", set())
    for _ in range(2):
        store.tell(True)
        store.keep(KEY, __file__, None)
    ((told,), (kept,)) = lines(capsys), caplog.records
    assert "as in each process" in told and "Not a directory" in kept.getMessage()


OTHER_VECTORS = """
import torch
from optimi_func import AdamW
p = torch.nn.Parameter(torch.ones(64))
p.grad = torch.ones(64)
AdamW([p], lr=0.1, compile=True).step()
print((p != 1).sum().item())
"""


@pytest.mark.full
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="needs a CPU with AVX512",
)
def test_torchs_cache_of_other_vectors_is_not_used(tmp_path: Path) -> None:
    """Its key has no ATEN_CPU_CAPABILITY, so half of the elements would stay."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), store.VARIABLE: "0"}
    for more in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}):
        assert said_by(OTHER_VECTORS, **own, **more) == ["64"]
