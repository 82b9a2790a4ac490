"""The public surface: names, documentation, layers of imports, versions, private torch."""

import ast
import doctest
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from cases import CLASSES, NAMES

import optimi_func
from optimi_func import functional
from optimi_func.core import torch_private
from optimi_func.core.torch_private import unwrapped

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optimi_func"
README = (ROOT / "README.md").read_text()
CHOOSE = (ROOT / "docs/choose.md").read_text()


def test_public_names() -> None:
    public = {n for n in dir(optimi_func) if not n.startswith("_")}
    modules = {path.stem for path in PACKAGE.iterdir()}
    functions = {f"{n}{end}" for n in NAMES for end in ("", "_init", "_step")}
    types = {"FunctionalOptimizer", "GradientRelease", "LeafState", "PureOptimizer"}
    types |= {"Mixed", "MuonAdamW", "NorMuonAdamW", "Storage", "TreeState", "Unrolled"}
    utilities = {"param_groups_weight_decay", "to_low_precision", "unroll", "detach"}
    utilities |= {"param_groups_by_name"}
    utilities |= {"clip_grad_norm_", "join_modules"}
    utilities |= {"EMA", "hidden_matrices", "LBFGS", "lbfgs", "implicit_root"}
    utilities |= {"prepare_for_gradient_release", "remove_gradient_release"}
    classes = {c.__name__ for c in CLASSES.values()}
    # `import optimi_func.x` may bind submodules beside them.
    assert public - modules == functions | types | utilities | classes


def public_class(name: str) -> type:
    """The class itself, where the table has other defaults."""
    return getattr(optimi_func, CLASSES[name].__name__)


@pytest.mark.parametrize("name", NAMES)
def test_documentation(name: str) -> None:
    """Intuition, arguments, errors, citation, doctest: on the class, or on a base."""
    cls, base = public_class(name), optimi_func.optimizers.BaseOptimizer
    text, shared = inspect.getdoc(cls), inspect.getdoc(base)
    for part in ("Args:", "References:", ">>> ", "`BaseOptimizer`"):
        assert part in text, part
    for part in ("Args:", "Raises:", "params:", "lr:"):
        assert part in shared, part
    papers = r"arXiv:\d{4}\.\d{4,5}|ICML 2013|Coursera 2012|JMLR|ICLR|SIAM|ICNN"
    assert re.search(papers, text)
    between = [c for c in cls.__mro__[1:] if issubclass(c, base) and c is not base]
    text += "".join(f"\n{inspect.cleandoc(c.__doc__)}" for c in between)
    entries = [re.findall(r"^    (\w+): ", doc, re.MULTILINE) for doc in (text, shared)]
    for thing in (getattr(functional, name), cls):
        assert set(inspect.signature(thing).parameters) <= {*entries[0], *entries[1]}
    # Told once: what is the optimizer's own on the class, what all have on the base.
    assert set(entries[0]) & set(entries[1]) <= {"params", "lr"}
    about = inspect.getdoc(getattr(functional, name))
    assert about.startswith(
        f"{cls.__name__} as pure functions, with fixed hyperparameters."
    )
    step = getattr(functional, f"{name}_step")
    keywords = list(inspect.signature(getattr(functional, name)).parameters)
    assert list(inspect.signature(step).parameters)[:3] == ["params", "grads", "state"]
    assert list(inspect.signature(step).parameters)[3:] == keywords


