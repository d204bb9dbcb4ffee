"""What one host can say of itself. This file is sent to a Python on it, on standard input.

It stands alone: Python 3.9 and its standard library, whatever is installed there. It judges nothing: it prints
one line of JSON, which `facts.py` reads. Every part is asked in a thread of its own, so that a folder or a tool
that hangs costs that part alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SCHEMA = "dslaunch.probe/1"
MARK = "dslaunch-probe "
"""Begins the line of JSON, for shells that greet."""
_GPU_FIELDS = "index,uuid,name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"
_THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The name since driver 535, and the older one."""
_DISTRIBUTIONS = (
    "torch", "deepspeed", "megatron-core", "transformers", "accelerate", "flash-attn", "transformer-engine",
)  # fmt: skip
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_KERNEL_WORDS = (
    "Xid", "fallen off the bus", "Out of memory: Killed", "I/O error", "Remounting filesystem read-only",
)  # fmt: skip
_CODE_ENDINGS = (".py", ".sh", ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".txt", ".cu", ".cpp", ".h")
_CODE_FILES, _CODE_NAMED = 5000, 200
_LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "runs", "wandb", "checkpoints"}

Request = dict[str, Any]


def main(request: Request, host: str) -> None:
    """Ask every part, wait until `request["deadline_s"]` seconds have passed, print, and end.

    Args:
        host: this host's name as the launching machine knows it.
    """
    said: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def ask(name: str, part: Callable[[Request, str], Any]) -> None:
        try:
            said[name] = part(request, host)
        except Exception as error:  # said to the launching machine, which names it
            failed[name] = f"{type(error).__name__}: {error}"

    end = time.monotonic() + request["deadline_s"]
    threads = _beside([(ask, (name, part)) for name, part in PARTS.items()])
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    silent = [name for index, name in enumerate(PARTS) if threads[index].is_alive()]
    answer = {"schema": SCHEMA, "said": dict(said), "failed": dict(failed), "silent": silent, "time": time.time()}
    sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in the kernel would keep the interpreter


def _beside(calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[threading.Thread]:
    """Running calls, which do not keep the interpreter."""
    threads = [threading.Thread(target=call, args=given, daemon=True) for call, given in calls]
    for thread in threads:
        thread.start()
    return threads


def _system(request: Request, host: str) -> dict[str, Any]:
    memory = _meminfo()
    limits = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "uptime": time.clock_gettime(time.CLOCK_BOOTTIME),
        "memory_available": memory.get("MemAvailable", 0) * 1024,
        "huge_pages": f"{memory.get('HugePages_Total', 0)} reserved, transparent ones {_transparent()}",
        "limits": {name: resource.getrlimit(number)[0] for name, number in limits.items()},
        "shm": _space("/dev/shm"),
        "addresses": _addresses(),
    }


