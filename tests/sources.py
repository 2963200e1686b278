"""The files that ship and what each of them imports, read without running them."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("devices", "quant", "export", "runtime")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True, slots=True)
class Import:
    name: str  # dotted, the imported name included: `from specedge import runtime` is specedge.runtime
    line: int
    lazy: bool  # inside a function, so that importing the module does not run it


def shipped(root: Path = ROOT) -> dict[str, Path]:
    """Every module on disk: its name inside a wheel, such as specedge/export/cli.py, and its file."""
    files = {f"specedge/{path.name}": path for path in (root / "src/specedge").glob("*.py")}
    for folder in FOLDERS:
        files |= {f"specedge/{path.relative_to(root).as_posix()}": path for path in (root / folder).rglob("*.py")}
    return files


def imports(source: str) -> list[Import]:
    """Every import of a source text, relative ones with their dots, and `import_module("...")` with a fixed name."""
    return list(_walk(ast.parse(source), lazy=False))


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, lazy) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            origin = "." * level + (module or "")
            yield from (Import(f"{origin}.{alias.name}", node.lineno, lazy) for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield Import(name, node.lineno, lazy)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, lazy)
