"""The stubs of the compiled modules say what is there: names, members and parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucxkv

PACKAGE = Path(ucxkv.__file__).parent
STUBS = sorted(PACKAGE.glob("*.pyi"))
COMPILED = {path.name.split(".")[0] for path in PACKAGE.glob("*.so")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(stub: Path) -> ast.Module:
    return ast.parse(stub.read_text(), str(stub))


def definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (*Function.__args__, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def is_property(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property"
        for decorator in node.decorator_list
    )


def parameters(node: ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    """Name, whether it is by keyword only, and whether it has a default."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    without = len(plain) - len(arguments.defaults)
    found = [(arg.arg, False, place >= without) for place, arg in enumerate(plain)]
    found += [
        (arg.arg, True, default is not None)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [one for one in found if one[0] != "self"]


def actual_parameters(function: object) -> list[tuple[str, bool, bool]] | None:
    """The same of a compiled function; None where it does not tell."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        only = parameter.kind is parameter.KEYWORD_ONLY
        found.append((parameter.name, only, parameter.default is not parameter.empty))
    return [one for one in found if one[0] != "self"]


def differences(where: str, node: ast.stmt, value: object) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef) or is_property(node):
        return
    actual = actual_parameters(value)
    if actual is not None and actual != parameters(node):
        yield f"{where}: the stub has {parameters(node)}, the module {actual}"


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_what_a_stub_promises_is_there(stub: Path) -> None:
    module = importlib.import_module(f"ucxkv.{stub.stem}")
    wrong = []
    for name, node in definitions(parsed(stub).body):
        if not hasattr(module, name):
            wrong.append(f"{name} is not there")
            continue
        value = getattr(module, name)
        wrong += differences(name, node, value)
        if not isinstance(node, ast.ClassDef):
            continue
        for member, inner in definitions(node.body):
            if not hasattr(value, member):
                wrong.append(f"{name}.{member} is not there")
            elif member != "__init__":
                wrong += differences(f"{name}.{member}", inner, getattr(value, member))
    assert wrong == []


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_what_is_there_is_in_the_stub(stub: Path) -> None:
    module = importlib.import_module(f"ucxkv.{stub.stem}")
    stated = dict(definitions(parsed(stub).body))
    missing = []
    for name in public(dir(module)):
        value = getattr(module, name)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        node = stated.get(name)
        if node is None:
            missing.append(name)
        elif isinstance(node, ast.ClassDef):
            members = {member for member, _ in definitions(node.body)}
            missing += [f"{name}.{m}" for m in sorted(public(list(vars(value))) - members)]
    assert missing == []


def test_compiled_modules_that_python_code_uses_have_stubs() -> None:
    used = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ucxkv."):
                used.add((node.module or "").split(".")[1])
    assert used & COMPILED
    assert used & COMPILED <= {stub.stem for stub in STUBS}


def test_every_stub_belongs_to_a_compiled_module() -> None:
    assert {stub.stem for stub in STUBS} <= COMPILED
