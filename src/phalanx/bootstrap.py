#!/usr/bin/env python3
"""Makes a virtual environment with torch and Phalanx on a machine that has neither.

    python3 bootstrap.py --gpu .venv --with horovod

One file, standard library only, for Python 3.6 and newer on Linux, macOS and Windows: whatever python a machine has
can start it; the environment itself gets one from 3.10. `phalanx env create` is the same.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

OLDEST, NEWEST = 10, 13  # minor versions of Python 3 that are looked for
RECORD = "phalanx-env.json"
UNFINISHED = "phalanx-env.unfinished"  # lies in an environment until it is whole
PIN = "phalanx-torch.txt"  # constraint that keeps the torch that was chosen
TORCH = "torch>=2.7"
# Horovod is built against the installed torch, so pip must give it no environment of its own; its build needs these.
HOROVOD_NEEDS = ("setuptools<81", "wheel", "packaging", "cmake<4", "cloudpickle", "psutil", "pyyaml", "cffi")
HOROVOD_VARIABLES = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
# torch's headers need C++17 and Horovod's build says C++14, which no compiler flag overrides: CMake's own table does.
# And newer compilers' headers don't include each other as those of its time did.
HOROVOD_TOOLCHAIN = """\
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
set(CMAKE_CXX11_STANDARD_COMPILE_OPTION "-std=c++17")
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++17")
set(CMAKE_CXX_FLAGS_INIT "-include string -include cstdint -include stdexcept -include memory -include functional")
"""
TOOLCHAIN = "phalanx-horovod.cmake"  # the same as a file of the environment
# Where modules say that CUDA and NCCL are.
HOROVOD_HOMES = {
    "HOROVOD_CUDA_HOME": ("CUDA_HOME", "EBROOTCUDA"),
    "HOROVOD_NCCL_HOME": ("NCCL_HOME", "EBROOTNCCL"),
}
PIP_VARIABLES = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
_BUILD = re.compile(r"(HOROVOD_\w+|CC|CXX|CUDA_HOME|NCCL_HOME|ROCM_PATH|TORCH_CUDA_ARCH_LIST|MAX_JOBS)")
_PROBE = """
import json, platform, torch
from importlib.metadata import distributions
cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
build = "cuda " + cuda if cuda else "rocm " + hip if hip else "cpu"
versions = {item.metadata["Name"]: item.version for item in distributions()}
print(json.dumps({"python": platform.python_version(), "torch": build, "versions": versions}))
"""


class BootstrapError(Exception):
    """What is wrong, what was expected, and what to change; `code` is the exit code, a failed command's own."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Wanted(NamedTuple):
    """`kind` is cpu or gpu. `phalanx` is what pip installs as Phalanx: a folder, a wheel, a URL or a name."""

    kind: str
    phalanx: str = "phalanx"
    extras: Tuple[str, ...] = ()
    wheelhouse: Optional[str] = None
    index_url: Optional[str] = None
    torch_index_url: Optional[str] = None
    constraints: Tuple[str, ...] = ()

    @property
    def horovod(self) -> bool:
        return any(is_horovod(word) for word in self.extras)


class Python(NamedTuple):
    """Words that start an interpreter, and its version such as 3.11.2."""

    words: Tuple[str, ...]
    version: str


def create(path: Path, wanted: Wanted, python: Optional[str] = None, dry_run: bool = False) -> None:
    """Make the environment, each command printed; what a failure leaves is removed. `dry_run` only prints.

    Raises BootstrapError if `path` is in use, there is no fit python, a command fails, or torch is the wrong build.
    """
    path = Path(os.path.abspath(str(path)))
    check_target(path)
    check_wheelhouse(wanted.wheelhouse)
    found = find_python(python)
    print("python %s: %s" % (found.version, " ".join(found.words)), flush=True)
    for name, text in horovod_variables(os.environ, wanted.kind).items() if wanted.horovod else ():
        print("variable %s=%s" % (name, text), flush=True)
    if dry_run:
        print("\n".join("+ " + show(words) for words in commands(path, wanted, found)))
        return
    existed = path.is_dir()
    _claim(path)
    try:
        _build(path, wanted, found)
    except BaseException:
        _remove(path, keep_folder=existed)
        raise


