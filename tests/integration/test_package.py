"""The package as it is published: what is in it, and that it needs no repository."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import optimi_func

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optimi_func"
NOT_COPIED = (".*", "site", "outputs", "build", "dist", "*.egg-info", "__pycache__")

PROGRAM = """
import sys
from pathlib import Path

import torch
import optimi_func
from optimi_func import AdamW, compiled, prepare_for_gradient_release

assert Path(optimi_func.__file__).is_relative_to(sys.prefix), optimi_func.__file__
print(optimi_func.__version__)

params = [torch.ones(1000), torch.ones(10)]
grads = [torch.ones_like(p) for p in params]
state = optimi_func.adamw_init(params)
compiled.adamw_step_(params, grads, state, lr=0.1, weight_decay=0.0)
torch.testing.assert_close(params[0], torch.full((1000,), 0.9))

model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = AdamW(
    model.parameters(), lr=0.1, weight_decay=0.0, compile=True, gradient_release=True
)
prepare_for_gradient_release(model, optimizer)
model(torch.ones(1, 3)).sum().backward()
assert model.weight.grad is None
torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), 0.9))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; it sees nothing of the repository."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_environment(folder: Path) -> Path:
    """A fresh environment's interpreter."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    python = make_environment(folder / "builder")
    run(python, "-m", "pip", "install", "--quiet", "build", cwd=folder)
    run(python, "-m", "build", "--outdir", out, source, cwd=folder)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def sources() -> set[str]:
    """All files of the package, as paths from the root."""
    paths = [p for end in ("py", "cpp", "typed") for p in PACKAGE.rglob(f"*.{end}")]
    return {str(path.relative_to(ROOT)) for path in paths}


@pytest.mark.soak
def test_the_sdist_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as file:
        paths = {m.name.partition("/")[2] for m in file.getmembers() if m.isfile()}
    assert f"-{optimi_func.__version__}.tar.gz" in built[0].name
    files = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"}
    files |= sources()
    assert files <= paths
    made = {"PKG-INFO", "MANIFEST.in", "setup.cfg"}
    rest = {path for path in paths - files - made if ".egg-info/" not in path}
    assert rest == set()


@pytest.mark.soak
def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as file:
        paths = set(file.namelist())
        (metadata,) = [path for path in paths if path.endswith(".dist-info/METADATA")]
        text = file.read(metadata).decode()
    inside = {path for path in paths if ".dist-info/" not in path}
    assert inside == sources()
    assert any(path.endswith("licenses/LICENSE") for path in paths)
    assert f"\nVersion: {optimi_func.__version__}\n" in text
    needed = [x for x in text.splitlines() if x.startswith("Requires-Dist")]
    assert [x for x in needed if "extra ==" not in x] == ["Requires-Dist: torch>=2.13"]


@pytest.mark.night
def test_the_wheel_steps_with_torch_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = make_environment(tmp_path / "fresh")
    pinned = f"torch=={torch.__version__.partition('+')[0]}"
    run(python, "-m", "pip", "install", "--quiet", pinned, built[1], cwd=tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run(python, "program.py", cwd=tmp_path).strip() == optimi_func.__version__