def entries(text: str, heading: str) -> list[str]:
    """The names that a section of a docstring explains."""
    section = text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    ([\w(), ]+): ", section, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_generated_functions(name: str) -> None:
    """It explains each argument, the result and the errors, and names types."""
    from optimi_func import compiled

    cls = public_class(name).__name__
    made = {end: getattr(functional, name + end) for end in ("", "_init", "_step")}
    made |= {f"compiled{end}": getattr(compiled, name + end) for end in ("_step", "_step_")}
    for end, function in made.items():
        text, signature = inspect.getdoc(function), inspect.signature(function)
        assert entries(text, "Args") == list(signature.parameters), end
        assert {"TypeError", "ValueError"} <= {*entries(text, "Raises")}, end
        assert cls in text.splitlines()[0]
        assert "collections.abc" not in str(signature) and "float |" not in str(signature)
        assert "see `FunctionalOptimizer" not in text
        assert max(map(len, text.splitlines())) <= 92, end
        if end:
            assert "\nReturns:\n    " in text
    assert str(inspect.signature(made["_step"])).endswith("-> tuple[PyTree, TreeState]")
    assert "lr: Number" in str(inspect.signature(made["_step"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["", "_init", "_step"])
def test_examples_in_the_help_of_generated_functions(name: str, end: str) -> None:
    function = getattr(functional, name + end)
    names = {"torch": torch, **vars(functional)}
    test = doctest.DocTestParser().get_doctest(function.__doc__, names, name, None, 0)
    assert len(test.examples) >= 2
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.full
@pytest.mark.kernels
@pytest.mark.parametrize("end", ["_step", "_step_"])
def test_examples_in_the_help_of_compiled_functions(end: str) -> None:
    from optimi_func import compiled

    names = {"torch": torch, "compiled": compiled, **vars(functional)}
    text = getattr(compiled, f"adamw{end}").__doc__
    test = doctest.DocTestParser().get_doctest(text, names, end, None, 0)
    assert len(test.examples) == 5
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_same_at_every_door(name: str) -> None:
    pure = inspect.signature(getattr(functional, name)).parameters
    cls = inspect.signature(public_class(name)).parameters
    assert set(pure) <= set(cls)
    for key, parameter in pure.items():
        # The classes have a default lr, as torch's; the pure ones are told.
        told = key == "lr" and parameter.default is parameter.empty
        assert told or parameter.default == cls[key].default, key


def test_import_leaves_the_compiler_and_dtensor_alone() -> None:
    slow = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"}
    code = f"import sys, optimi_func; print({slow} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_readme_names_every_optimizer() -> None:
    assert f" {len(CLASSES)} optimizers " in README
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    for cls in CLASSES.values():
        own = [line for line in rows if f"`{cls.__name__}`" in line.split(" | ")[0]]
        assert len(own) == 1, f"README.md has {len(own)} rows of {cls.__name__}"
        assert f"`{cls.__name__}`" in CHOOSE


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_is_in_every_list(name: str) -> None:
    from optimi_func import compiled
    from optimi_func.state import convert

    for made in (f"{name}_step", f"{name}_step_"):
        assert made in dir(compiled), f"compiled/__init__.py lacks {made}"
    # A wrapper of Schedule-Free's authors puts z beside another rule's fields.
    fields = {*getattr(optimi_func, name)(lr=0.1).rule.state._fields} - {"z"}
    assert fields <= convert._fields(), "a State is defined in the class body"


def test_every_command_is_told() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^([\w-]+):.*\$\(\w+\)", makefile, re.M)
    assert {"train", "test", "soak", "bench", "lint", "cuda-offline"} <= set(commands)
    told = (ROOT / "CONTRIBUTING.md").read_text()
    for command in commands:
        assert f"`make {command}" in told
    for command in ("make train", "make test"):
        assert command in README


QUESTIONS = "What Whether Of Which As Where Those Whose Likewise Its How".split()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        said = ast.get_docstring(node) if isinstance(node, kinds) else None
        if said:
            assert said.split(maxsplit=1)[0].strip(",:") not in QUESTIONS, said


HOUSE = (ROOT / "docs/house.md").read_text()


def names_of_the_package() -> set[str]:
    """Everything that is defined: classes, functions, aliases, attributes, arguments."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    for path in PACKAGE.rglob("*.cpp"):
        found |= set(re.findall(r'extern "C" \w+ (\w+)\(', path.read_text()))
    return found


def test_the_house_speaks_of_what_is_there() -> None:
    """Its glossary is short, and its names and files are those of the code."""
    walk = HOUSE.split("## One step, from the class to the kernel")[1].split("\n## ")[0]
    glossary = walk.split("### Glossary")[1]
    rows = re.findall(r"^\| (`[^|]+) \|", glossary, re.M)
    assert 10 <= len(rows) <= 18
    known = names_of_the_package()
    for code in re.findall(r"`([^`]+)`", walk):
        if "/" in code:
            assert (PACKAGE / code).exists(), code
        else:
            assert set(re.findall(r"[A-Za-z_]\w*", code)) <= known, code


# The files that a step of AdamW runs through, after its first one.
STEP = [f"classes/{name}.py" for name in ("base", "groups", "stepping", "work")]
STEP += [f"execution/{name}.py" for name in ("plans", "guards", "counts", "scalars")]
STEP += [f"execution/{name}.py" for name in ("slots", "launches", "executors")]
STEP += [f"execution/{name}.py" for name in ("kernels", "list_kernel")]


def types_in(path: str) -> dict[str, set[str]]:
    """The classes and type aliases of a file, with the names of their bases."""
    found: dict[str, set[str]] = {}
    for node in ast.parse((PACKAGE / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(map(ast.unparse, node.bases))
        elif (
            isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
        ):
            found[ast.unparse(node.target)] = set()
    return found


def test_the_glossary_names_all_that_a_step_passes() -> None:
    """Its words are the types between `step()` and a kernel, and kinds of them."""
    known = set(re.findall(r"^\| `(\w+)` \|", HOUSE.split("### Glossary")[1], re.M))
    own = {base.__name__ for base in optimi_func.optimizers.BaseOptimizer.__mro__}
    found: dict[str, set[str]] = {}
    for path in STEP:
        found |= types_in(path)
    assert len(found) > 20
    # A context manager in lower case is called like a function.
    public = {name for name in found if not (name.startswith("_") or name.islower())}
    kinds = {name for name in public if found[name] & {*known, "RuntimeError", "TypedDict"}}
    assert public - kinds - known - own == set()


LINKS = re.compile(r"\]\((?!https?://)([^)#]+)")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_into_the_repository_lead_somewhere(name: str) -> None:
    for path in LINKS.findall((ROOT / name).read_text()):
        assert (ROOT / path).exists(), path


# Rooms that import the package and that nothing in it imports. A folder stands for all of
# its files, and the training step for what belongs to it alone.
PORCH = {"extra", "fitting", "memory", "population", "testing", "warm"}
PORCH.add("compiled.train_step")
# Files that only name what users import, of the porch too.
FACES = {
    PACKAGE / name for name in ("__init__.py", "compiled/__init__.py", "functional.py")
}
LAYERS = [
    {"core"},
    {"execution"},
    {"hooks", "pure", "schedules"},
    {"state"},
    {"transforms"},
    {"classes"},
    {"rules"},
    {"optimizers"},
    {"functional"},
    {"compiled", "gradient_release"},
    {"utils", "optim"},
    PORCH,
    {"__init__"},
]


def room_of(path: Path) -> str:
    """Return the room of a file or folder of the package."""
    room, *inner = path.relative_to(PACKAGE).with_suffix("").parts
    return "compiled.train_step" if room == "compiled" and inner > ["__init__"] else room


def rooms_in(node: ast.AST) -> set[str]:
    """Return the rooms that a statement imports, if it is an import."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [a.name for a in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{a.name}" for a in node.names]
    rooms: set[str] = set()
    for package, *parts in [name.split(".") for name in names]:
        if package == "optimi_func":
            inner = [PACKAGE.joinpath(*parts[:n]) for n in (2, 1, 0)]
            places = [x for i in inner for x in (i.with_suffix(".py"), i / "__init__.py")]
            rooms.add(room_of(next(filter(Path.exists, places))))
    return rooms


FILES = pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)