def _meminfo() -> dict[str, int]:
    """/proc/meminfo: kB, or a count."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in stream)}


def _transparent() -> str:
    """always, madvise or never (Documentation/admin-guide/mm/transhuge.rst)."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as stream:
            return stream.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def _addresses() -> dict[str, str]:
    """IPv4 address by interface (SIOCGIFADDR, netdevice(7))."""
    import fcntl
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def _software(request: Request, host: str) -> dict[str, Any]:
    versions = {name: found for name in _DISTRIBUTIONS if (found := _version(name))}
    nccl = next((found for name in _NCCL if (found := _version(name))), "") or _system_nccl()
    cuda = _torch_cuda()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {**versions, **({"nccl": nccl} if nccl else {}), **({"cuda": cuda} if cuda else {})},
        "programs": {name: shutil.which(name, path=request["env"].get("PATH")) for name in request["programs"]},
    }


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _system_nccl() -> str:
    """Version of a libnccl outside of Python, where the loader finds one."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    major, rest = divmod(number.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _torch_cuda() -> str:
    """The CUDA that torch was built with; torch itself, which takes seconds, is not imported."""
    for folder in sys.path:
        path = os.path.join(folder or ".", "torch", "version.py")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as stream:
                lines = [line for line in stream if line.startswith("cuda")]
            return lines[0].split("=")[-1].strip().strip("'\"").replace("None", "") if lines else ""
    return ""


def _gpus(request: Request, host: str) -> dict[str, Any]:
    """What the tools print, unread. Without nvidia-smi only the device files are counted."""
    devices = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    name = "CUDA_VISIBLE_DEVICES"
    said: dict[str, Any] = {"devices": len(devices), "visible": request["env"].get(name, os.environ.get(name, ""))}
    if shutil.which("nvidia-smi"):
        form = "--format=csv,noheader,nounits"
        new, old = (f"--query-gpu=index,{field}" for field in _THROTTLE_FIELDS)
        apps = "--query-compute-apps=pid,gpu_uuid,used_memory,process_name"
        commands: dict[str, tuple[str, ...]] = {
            "smi": ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", form),
            "apps": ("nvidia-smi", apps, form),
            "throttled": ("nvidia-smi", new, form),
            "throttled_old": ("nvidia-smi", old, form),
            "nvlink": ("nvidia-smi", "nvlink", "--status"),
        }
        if request["dcgm"] and shutil.which("dcgmi"):
            commands["dcgmi"] = ("dcgmi", "diag", "-r", "1")
        said.update(_run_all(commands))
        if said["throttled"]["status"]:
            said["throttled"] = said["throttled_old"]
    return said


def _run_all(commands: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """What commands print, run beside each other: each nvidia-smi may wake the driver, which takes seconds."""
    said: dict[str, Any] = {}

    def run(name: str) -> None:
        said[name] = _run(*commands[name])

    for thread in _beside([(run, (name,)) for name in commands]):
        thread.join()
    return said


def _network(request: Request, host: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if shutil.which("ibstat"):
        said["ibstat"] = _run("ibstat")
    if shutil.which("ethtool"):
        names = [name for _, name in socket.if_nameindex() if os.path.exists(f"/sys/class/net/{name}/device")]
        said["ethtool"] = {name: _run("ethtool", name) for name in names[:16]}
    return said


def _kernel(request: Request, host: str) -> dict[str, Any]:
    """The kernel's messages that name a fault; the newest 200."""
    done = _run("dmesg")
    lines = [line for line in done["out"].splitlines() if any(word in line for word in _KERNEL_WORDS)]
    return {**done, "out": "\n".join(lines[-200:])}


def _run(*argv: str) -> dict[str, Any]:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        return {"status": 127, "out": "", "err": str(error)}
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return {"status": done.returncode, "out": out[:200000], "err": err[:2000]}


def _folders(request: Request, host: str) -> dict[str, Any]:
    return {kind: _folder(path) for kind, path in request["folders"].items() if path}


def _folder(path: str) -> dict[str, Any]:
    """The folder, or the nearest one above it that is there: its room, and whether a file can be written."""
    at = path
    while not os.path.exists(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    try:
        _write(at)
        fault = ""
    except OSError as error:
        fault = error.strerror or str(error)
    return {"path": path, "found": at, "fault": fault, "mount": _mount(at), **_space(at)}


def _write(folder: str) -> None:
    trial = os.path.join(folder, f".dslaunch-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")
    descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, b"\0" * 65536)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(trial)


def _space(path: str) -> dict[str, int]:
    """Bytes in all, and bytes that this user may still write."""
    try:
        found = os.statvfs(path)
    except OSError:
        return {"size": 0, "free": 0}
    return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _mount(path: str) -> dict[str, str]:
    """Source, point and type of the file system that holds `path` (/proc/mounts: the longest point, the last)."""
    best = ("", "", "")
    real = os.path.realpath(path)
    with open("/proc/mounts", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            source, point, kind = line.split()[:3]
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[1]):
                best = (source, point, kind)
    return {"source": best[0], "point": best[1], "kind": best[2]}