def _build(path: Path, wanted: Wanted, python: Python) -> None:
    environ = build_environment(os.environ, wanted)
    environ["VIRTUAL_ENV"] = str(path)
    environ.setdefault("CMAKE_TOOLCHAIN_FILE", str(path / TOOLCHAIN))
    environ["PATH"] = str(python_in(path).parent) + os.pathsep + environ.get("PATH", os.defpath)
    own = str(python_in(path))
    for number, words in enumerate(commands(path, wanted, python)):
        is_torch = number == 2  # after venv and pip
        if is_torch:
            refuse_cuda(own, words[words.index("install") + 1 :], wanted, environ)
        run(words, environ)
        if is_torch:
            (path / PIN).write_text("torch==%s\n" % _version_of(own, "torch", environ), encoding="utf-8")
            (path / TOOLCHAIN).write_text(HOROVOD_TOOLCHAIN, encoding="utf-8")
    finish(path, wanted.kind, wanted.wheelhouse, environ=environ)


# What is installed, in which order


def commands(path: Path, wanted: Wanted, python: Python, system: str = os.name) -> List[List[str]]:
    """All that is run, in its order: venv, pip's calls, and Horovod's own report where it is among the extras."""
    own = python_in(path, system)
    made = [[*python.words, "-m", "venv", str(path)]]
    made += [[str(own), "-m", "pip", "install", *words] for words in pip_steps(wanted, str(path))]
    return made + ([[str(own.with_name("horovodrun")), "--check-build"]] if wanted.horovod else [])


def pip_steps(wanted: Wanted, venv: str) -> List[List[str]]:
    """Arguments of `pip install`, call by call: pip, torch, Phalanx, extras; what comes after torch keeps it."""
    if wanted.wheelhouse:
        where = torch_where = later = ["--no-index", "--find-links", wanted.wheelhouse]
    else:
        where = ["--index-url", wanted.index_url] if wanted.index_url else []
        special = wanted.torch_index_url
        torch_where = ["--index-url", special] if special else where
        later = where + (["--extra-index-url", special] if special else [])
    given = constraint_options(wanted)
    pinned = ["--constraint", os.path.join(venv, PIN), *given, *later]
    own = ours(wanted)
    steps = [["--upgrade", "pip", *where], [TORCH, *given, *torch_where]]
    steps.append([with_extras(wanted.phalanx, ["torch", *own]), *pinned])
    for word in wanted.extras:
        if is_horovod(word):
            steps += [list(HOROVOD_NEEDS) + pinned, ["--no-build-isolation", word, *pinned]]
        elif word not in own:
            steps.append([word, *pinned])
    return [["--no-cache-dir", *step] for step in steps]


def constraint_options(wanted: Wanted) -> List[str]:
    return [word for file in wanted.constraints for word in ("--constraint", file)]


def ours(wanted: Wanted) -> List[str]:
    """Those of the extras that are Phalanx's own; Horovod needs more than an extra."""
    known = own_extras()
    return [word for word in wanted.extras if word in known and not is_horovod(word)]


def is_horovod(requirement: str) -> bool:
    """Whether pip would build Horovod for it: a name, a URL or an archive's path."""
    return re.search(r"(^|[/\\])horovod(?![a-z])", requirement.lower()) is not None


def with_extras(source: str, extras: Sequence[str]) -> str:
    """`phalanx` as `phalanx[torch]`, also for folders, wheels and `phalanx @ URL`."""
    name, at, url = source.partition(" @ ")
    return "%s[%s]%s%s" % (name, ",".join(dict.fromkeys(extras)), at, url)