@FILES
def test_imports_point_one_way(path: Path) -> None:
    def layer(room: str) -> int:
        return next(i for i, names in enumerate(LAYERS) if room in names)

    here = room_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        for room in rooms_in(node) - {here} - (PORCH if path in FACES else set()):
            assert layer(room) < layer(here), f"{here}: {room}"


@FILES
def test_nothing_imports_the_porch(path: Path) -> None:
    """Not the package, but for its faces, and not another room of the porch."""
    here = room_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        found = (rooms_in(node) & PORCH) - {here}
        assert path in FACES or not found, f"{here}, line {node.lineno}: {found}"


# What `import optimi_func` needs without a room: all other modules, and a step.
WITHOUT_A_ROOM = """
import importlib, pkgutil
from pathlib import Path
import torch, optimi_func

assert Path(optimi_func.__file__).parents[1].samefile(Path.cwd())
for module in pkgutil.walk_packages(optimi_func.__path__, "optimi_func."):
    importlib.import_module(module.name)
p = torch.ones(2, requires_grad=True)
optimizer = optimi_func.AdamW([p], lr=0.1, compile=False)
p.sum().backward()
optimizer.step()
assert (p < 1.0).all()
"""


@pytest.mark.full
@pytest.mark.parametrize("room", sorted({*map(room_of, PACKAGE.rglob("*.py"))} & PORCH))
def test_a_room_of_the_porch_can_be_deleted(room: str, tmp_path: Path) -> None:
    def left_out(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n == "__pycache__" or room_of(Path(folder, n)) == room}

    shutil.copytree(PACKAGE, tmp_path / "optimi_func", ignore=left_out)
    for face in FACES:
        tree = ast.parse(face.read_text())
        tree.body = [node for node in tree.body if room not in rooms_in(node)]
        (tmp_path / face.relative_to(ROOT)).write_text(ast.unparse(tree))
    command = [sys.executable, "-c", WITHOUT_A_ROOM]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ROOMS = {"adamw": "adam"} | {n: "schedule_free" for n in NAMES if n.startswith("schedule")}
