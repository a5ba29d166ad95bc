"""What tests of optional parts need: packages of an extra, or a program."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

REQUIRED = os.environ.get("UCXKV_TEST_INTEGRATIONS") == "required"


def need(package: str, extra: str) -> None:
    """Skip the whole module without a package, unless UCXKV_TEST_INTEGRATIONS=required."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        _missing(f"no {package}: pip install 'ucxkv[{extra}]'")


def program(name: str, package: str) -> str:
    """Where a program is; without it the test is skipped, as by `need`."""
    path = shutil.which(name)
    if path is None:
        _missing(f"no {name}: apt-get install {package}")
    assert path is not None
    return path


def _missing(what: str) -> None:
    if REQUIRED:
        pytest.fail(what)
    pytest.skip(what, allow_module_level=True)
