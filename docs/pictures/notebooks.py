"""Extract the pictures from the notebooks, for the gallery.

`python docs/pictures/notebooks.py` writes the pictures. Notebooks are committed with their
outputs, so this program does not run them.
"""

import json
from base64 import b64decode
from pathlib import Path

FOLDER = Path(__file__).parent
# The notebook, and which of its pictures the gallery shows.
SHOWN = {"half_the_memory": 0, "own_rule": 0, "population": 1, "learned_lr": 1}


def pictures(notebook: str) -> list[bytes]:
    """Return all pictures in the outputs of a notebook's cells, as PNG files."""
    path = FOLDER.parent / "notebooks" / f"{notebook}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    found = [
        out["data"]["image/png"] for out in outputs if "image/png" in out.get("data", {})
    ]
    return [b64decode(x) for x in found]


def shown() -> dict[str, bytes]:
    """Return the pictures for the gallery, by file name."""
    return {f"notebook_{name}.png": pictures(name)[i] for name, i in SHOWN.items()}


if __name__ == "__main__":
    for name, picture in shown().items():
        (FOLDER / name).write_bytes(picture)