NAMED = re.compile(rf"(?<![a-z])({'|'.join(NAMES)})(?![a-z])", re.IGNORECASE)


def test_only_the_faces_name_an_optimizer() -> None:
    """One file an optimizer: nothing else knows which there are."""
    rooms = {PACKAGE / f"optimizers/{ROOMS.get(name, name)}.py" for name in NAMES}
    assert all(room.exists() for room in rooms)
    rooms.add(PACKAGE / "optimizers/muonadamw.py")  # of two
    faces = {*PACKAGE.rglob("__init__.py"), PACKAGE / "functional.py"}
    faces.add(PACKAGE / "optim/_classes.py")  # optim/__init__.py has torch's names alone
    for path in {*PACKAGE.rglob("*.py")} - rooms - faces:
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            named = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
            for text in named if id(node) not in prose else []:
                found = set(NAMED.findall(text))
                # An error may show how one is called.
                shown = (
                    {"adamw"} if isinstance(node, ast.Constant) and " " in text else set()
                )
                # Kernels are named after their rule, and this one has no other file.
                if path == PACKAGE / "core/rule.py" and text == "sgd":
                    shown = {"sgd"}
                assert found <= shown, f"{path}:{node.lineno}: {text}"


PRIVATE = re.compile(r"torch\._(?!_version__)(\w+)")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_private_torch_stays_in_its_corner(path: Path) -> None:
    if (
        path.parent.name not in ("compiled", "execution")
        and path.name != "torch_private.py"
    ):
        assert not PRIVATE.findall(path.read_text())


def test_private_torch_is_there() -> None:
    """What compiled/ uses of torch's private names: a torch without them fails here."""
    from torch._inductor import lowering
    from torch._inductor.graph import GraphLowering
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

    assert callable(GraphLowering.mark_buffer_mutated)
    assert callable(get_layout_constraint_tag)
    assert callable(lowering.make_fallback) and lowering.lowerings
    assert callable(lowering.tag_to_layout_constraint)
    assert any_torch_dispatch_mode_on_stack() is False
    targets, sources = [torch.zeros(2)], [torch.ones(2)]
    torch._foreach_copy_(targets, sources)
    assert targets[0].tolist() == [1, 1]
    parts = [torch.ones(2, 3).t(), torch.zeros(()), torch.ones(0)]
    flat = torch._utils._flatten_dense_tensors(parts)
    assert flat.tolist() == [1, 1, 1, 1, 1, 1, 0]
    views = torch._utils._unflatten_dense_tensors(flat, parts)
    assert [v.shape for v in views] == [p.shape for p in parts]
    assert callable(torch._dynamo.config.patch)
    torch._foreach_add_(targets, [1.0])
    assert targets[0].tolist() == [2, 2]


def test_private_facts_of_operations_are_there() -> None:
    """What programs are recorded by."""
    mul, view = torch.ops.aten.mul.Tensor, torch.ops.aten.view.default
    assert mul.overloadpacket.__name__ == "mul"
    assert torch.Tag.pointwise in mul.tags
    assert torch.Tag.pointwise not in torch.ops.aten.sum.default.tags
    assert torch.ops.aten.mul_.Tensor._schema.is_mutable
    assert not mul._schema.is_mutable
    assert view.is_view
    assert not mul.is_view
    assert torch.ops.aten._to_copy.default.overloadpacket.__name__ == "_to_copy"


