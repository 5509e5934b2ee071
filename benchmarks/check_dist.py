"""Check what `make dist` built: size, licence, types, and that the wheel trains in an empty environment.

    python benchmarks/check_dist.py dist

The environment borrows the packages that gradsieve depends on from the one that runs this script, and nothing else.
"""

import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

MOST_BYTES = 1_000_000
NEEDED = (
    "gradsieve/py.typed",
    "gradsieve_lab/cli/demo.py",
    "gradsieve_lab/runs/running.py",
    "gradsieve_lab/report/page.css",
)
TRAIN = """
import sys, torch, torch.distributed as dist, gradsieve, gradsieve._version
assert "site-packages" in gradsieve.__file__, gradsieve.__file__
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
sieve = gradsieve.sparsify(model, density=0.01)
model(torch.ones(4, 100)).square().mean().backward()
dist.destroy_process_group()
print("gradsieve", gradsieve.__version__, "trains:", sieve.summary())
"""


def main(folder: Path) -> None:
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for file in (wheel, source):
        size = file.stat().st_size
        if size > MOST_BYTES:
            sys.exit(f"{file.name} has {size:,} bytes, more than {MOST_BYTES:,}")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    if missing or not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit(f"{wheel.name} lacks {', '.join(missing) or 'its licence'}")
    inner = [line for line in described(wheel) if re.search(r"\]\((?!https?:|#)", line)]
    if inner:
        sys.exit(f"{wheel.name} describes itself with relative links, which lead nowhere: {inner[0].strip()}")
    with tarfile.open(source) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"):
        if name not in sources:
            sys.exit(f"{source.name} lacks {name}")
    try_out(wheel)


def described(wheel: Path) -> list[str]:
    """The lines of the README in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return archive.read(name).decode().splitlines()


def try_out(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", f"{scratch}/venv"], check=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", wheel]
        subprocess.run(pip, check=True)
        inside = next((Path(scratch) / "venv" / "lib").glob("python*/site-packages"))
        # Behind the environment's own packages: this one's gradsieve is never found there.
        (inside / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-I", "-c", TRAIN, scratch], check=True, cwd=scratch)  # whatever PYTHONPATH names


if __name__ == "__main__":
    main(Path(sys.argv[1]))
