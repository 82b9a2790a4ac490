"""Take the pictures of the notebooks, which the gallery shows beside those of the examples.

`python docs/pictures/notebooks.py` writes them. Notebooks are committed with their outputs,
so nothing is run.
"""

import json
from base64 import b64decode
from pathlib import Path

FOLDER = Path(__file__).parent
# The notebook, and which of its pictures the gallery shows.
SHOWN = {"half_the_memory": 0, "own_rule": 0, "population": 1, "learned_lr": 1}


def pictures(notebook: str) -> list[bytes]:
    """Return all pictures that a notebook's cells have put out, as PNG files."""
    path = FOLDER.parent / "notebooks" / f"{notebook}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    found = [
        out["data"]["image/png"] for out in outputs if "image/png" in out.get("data", {})
    ]
    return [b64decode(x) for x in found]


def shown() -> dict[str, bytes]:
    """Return the pictures of the gallery by the names of their files."""
    return {f"notebook_{name}.png": pictures(name)[i] for name, i in SHOWN.items()}


if __name__ == "__main__":
    for name, picture in shown().items():
        (FOLDER / name).write_bytes(picture)
