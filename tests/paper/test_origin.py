"""Which commit a row was made at."""

import subprocess
from pathlib import Path

import pytest

from pathcond_paper import origin


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *name, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout with one commit."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    (tmp_path / "notes").write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return package


def test_the_commit_of_a_checkout(package: Path) -> None:
    head = git(package, "rev-parse", "HEAD")
    assert origin.commit_of(package) == head
    (package.parents[1] / "notes").write_text("second\n")
    assert origin.commit_of(package) == head, "only the package counts"


def test_changes_and_new_files_are_marked(package: Path) -> None:
    head = git(package, "rev-parse", "HEAD")
    (package / "__init__.py").write_text("a = 2\n")
    assert origin.commit_of(package) == f"{head}+changes"
    (package / "__init__.py").write_text("a = 1\n")
    (package / "new.py").write_text("b = 1\n")
    assert origin.commit_of(package) == f"{head}+changes"


def test_a_package_is_as_at_a_commit_while_it_is_the_same(package: Path) -> None:
    def commit() -> str:
        git(package.parents[1], "add", "-A")
        git(package, "commit", "-q", "-m", "more")
        return git(package, "rev-parse", "HEAD")

    first = git(package, "rev-parse", "HEAD")
    (package.parents[1] / "notes").write_text("second\n")
    second = commit()
    assert origin.is_as_at(first, package), "other files were committed"
    assert origin.is_as_at(second, package)
    (package / "new.py").write_text("b = 1\n")
    assert not origin.is_as_at(second, package), "a new file"
    third = commit()
    assert origin.is_as_at(third, package)
    assert not any(origin.is_as_at(name, package) for name in (first, second, None, "", "abc"))


def test_a_package_is_as_at_a_commit_while_its_code_is(package: Path) -> None:
    def commit(name: str, text: str) -> str:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
        git(package.parents[1], "add", "-A")
        git(package, "commit", "-q", "-m", "more")
        return git(package, "rev-parse", "HEAD")

    code = '"""What it does."""\nif a:  # why\n    raise ValueError("It is {a}, which is {b}.")\n'
    first = commit("__init__.py", code)
    commit(
        "__init__.py", code.replace("What", "All that").replace("It is", "There").replace("why", "")
    )
    assert origin.is_as_at(first, package), "docstrings, comments, messages"
    commit("__init__.py", code.partition("\n")[2])
    assert origin.is_as_at(first, package), "a docstring less"
    told = commit("told/page.py", "a = 1\n")
    assert not origin.is_as_at(first, package)
    assert origin.is_as_at(first, package, but=("told",))
    commit("__init__.py", code.replace("if a", "if not a"))
    assert not origin.is_as_at(first, package, but=("told",))
    assert not origin.is_as_at(told, package)
    same = commit("data.txt", "a b c d")
    commit("data.txt", "a b c e")
    assert not origin.is_as_at(same, package), "a file that is no program"


def test_a_package_installed_below_another_project_has_none(package: Path) -> None:
    installed = package.parents[1] / ".venv" / "site-packages" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert origin.commit_of(installed) is None


@pytest.mark.parametrize(("named", "expected"), [("abc", "abc"), ("", None), (None, None)])
def test_without_a_checkout_the_environment_names_it(
    named: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "PACKAGES", (tmp_path,))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("PATHCOND_COMMIT", raising=False)
    if named is not None:
        monkeypatch.setenv("PATHCOND_COMMIT", named)
    assert origin.commit.__wrapped__() == expected


def test_the_checkout_comes_first(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PACKAGES", (package,))
    monkeypatch.setenv("PATHCOND_COMMIT", "abc")
    assert origin.commit.__wrapped__() == git(package, "rev-parse", "HEAD")
