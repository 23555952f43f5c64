"""The wheel: one package, which generates where nothing but what it asks for is installed."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = ("kivi", "tasks", "flows", "pyproject.toml", "README.md", "LICENSE")
SPEC = "kivi:bits=2,residual=0"
GENERATE = f"""
import sys
from kivi import CacheSpec, KIVICache, make_prompt_cache
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
cache = make_prompt_cache(model, CacheSpec.parse({SPEC!r}))
print([answer.token for answer in stream_generate(model, tokenizer, "def f(x):" * 20, max_tokens=16, prompt_cache=cache)])
assert all(isinstance(layer, KIVICache) and layer.frontier > 0 for layer in cache)
"""
COMMANDS = ("cache_prompt", "chat", "generate", "server")
LAB = ("prefect", "mlflow", "datasets", "scipy", "matplotlib", "psutil", "tasks", "flows")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy: setuptools leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "uv", "build", "--quiet", "--wheel", str(source)], check=True, timeout=120)
    (built,) = (source / "dist").glob("kivi_mlx-*.whl")
    return built


def needed(requirement: Requirement, found: dict[str, set[str]]) -> None:
    """Add the distribution that ``requirement`` asks for, and what that asks for, to ``found``: name to extras."""
    extras = found.setdefault(requirement.name.lower(), set())
    if extras >= requirement.extras | {""}:
        return
    extras |= requirement.extras | {""}
    for line in importlib.metadata.requires(requirement.name) or ():
        part = Requirement(line)
        if part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in extras):
            needed(part, found)


def asks_for(wheel: Path) -> list[Requirement]:
    """Return what the wheel's metadata ask for on this machine, MLX's CPU build on Linux included."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        metadata = archive.read(path).decode()
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    return [part for part in map(Requirement, lines) if part.marker is None or part.marker.evaluate({"extra": "cpu"})]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty environment; what it asks for is linked from this one, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python)]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    found: dict[str, set[str]] = {}
    for requirement in asks_for(wheel):
        needed(requirement, found)
    assert len(found) < 50  # with the lab's they are 200
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for name in found:
        for file in importlib.metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return folder


def test_the_wheel_is_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"kivi"}
    packed = {name for name in names if name.startswith("kivi/")}
    assert packed == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "kivi").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }


def test_it_generates_where_nothing_else_is_installed(environment: Path, tiny_folder: Path, tmp_path: Path) -> None:
    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    scripts = environment / "bin"
    assert {path.name for path in scripts.glob("kivi*")} == {f"kivi.{name}" for name in COMMANDS}
    there = run(scripts / "python", "-c", f"from importlib.util import find_spec; print([*filter(find_spec, {LAB})])")
    assert there.stdout == "[]\n", there.stderr
    tokens = run(scripts / "python", "-c", GENERATE, tiny_folder)
    assert tokens.returncode == 0, tokens.stderr
    assert tokens.stdout == run(sys.executable, "-c", GENERATE, tiny_folder).stdout  # where the lab is installed too
    options = ("--prompt", "def f(x):" * 20, "--max-tokens", 16, "--verbose", "F", "--cache", SPEC)
    generated = run(scripts / "kivi.generate", "--model", tiny_folder, *options)
    assert generated.returncode == 0 and generated.stdout.strip(), generated.stderr
    measure = run(scripts / "python", "-c", "import kivi.measure")
    assert measure.stderr.endswith("ModuleNotFoundError: kivi.measure needs scipy: pip install 'kivi-mlx[measure]'\n")