def test_private_checkpoint_asks_a_class_for_its_state() -> None:
    """What `in_distributed_checkpoint` looks for: a frame of these modules."""
    from torch.distributed.checkpoint import state_dict

    from optimi_func.core.torch_private import in_distributed_checkpoint

    within: list[bool] = []

    class Asked(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            within.append(in_distributed_checkpoint())
            return super().state_dict()

    model = torch.nn.Linear(1, 1)
    optimizer = Asked(model.parameters(), lr=0.1)
    state_dict.get_optimizer_state_dict(model, optimizer)
    assert within and all(within)
    optimizer.state_dict()
    assert within[-1] is False


def test_private_compiler_is_there() -> None:
    """What compiled.train_step uses beside torch.compile and torch.func."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = mode.from_tensor(torch.ones(2))
    with mode:
        assert (given.view(2, 1) + torch.ones(2)).shape == (2, 2)
        assert given.view(2, 1).untyped_storage()._cdata == given.untyped_storage()._cdata
        with _disable_current_modes():
            assert type(torch.ones(2)) is torch.Tensor
    (argument,) = torch.ops.aten.zero_.default._schema.arguments
    assert argument.alias_info.is_write
    w = torch.ones(2, requires_grad=True)
    w.register_hook(lambda g: g)
    assert w._backward_hooks
    optimizer = torch.optim.SGD([w])
    optimizer.register_step_pre_hook(lambda *_: None)
    assert optimizer._optimizer_step_pre_hooks


def test_private_autograd_is_there() -> None:
    w = torch.ones(2, requires_grad=True)
    assert torch_private.backward_id() == -1
    assert torch_private.accumulate_hooks(w) == []
    seen = []

    def hook(p) -> None:
        seen.append(torch_private.backward_id() >= 0)
        torch_private.after_backward(lambda: seen.append("end"))

    w.register_post_accumulate_grad_hook(hook)
    assert torch_private.accumulate_hooks(w) == [hook]
    w.sum().backward()
    assert seen == [True, "end"]


def test_private_norms_are_there() -> None:
    tensors = [torch.full((4,), 2.0, dtype=torch.bfloat16), torch.ones(1).double()]
    norms = torch_private.norms_of(tensors)
    assert [x.item() for x in norms] == [4.0, 1.0]
    assert [x.dtype for x in norms] == [torch.float32, torch.float64]


def test_private_names_tell_what_is_traced() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from optimi_func.core.torch_private import dispatch_modes, in_compiled_region

    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this frame runs uncompiled")
        seen.append(in_compiled_region())
        return x

    look(torch.ones(2))
    torch.compile(look, backend="eager")(torch.ones(2))
    disabled = torch.compiler.disable(look)
    torch.compile(lambda x: disabled(x) + 1, backend="eager")(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, True, False, False]
    assert dispatch_modes() == 0
    with FakeTensorMode():
        assert dispatch_modes() == 1


def test_private_pytree_names_states() -> None:
    from torch.utils import _pytree as pytree

    params = {"w": torch.ones(3)}
    spec = pytree.tree_structure(optimi_func.adamw(lr=0.1).init(params))
    text = pytree.treespec_dumps(spec)
    assert "optimi_func.TreeState" in text
    assert pytree.treespec_loads(text) == spec


def test_private_autograd_tells_a_backward_within_a_backward() -> None:
    """What starts inside has a number of its own, and its end comes first."""
    w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen, ends = [], []

    def note(p) -> None:
        seen.append(torch_private.backward_id())
        name = "outer" if p is w else "inner"
        torch_private.after_backward(lambda: ends.append(name))

    w.register_post_accumulate_grad_hook(note)
    v.register_post_accumulate_grad_hook(note)
    x = torch.ones(2, requires_grad=True)
    between, inner = x * 1, v.sum()
    between.register_hook(lambda g: inner.backward())
    (between * w).sum().backward()
    assert len(set(seen)) == 2
    assert ends == ["inner", "outer"]


def test_private_optimizer_is_there() -> None:
    """What classes keep apart from their own fields when they are pickled."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    own = {k for k in vars(optimizer) if k.startswith("_optimizer_")}
    assert len(own) == 6 and all(k.endswith("_hooks") for k in own)
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(optimizer, name)
        assert method.__code__ is torch_private._UNCOMPILED.__code__, name
        assert unwrapped(method) == method  # as the compiler has been imported
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, "torch._dynamo")
            assert unwrapped(method).__func__ is method.__wrapped__
            # A program's own wrapper stays.
            patch.setattr(torch.optim.SGD, name, functools.wraps(method)(lambda *x: 1))
            own = getattr(optimizer, name)
            assert unwrapped(own) == own
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer = optimi_func.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    assert "_zero_grad_profile_name" in vars(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)


