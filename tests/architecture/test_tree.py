import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
SECTIONS = ["Does:", "Requires:", "Ensures:", "Communication:", "Limits:", "Sources:"]
# Data flows down this list and imports go up it: a module may import what stands on its own line or before.
ORDER = [
    "lazy", "errors", "strategy", "ir", "presets", "runtime", "rules", "trace", "cost", "solve", "verify", "passes",
    "emit", "checkpoint", "emit.module", "emit.deferred", "compile", "verify.numerics", "plans", "ranking", "shelf",
    "configurations", "families", "models", "resized", "lowering", "learned", "planner", "predict", "calibrate", "auto",
    "api", "", "measure", "report", "cli", "__main__",
]  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by name, ``autopar.`` left out; links are followed once."""
    found = {}
    for path in sorted(_walk(ROOT / "autopar")):
        parts = path.relative_to(ROOT / "autopar").with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def _walk(folder: Path) -> list[Path]:
    out = []
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            out += _walk(entry)
        elif entry.suffix == ".py":
            out.append(entry)
    return out


def place(module: str) -> int:
    """The line of ORDER that the module belongs to: its longest listed prefix."""
    prefixes = [p for p in ORDER if p and (module == p or module.startswith(p + "."))]
    assert prefixes or module == "", f"autopar.{module} is not in ORDER"
    return ORDER.index(max(prefixes, key=len, default=""))


def imports(path: Path, module: str) -> set[str]:
    """What the file imports from autopar, wherever the statement stands; ``autopar.`` left out."""
    known, out = modules(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names if a.name.split(".")[0] == "autopar"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if (node.module or "").split(".")[0] == "autopar":
                inner = {f"{node.module}.{a.name}" for a in node.names}
                out |= {i if i.removeprefix("autopar.") in known else str(node.module) for i in inner}
    return {o.removeprefix("autopar").removeprefix(".") for o in out}


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module):
    for target in imports(modules()[module], module):
        assert place(target) <= place(module), f"autopar.{module} imports autopar.{target}"


@pytest.mark.parametrize("folder", ("examples", "benchmarks"))
def test_what_stands_outside_imports_what_there_is(folder):
    for path in _walk(ROOT / folder):
        gone = {t for t in imports(path, path.name) if t and t not in modules()}
        assert not gone, f"{path.relative_to(ROOT)} imports autopar.{', autopar.'.join(gone)}"


def test_files_are_small():
    folders = ("autopar", "tests", "examples", "benchmarks")
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for f in folders for p in _walk(ROOT / f)}
    assert {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > MOST_LINES} == {}


def test_the_package_list_equals_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tree = {"autopar"} | {f"autopar.{m}" for m, path in modules().items() if path.name == "__init__.py" and m}
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed)) and set(listed) == tree
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        assert (ROOT / folder).is_dir() and (ROOT / package.replace(".", "/")).resolve() == ROOT / folder


def test_data_files_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]
    listed = {p for package, patterns in globs.items() for g in patterns for p in _folder(package).glob(g)}
    wanted = {
        p.resolve()
        for f in ("autopar", "passes", "cost")
        for s in ("json", "toml", "html")
        for p in (ROOT / f).rglob(f"*.{s}")
    }
    assert {p.resolve() for p in listed} == wanted


def _folder(package: str) -> Path:
    return ROOT / package.replace(".", "/")


def passes() -> list[tuple[Path, ast.ClassDef]]:
    """Every class in passes/ that has a pass's name."""
    found = []
    for path in sorted((ROOT / "passes").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(_names(line) for line in node.body):
                found.append((path, node))
    return found


def _names(line: ast.stmt) -> bool:
    return isinstance(line, ast.AnnAssign) and getattr(line.target, "id", "") == "name" and line.value is not None


@pytest.mark.parametrize(("path", "node"), [pytest.param(p, n, id=n.name) for p, n in passes()])
def test_a_pass_says_what_it_does(path, node):
    text = ast.get_docstring(node) or ""
    found = re.findall(r"^(\w+:)$", text, flags=re.M)
    assert found == SECTIONS, f"{path.name}: sections of {node.name}"
    for section, body in zip(SECTIONS, re.split(r"^\w+:$", text, flags=re.M)[1:]):
        assert body.strip(), f"{path.name}: {section} is empty"


def test_there_are_passes():
    assert passes()


# api is where processes meet the mesh; all other code has coordinates.
@pytest.mark.parametrize("module", [m for m in modules() if not m.startswith("runtime") and m != "api"])
def test_only_the_runtime_asks_for_ranks(module):
    banned = {"get_rank", "get_world_size", "permute_tensor"}
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert not used & banned


@pytest.mark.parametrize("module", [m for m in modules() if not m.startswith(("presets", "cli"))])
def test_no_model_is_named_in_the_code(module):
    families = re.compile(r"\b(llama|qwen|gpt2|bert|t5|vit|mixtral|deepseek|gemma|falcon|bloom|neox|olmo)", re.I)
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    words = [s for s in strings if isinstance(s, str)] + [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    assert [w for w in words if families.search(w)] == []


def test_the_readme_s_commands_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, flags=re.M))
    named = set(re.findall(r"\bmake (\w+)", text))
    assert {"demo", "test"} <= named <= targets
    commands = {p.stem for p in (ROOT / "autopar" / "cli").glob("*.py")}
    assert set(re.findall(r"^(?:\$ )?autopar (\w+)", text, flags=re.M)) <= commands
    for path in re.findall(r"\b(?:examples|benchmarks|tests)/[\w/]+\.py\b", text + makefile):
        assert (ROOT / path).exists(), path


def packages_of(path: Path, top: bool) -> set[str]:
    """Packages of others that a file imports, at its top level or anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top else list(ast.walk(tree))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {n.split(".")[0] for n in names} - {"autopar", *sys.stdlib_module_names}


def test_every_package_that_is_imported_is_asked_for_by_what_imports_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, *extras = (
        {re.match(r"[\w-]+", d)[0] for d in listed}
        for listed in (project["dependencies"], *(project["optional-dependencies"][e] for e in ("hf", "report")))
    )
    lazy = {"report.figures"}  # which the page imports when it is drawn
    found = modules()
    assert set().union(*(packages_of(p, top=True) for n, p in found.items() if n not in lazy)) == core
    assert set().union(*(packages_of(p, top=False) for p in found.values())) == core.union(*extras)


def test_public_names_are_loaded_when_they_are_used():
    code = (
        "import sys, autopar; assert 'autopar.emit.module' not in sys.modules; import autopar.verify.structure; "
        "assert all(getattr(autopar, n) is not None for n in autopar.__all__) and callable(autopar.verify); "
        "assert set(autopar.__all__) <= set(dir(autopar)); from autopar import parallelize, verify"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