def _code(request: Request, host: str) -> dict[str, Any]:
    """A digest of the script's folder: sources and settings, no data, no hidden folder."""
    script = request["script"]
    if not script:
        return {}
    if not os.path.isfile(script):
        return {"missing": script}
    root = os.path.dirname(script)
    named: dict[str, str] = {}
    whole, count = hashlib.sha256(), 0
    for path in _sources(root):
        name = os.path.relpath(path, root)
        with open(path, "rb") as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
        whole.update(f"{name}\0{digest}\n".encode(errors="surrogateescape"))
        count += 1
        if count <= _CODE_NAMED:
            named[name] = digest[:8]
    return {"digest": whole.hexdigest()[:16], "files": count, "named": named, "mount": _mount(root)}


def _sources(root: str) -> Iterator[str]:
    """Up to 5,000 files in the order of their names."""
    left = _CODE_FILES
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in _LEFT_OUT
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )  # fmt: skip
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.endswith(_CODE_ENDINGS) and not name.startswith(".") and os.path.isfile(path):
                yield path
                left -= 1
                if not left:
                    return


def _names(request: Request, host: str) -> dict[str, Any]:
    """Which hosts' names are unknown here, which mean this host itself, and the addresses of two of them.

    Only what is out of order, since there are as many names on every host as there are hosts.
    """
    own = socket.gethostname()
    found = _look_up(list(dict.fromkeys([*request["names"], own])))
    others = [name for name in request["names"] if name != host.rpartition("@")[2]]
    known = {name: found[name] for name in others if found[name]}
    return {
        "unknown": [name for name in others if name not in known] if known else [],
        "none_known": bool(others) and not known,
        "itself": {name: each[0] for name, each in known.items() if all(map(_is_loopback, each))},
        "own": found[own],
        "master": found.get(request["names"][0], []) if request["names"] else [],
    }


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _look_up(names: list[str]) -> dict[str, list[str]]:
    """The addresses of each name; an empty list where it is unknown."""
    found: dict[str, list[str]] = {}

    def work() -> None:
        while names:
            try:
                name = names.pop()
            except IndexError:
                return
            try:
                found[name] = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
            except OSError:
                found[name] = []

    for thread in _beside([(work, ())] * 16):
        thread.join()
    return found


def _port(request: Request, host: str) -> dict[str, Any]:
    """Whether the rendezvous can listen here, and a port that is free; asked of the master alone."""
    if host != request["master"]:
        return {}
    # Of those that Linux gives to no connection (ip_local_port_range, ip(7)) before the ranks use it.
    free = next(port for port in random.sample(range(10_000, 32_000), 100) if not _taken(port))
    return {"free": free, "fault": _taken(request["port"])}


def _taken(port: int) -> str:
    """Why nobody can listen on the port; empty where one can."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            return str(error.strerror)
    return ""


def _locks(request: Request, host: str) -> list[dict[str, Any]]:
    """Locks of torch's extension builds, with the seconds since anything changed beside them.

    torch/utils/file_baton.py: the file's presence is the lock, and a builder that is killed leaves it.
    """
    default = os.path.join(os.path.expanduser("~"), ".cache", "torch_extensions")
    root = request["env"].get("TORCH_EXTENSIONS_DIR") or os.environ.get("TORCH_EXTENSIONS_DIR") or default
    found = []
    for folder, _, names in os.walk(root):
        if "lock" in names:
            newest = max(os.lstat(os.path.join(folder, name)).st_mtime for name in [*names, "."])
            found.append({"path": os.path.join(folder, "lock"), "quiet_s": time.time() - newest})
    return found


PARTS: dict[str, Callable[[Request, str], Any]] = {
    "system": _system,
    "software": _software,
    "gpus": _gpus,
    "network": _network,
    "kernel": _kernel,
    "folders": _folders,
    "code": _code,
    "names": _names,
    "port": _port,
    "locks": _locks,
}