def test_private_compiler_settings_are_there() -> None:
    """What execution/ sets and replaces while it compiles."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.compile_fx import compile_fx_inner

    assert config.cpp.vec_isa_ok in (None, True, False)
    assert isinstance(torch._dynamo.config.run_gc_after_compile, bool)
    assert callable(cpu_vec_isa.valid_vec_isa_list)
    assert {*cpu_vec_isa.x86_isa_checker()} <= {
        name for x in cpu_vec_isa.supported_vec_isa_list for name in str(x).split()
    }
    settings = "use_pre_grad_passes", "use_joint_graph_passes", "size_asserts"
    settings = (*settings, "fx_graph_cache")
    limits = "reads", "acc_reads", "opcount"
    for name in (*settings, *[f"realize_{limit}_threshold" for limit in limits]):
        assert hasattr(config, name), name
    assert hasattr(config, "cpp_cache_precompile_headers")
    assert callable(compile_fx_inner)
    # What a store's key and a step without the compiler read.
    assert torch_private.changed_settings() == []
    with config.patch({"cpp.simdlen": 1}):
        assert torch_private.changed_settings() == ["cpp.simdlen=1"]
    assert not torch_private.has_stance() and not torch_private.is_switched_off()
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.has_stance()
    with torch._dynamo.config.patch(disable=True):
        assert torch_private.is_switched_off()


def test_private_transforms_are_there() -> None:
    seen = []

    def f(x):
        seen.append((torch_private.transform_level(), torch_private.level_of(x)))
        return x

    torch.func.grad(torch.func.grad(f))(torch.ones(()))
    assert seen == [(2, 2)]
    assert torch_private.level_of(torch.ones(())) == -1


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_private_modes_are_seen() -> None:
    """Without this, a graph would keep the step count as a constant."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_unwatched())
        return x + 1

    one = torch.ones(())
    look(one)
    torch.func.vmap(look)(torch.ones(2))
    make_fx(look)(one)
    make_fx(look, tracing_mode="symbolic")(one)
    torch.jit.trace(look, one, check_trace=False)
    with FakeTensorMode():
        look(torch.ones(()))
    assert seen[:2] == [True, True]
    assert len(seen) >= 6 and not any(seen[2:])


def test_the_package_depends_on_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "optimi_func", "filelock"}
    # The store locks its entries with filelock, which every torch brings.
    assert any(x.startswith("filelock") for x in metadata.requires("torch") or [])
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            found = {name.split(".")[0] for name in names}
            assert found <= allowed


# The files around the package


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, set[str]]:
    """The versions that a file asks for, by package."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"\b([\w.-]+)==([\d.]+)", text):
        found.setdefault(name, set()).add(version)
    return found


def test_every_file_has_the_same_version() -> None:
    version = PROJECT["version"]
    assert optimi_func.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.M) == [version]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version
    assert f"version {version}" in (ROOT / "docs/index.md").read_text()


def test_pre_commit_has_the_versions_of_make_lint() -> None:
    asked = pins((ROOT / ".pre-commit-config.yaml").read_text())
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert set(asked) == {"ruff", "basedpyright", "clang-format"}
    for name, versions in asked.items():
        assert versions == pinned[name]


def test_the_workflow_tests_every_python_that_is_promised() -> None:
    promised = set(
        re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]), re.M)
    )
    assert f">={min(promised, key=lambda x: int(x[2:]))}" == PROJECT["requires-python"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    run = re.findall(r'^ +- python: "(.+)"$', workflow, re.M)
    assert set(run) == promised
    assert "PYTHON: python${{ matrix.python }}" in workflow
    assert ".ci/run" in workflow
