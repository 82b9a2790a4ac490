"""The examples run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_train_gpt(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "train_gpt.py")]
    picture = tmp_path / "curves.png"
    options = ["--quick", "--no-compile", "--out", str(picture)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for run in ("float32", "bfloat16", "bfloat16 + Kahan"):
        assert run in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