def phalanx_source(here: Optional[Path] = None) -> str:
    """Where this Phalanx is from: the checkout that this file lies in, the URL that it was installed from, its name."""
    package = (here or Path(__file__)).resolve().parent
    if _is_checkout(package.parent.parent):
        return str(package.parent.parent)
    for note in package.parent.glob("phalanx-*.dist-info/direct_url.json"):
        origin = json.loads(note.read_text(encoding="utf-8"))
        vcs = origin.get("vcs_info")
        if vcs:
            return "phalanx @ %s+%s@%s" % (vcs["vcs"], origin["url"], vcs["commit_id"])
        return "phalanx @ %s" % origin["url"]
    return "phalanx"


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and re.search(r'(?m)^name = "phalanx"$', project.read_text(encoding="utf-8")) is not None


def own_extras() -> List[str]:
    """Names of Phalanx's own extras, from the checkout or the installation that this file lies in."""
    package = Path(__file__).resolve().parent
    if _is_checkout(package.parent.parent):
        text = (package.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
        table = re.split(r"(?m)^\[", text.partition("[project.optional-dependencies]")[2])[0]
        return re.findall(r"(?m)^(\w+) = \[", table)
    for metadata in package.parent.glob("phalanx-*.dist-info/METADATA"):
        return re.findall(r"(?m)^Provides-Extra: (\S+)$", metadata.read_text(encoding="utf-8"))
    return []


def build_environment(environ: Mapping[str, str], wanted: Wanted) -> Dict[str, str]:
    """What pip runs under: none of the settings that lead it out of the environment, and Horovod's build variables."""
    own = {name: text for name, text in environ.items() if name not in ("PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")}
    own.update(PIP_VARIABLES)
    if wanted.horovod:
        own.update(horovod_variables(own, wanted.kind))
    return own


def horovod_variables(environ: Mapping[str, str], kind: str) -> Dict[str, str]:
    """Build variables that `environ` doesn't decide already."""
    chosen = dict(HOROVOD_VARIABLES, HOROVOD_WITH_GLOO="1")
    if kind == "gpu":
        chosen["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        for name, sources in HOROVOD_HOMES.items():
            for source in reversed(sources):
                chosen[name] = environ.get(source) or chosen.get(name, "")
    return {name: text for name, text in chosen.items() if text and not decided(name, environ)}


def decided(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the user has set a build variable, or its opposite."""
    opposite = name.replace("_WITHOUT_", "_WITH_") if "_WITHOUT_" in name else name.replace("_WITH_", "_WITHOUT_")
    return bool(environ.get(name) or environ.get(opposite))


def refuse_cuda(python: str, words: List[str], wanted: Wanted, environ: Dict[str, str]) -> None:
    """Ask pip which torch it would install before gigabytes of CUDA arrive where the CPU's was wanted."""
    if wanted.kind != "cpu" or wanted.torch_index_url:
        return
    ask = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *words]
    done = subprocess.run(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, check=False)
    if done.returncode != 0:
        return  # the installation itself will say why
    found = [item["metadata"] for item in json.loads(done.stdout.decode("utf-8"))["install"]]
    cuda = [item for item in found if re.match(r"(nvidia|cuda)[-_]", item["name"])]
    torch = [item["version"] for item in found if item["name"] == "torch"]
    if cuda or any("+cu" in version for version in torch):
        raise BootstrapError(
            "--cpu, but pip would install torch %s for CUDA with %d packages of NVIDIA's: give the index of the CPU "
            "builds (the one that PyTorch's installation page names) by --torch-index-url URL or in pip's own "
            "configuration, or a folder of wheels by --wheelhouse DIR" % (" ".join(torch), len(cuda))
        )


# The end: is it what was wanted? The record


def finish(
    path: Path,
    kind: str,
    wheelhouse: Optional[str] = None,
    load: Optional[Sequence[str]] = None,
    environ: Optional[Mapping[str, str]] = None,
) -> None:
    """Check torch's and Horovod's builds and write the record; `load` are the modules that the job's settings name.

    Raises BootstrapError if torch can't be imported or is not for `kind`, or Horovod lacks what it was built for.
    """
    environ = os.environ if environ is None else environ
    found = json.loads(_output([str(python_in(path)), "-c", _PROBE], environ).splitlines()[-1])
    check_torch(found["torch"], kind, sys.platform)
    build = {name: text for name, text in sorted(environ.items()) if _BUILD.fullmatch(name) and text}
    if "horovod" in found["versions"]:
        check_horovod(_output([str(python_in(path).with_name("horovodrun")), "--check-build"], environ), build)
    record = {
        "v": 1,
        "kind": kind,
        "python": found["python"],
        "torch": found["torch"],
        "versions": found["versions"],
        "modules": [name for name in environ.get("LOADEDMODULES", "").split(":") if name],
        "load": None if load is None else list(load),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wheelhouse": wheelhouse,
        "build": build,
    }
    (path / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if (path / UNFINISHED).exists():
        (path / UNFINISHED).unlink()
    print("environment: %s (python %s, torch for %s)" % (path, found["python"], found["torch"]), flush=True)


def check_torch(build: str, kind: str, system: str) -> None:
    """Raise BootstrapError if torch's `build` isn't for `kind`; a Mac's GPU needs no build of its own."""
    if kind == "cpu" and build != "cpu":
        raise BootstrapError(
            "--cpu, but torch is built for %s: give the index of the CPU builds by --torch-index-url URL" % build
        )
    if kind == "gpu" and build == "cpu" and system != "darwin":
        raise BootstrapError(
            "--gpu, but torch is built for the CPU only: give an index of GPU builds by --torch-index-url URL"
        )


def check_horovod(report: str, build: Mapping[str, str]) -> None:
    """Raise BootstrapError if `horovodrun --check-build` lacks what the build variables asked for."""
    wanted = ["PyTorch"] if build.get("HOROVOD_WITH_PYTORCH") == "1" else []
    wanted += [name for name in ("MPI", "Gloo") if build.get("HOROVOD_WITH_" + name.upper()) == "1"]
    wanted += ["NCCL"] if build.get("HOROVOD_GPU_OPERATIONS") == "NCCL" else []
    built = re.findall(r"\[X\] (\w+)", report)
    missing = [name for name in wanted if name not in built]
    if missing:
        raise BootstrapError(
            "Horovod was built without %s, which HOROVOD_* variables asked for; its build's output above says why. "
            "horovodrun --check-build:\n%s" % (" and ".join(missing), report.strip())
        )


# Pythons, paths and commands


def python_in(venv: Path, system: str = os.name) -> Path:
    return venv / "Scripts" / "python.exe" if system == "nt" else venv / "bin" / "python"


def python_candidates(system: str = os.name) -> List[Tuple[str, ...]]:
    """What may start a fit python: the one that runs this, then PATH's; Windows has a launcher for all of them."""
    minors = range(NEWEST, OLDEST - 1, -1)
    if system == "nt":
        named = [("py", "-3.%d" % minor) for minor in minors]  # type: List[Tuple[str, ...]]
        return [(sys.executable,), *named, ("python",)]
    return [(sys.executable,), ("python3",), *(("python3.%d" % minor,) for minor in minors), ("python",)]


def find_python(wanted: Optional[str] = None) -> Python:
    """The first fit interpreter, or `wanted`. Raises BootstrapError that says what was found and how to get one."""
    seen = []
    for words in [(wanted,)] if wanted else python_candidates():
        problem, version = _probe(words)
        if not problem:
            return Python(words, version)
        if version or wanted:
            seen.append("%s %s" % (" ".join(words), problem))
    looked = "python3, python3.%d to python3.%d" % (NEWEST, OLDEST)
    raise BootstrapError(
        "no Python from 3.%d with its module venv (%s; looked for %s). On a cluster, load a module that has one "
        "(module avail python, module load ...); else install one, or give its path by --python EXE"
        % (OLDEST, "; ".join(dict.fromkeys(seen)) or "none at all", wanted or looked)
    )


def _probe(words: Sequence[str]) -> Tuple[str, str]:
    """What is wrong with an interpreter, if anything, and its version."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3]); sys.stdout.flush(); import venv, ensurepip"
    command = shutil.which(words[0])
    if command is None:
        return "is not there", ""
    try:
        done = subprocess.run(
            [command, *words[1:], "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "can't be run (%s)" % error, ""
    version = done.stdout.decode("ascii", "replace").strip()
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return "is no python", ""
    if tuple(map(int, version.split(".")[:2])) < (3, OLDEST):
        return "is %s, too old" % version, version
    lacking = "is %s without venv and ensurepip (Debian: apt-get install python3-venv)" % version
    return lacking if done.returncode else "", version


def check_target(path: Path) -> None:
    """Raise BootstrapError unless `path` is free: nothing is ever overwritten."""
    if (path / UNFINISHED).exists():
        what = "holds an environment that is being made, or whose making was broken off: wait, or remove it"
    elif (path / "pyvenv.cfg").exists():
        what = "is a virtual environment already: use it, remove it first"
    elif path.is_dir() and any(path.iterdir()):
        what = "is a folder with files in it: empty it first"
    elif os.path.lexists(str(path)) and not path.is_dir():
        what = "is no folder: remove it first"
    else:
        return
    raise BootstrapError("%s %s, or give another PATH" % (path, what))


def check_wheelhouse(folder: Optional[str]) -> None:
    if folder and not any(Path(folder).glob("*.whl")):
        raise BootstrapError(
            "--wheelhouse %s: expected a folder of wheels; fill it by `pip download --dest %s ...` on a machine with "
            "network" % (folder, folder)
        )


def _claim(path: Path) -> None:
    """Take the folder before anybody else does."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / UNFINISHED).open("x"):
            pass
    except FileExistsError:
        check_target(path)
        raise
    except OSError as error:
        raise BootstrapError("%s can't be made (%s): give another PATH" % (path, error.strerror))


def _remove(path: Path, keep_folder: bool) -> None:
    for item in path.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(str(item), ignore_errors=True)
        else:
            item.unlink()
    if not keep_folder:
        path.rmdir()


def show(words: Sequence[str], system: str = os.name) -> str:
    """A command as its shell reads it, without passwords of URLs."""
    text = subprocess.list2cmdline(words) if system == "nt" else " ".join(map(shlex.quote, words))
    return re.sub(r"(://)[^/@\s]+@", r"\1***@", text)


def run(words: List[str], environ: Mapping[str, str]) -> None:
    """Print and run a command; raises BootstrapError if it fails. It doesn't outlive us."""
    print("+ " + show(words), flush=True)
    try:
        process = subprocess.Popen(words, env=dict(environ), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BootstrapError("%s can't be run: %s" % (words[0], error.strerror))
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code != 0:
        code = code if code > 0 else 128 - code  # ended by a signal: as shells count
        raise BootstrapError(
            "this command failed with exit code %d, see its output above: %s" % (code, show(words)), code
        )


def _output(words: List[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environ), check=False)
    except OSError as error:
        raise BootstrapError("%s can't be run: %s" % (words[0], error.strerror))
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise BootstrapError("%s failed with exit code %d:\n%s" % (show(words[:2]), done.returncode, text.strip()))
    return text


def _version_of(python: str, package: str, environ: Mapping[str, str]) -> str:
    code = "from importlib.metadata import version; print(version(%r))" % package
    return _output([python, "-c", code], environ).strip()


# The command line


def parser(prog: Optional[str] = None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=prog,
        description="Make a virtual environment with torch and Phalanx. It overwrites nothing, prints each command, "
        "and a failure leaves nothing behind.",
    )
    kind = made.add_mutually_exclusive_group(required=True)
    kind.add_argument("--cpu", dest="kind", action="store_const", const="cpu", help="torch for the CPU")
    kind.add_argument("--gpu", dest="kind", action="store_const", const="gpu", help="torch for GPUs")
    made.add_argument("path", metavar="PATH", nargs="?", default=".venv", help="the new folder; default .venv")
    made.add_argument(
        "--with", dest="extras", metavar="EXTRA", nargs="+", action="append", default=[],
        help="extras of Phalanx (such as demo) and packages in pip's form (such as horovod), installed in this order",
    )  # fmt: skip
    made.add_argument("--wheelhouse", metavar="DIR", help="install from this folder of wheels, without network")
    made.add_argument("--python", metavar="EXE", help="interpreter of the environment; unset: this or PATH's")
    made.add_argument("--index-url", metavar="URL", help="package index; unset: as pip is configured")
    made.add_argument("--torch-index-url", metavar="URL", help="package index of torch alone")
    made.add_argument(
        "--constraint", "--pip-constraint", dest="constraints", metavar="FILE", action="append", default=[],
        help="pip's constraints: versions to take; may be given several times",
    )  # fmt: skip
    made.add_argument("--phalanx", metavar="WHAT", help="folder, wheel or URL of Phalanx; unset: where this is from")
    made.add_argument("--dry-run", action="store_true", help="only print the commands")
    made.add_argument("--finish", action="store_true", help=argparse.SUPPRESS)  # the end of `phalanx env job`
    made.add_argument("--loaded", metavar="MODULES", help=argparse.SUPPRESS)
    return made


def wanted_of(args: Any) -> Wanted:
    """Raises BootstrapError for an extra that can't be one."""
    extras = [_extra(word) for group in args.extras for word in group]
    return Wanted(
        kind=args.kind,
        phalanx=args.phalanx or ("phalanx" if args.wheelhouse else phalanx_source()),
        extras=tuple(dict.fromkeys(word for word in extras if word != "torch")),
        wheelhouse=args.wheelhouse and os.path.abspath(args.wheelhouse),
        index_url=args.index_url,
        torch_index_url=args.torch_index_url,
        constraints=tuple(map(_constraint, args.constraints)),
    )


def _constraint(file: str) -> str:
    """A URL as it is, a file by its whole path."""
    if "://" in file:
        return file
    if not os.path.isfile(file):
        raise BootstrapError("there is no file of constraints %s: give the path or URL of one in pip's form" % file)
    return os.path.abspath(file)


def _extra(word: str) -> str:
    """A name or requirement as it is, a file by its whole path."""
    if "://" in word or not re.search(r"[/\\]", word):
        return word
    path, bracket, names = word.partition("[")
    if not os.path.exists(path):
        raise BootstrapError(
            "--with %s: there is no such file, and it is no package's name; PATH comes before --with" % word
        )
    return os.path.abspath(path) + bracket + names


def carry_out(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    """Do what a command line says. Raises BootstrapError."""
    args = parser(prog).parse_args(argv)
    if args.finish:
        load = None if args.loaded is None else [name for name in args.loaded.split(":") if name]
        finish(Path(args.path), args.kind, args.wheelhouse, load)
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        create(Path(args.path), wanted_of(args), args.python, args.dry_run)
    finally:
        signal.signal(signal.SIGTERM, before)
    if not args.dry_run:
        print("activate it: " + activation(Path(args.path)))


def activation(venv: Path, system: str = os.name) -> str:
    return str(venv / "Scripts" / "activate") if system == "nt" else "source %s" % (venv / "bin" / "activate")


def _terminated(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    try:
        carry_out()
    except BootstrapError as error:
        print("error: %s" % error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
