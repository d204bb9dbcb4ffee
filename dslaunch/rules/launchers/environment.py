"""Environment variables of NCCL, PyTorch and CUDA in scripts and environment files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.script import Command
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.launchers.torchrun import given, option, torchruns
from dslaunch.rules.registry import Edit, Hit, Severity, rule
from dslaunch.rules.scripts.tree import INIT, scripts
from dslaunch.rules.settings import Settings
from dslaunch.rules.slips import is_slip

_NCCL = "NVIDIA NCCL 2.27, environment variables"
_TORCH = "pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp 2.2 to 2.13"
_NAMES = """
    NCCL_ALGO NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_BUFFSIZE NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS
    NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_CONF_FILE
    NCCL_CROSS_NIC NCCL_CTA_POLICY NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE
    NCCL_DEBUG_SUBSYS NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_DMABUF_ENABLE NCCL_GRAPH_DUMP_FILE
    NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_GDRCOPY_ENABLE NCCL_HOSTID NCCL_IBEXT_DISABLE
    NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT
    NCCL_IB_DATA_DIRECT NCCL_IB_DISABLE NCCL_IB_ECE_ENABLE NCCL_IB_FIFO_TC NCCL_IB_GID_INDEX NCCL_IB_HCA
    NCCL_IB_MERGE_NICS NCCL_IB_MERGE_VFS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY NCCL_IB_QPS_PER_CONNECTION
    NCCL_IB_RETRY_CNT NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL
    NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_IGNORE_DISABLED_P2P
    NCCL_LAUNCH_MODE NCCL_LAUNCH_ORDER_IMPLICIT NCCL_L1_SHARED_MEMORY_CARVEOUT NCCL_LL_THRESHOLD
    NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MAX_NRINGS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS
    NCCL_MIN_NRINGS NCCL_MNNVL_ENABLE NCCL_NCHANNELS_PER_NET_PEER NCCL_NET NCCL_NET_FORCE_FLUSH
    NCCL_NET_FORCE_MERGE NCCL_NET_GDR_C2C NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_MERGE_LEVEL
    NCCL_NET_OVERHEAD NCCL_NET_PLUGIN NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD
    NCCL_NTHREADS NCCL_NVB_DISABLE NCCL_NVLS_ENABLE NCCL_NVLSTREE_MAX_CHUNKSIZE NCCL_OOB_NET_ENABLE
    NCCL_OOB_NET_IFNAME NCCL_P2P_DISABLE NCCL_P2P_DIRECT_DISABLE NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE
    NCCL_P2P_NVL_CHUNKSIZE NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_PXN_LEVEL NCCL_P2P_READ_ENABLE
    NCCL_P2P_USE_CUDA_MEMCPY NCCL_PLUGIN_P2P NCCL_PROFILER_PLUGIN NCCL_PROGRESS_APPENDOP_FREQ NCCL_PROTO
    NCCL_PXN_C2C NCCL_PXN_DISABLE NCCL_RAS_ADDR NCCL_RAS_ENABLE NCCL_RAS_TIMEOUT_FACTOR
    NCCL_REPORT_CONNECT_PROGRESS NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE NCCL_SET_THREAD_NAME
    NCCL_SHARP_MAX_COMMS NCCL_SHM_DISABLE NCCL_SHM_LOCALITY NCCL_SHM_USE_CUDA_MEMCPY
    NCCL_SINGLE_RING_THRESHOLD NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
    NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SYM_CTAS NCCL_SYM_KERNEL NCCL_THREAD_THRESHOLDS
    NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE NCCL_TREE_THRESHOLD NCCL_TUNER_CONFIG_PATH NCCL_TUNER_PLUGIN
    NCCL_WIN_ENABLE NCCL_WORK_FIFO_DEPTH NCCL_GIN_ENABLE NCCL_GIN_TYPE NCCL_ENV_PLUGIN NCCL_NVLS_NCHANNELS
    NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS NCCL_SHARP_DISABLE
    NCCL_CGA_CLUSTER_SIZE NCCL_LIBRARY NCCL_ROOT NCCL_HOME NCCL_VERSION NCCL_LIB_DIR NCCL_INCLUDE_DIR NCCL_DIR
    NCCL_PATH TORCH_NCCL_ABORT_IN_DESTROY_PG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS
    TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_COORD_CHECK_MILSEC TORCH_NCCL_CUDA_EVENT_CACHE
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DESYNC_DEBUG
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN
    TORCH_NCCL_NAN_CHECK TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_RANKS_PER_ROOT TORCH_NCCL_RETHROW_CUDA_ERRORS
    TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_NCCL_TRACE_CPP_STACK TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC TORCH_NCCL_EXTRA_DUMP_ON_EXEC TORCH_NCCL_CONNECT_TIMEOUT"""
_KNOWN = frozenset(_NAMES.split())
_RENAMED: Mapping[str, tuple[str, str]] = {
    "NCCL_ASYNC_ERROR_HANDLING": ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "torch 2.2"),
    "NCCL_BLOCKING_WAIT": ("TORCH_NCCL_BLOCKING_WAIT", "torch 2.2"),
    "NCCL_DESYNC_DEBUG": ("TORCH_NCCL_DESYNC_DEBUG", "torch 2.2"),
    "NCCL_ENABLE_TIMING": ("TORCH_NCCL_ENABLE_TIMING", "torch 2.2"),
    "NCCL_MIN_NRINGS": ("NCCL_MIN_NCHANNELS", "NCCL 2.5"),
    "NCCL_MAX_NRINGS": ("NCCL_MAX_NCHANNELS", "NCCL 2.5"),
    "NCCL_LL_THRESHOLD": ("NCCL_PROTO", "NCCL 2.7"),
    "NCCL_TREE_THRESHOLD": ("NCCL_ALGO", "NCCL 2.7"),
    "NCCL_IB_CUDA_SUPPORT": ("NCCL_NET_GDR_LEVEL", "NCCL 2.4"),
}
_SLOW: Mapping[tuple[str, str], str] = {
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP instead of InfiniBand or RoCE",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node talk through host memory instead of NVLink",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a node that have no NVLink talk over the network",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "GPUs don't reach the network directly",
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for; it is meant for debugging",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "every collective is waited for on the host",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked on all ranks first",
    ("NCCL_DEBUG", "TRACE"): "every call of NCCL is logged",
}
_LEVELS = frozenset({"VERSION", "WARN", "INFO", "ABORT", "TRACE", "NONE"})
_ALLOCATOR = frozenset({
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "roundup_power2_divisions", "throw_on_cudamalloc_oom", "use_uvm",
})  # fmt: skip


def settings_of(files: FileSet) -> Iterator[tuple[File, Assignment]]:
    """Every told assignment of a shell or environment file, but for what a message talks of."""
    for file in files.of("shell", "env", "deepspeed_env"):
        talks = {each.at.line: each.at.column for each in _talking(file)}
        for each in file.assignments:
            if is_told(each.value) and each.at.column <= talks.get(each.at.line, each.at.column):
                yield file, each


_TALK = re.compile(r"echo|printf|die|fail|usage|(?i:\w*(?:log|err|warn|info|debug)\w*)")
"""Commands, and names of a script's own functions, that print their words."""


def _talking(file: File) -> Iterator[Command]:
    commands = file.value.commands if file.kind == "shell" and file.value is not None else ()
    return (command for command in commands if _TALK.fullmatch(command.words[0].text))


@rule("env.unknown-variable", severity="wrong", raised_by="nobody", evidence=f"{_NCCL}; {_TORCH}")
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A misspelt variable of NCCL or PyTorch: nothing reads it."""
    for file, each in settings_of(files):
        if not each.name.startswith(("NCCL_", "TORCH_NCCL_")) or each.name in _KNOWN or each.name in _RENAMED:
            continue
        alike = difflib.get_close_matches(each.name, _KNOWN, n=3, cutoff=0.75)
        near = [name for name in alike if is_slip(each.name, name)]
        if each.name in _NEVER and not _is_own(file, each):
            message = f"{each.name} is no variable of NCCL or PyTorch: nothing reads it."
            yield Hit(file.name, each.at, message, _NEVER[each.name])
            continue
        given = near and re.search(rf"\b{near[0]}\b", file.text)
        if near and not given and not _is_own(file, each):
            message = f"{each.name} is no variable of NCCL or PyTorch: nothing reads it."
            edit = Edit(each.at, each.name, near[0])
            yield Hit(file.name, each.at, message, f"Write {near[0]}.", edit=edit)


_NEVER = {"NCCL_TIMEOUT": "The timeout is init_process_group's: timeout=timedelta(...)."}
"""Names that are often taken for one of NCCL's, and where the setting is."""


def _is_own(file: File, each: Assignment) -> bool:
    """Whether it is a variable of the script's own, which it reads and doesn't export."""
    before = file.lines[each.at.line - 1][: each.at.column - 1]
    return "export" not in before and re.search(rf"\$\{{?{each.name}\b", file.text) is not None


@rule("env.renamed-variable", severity="deprecated", raised_by="nobody", evidence=f"{_NCCL}; {_TORCH}")
def renamed(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable under its old name."""
    for file, each in settings_of(files):
        if each.name in _RENAMED:
            new, since = _RENAMED[each.name]
            yield Hit(file.name, each.at, f"{each.name} is {new} since {since}.", f"Use {new}.")


@rule("env.slow-variable", severity="slow", raised_by="nobody", evidence=f"{_NCCL}; torch 2.13 documentation")
def slow(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A setting for debugging, or for broken hardware, left in."""
    for file, each in settings_of(files):
        effect = _SLOW.get((each.name, each.value.upper()))
        if effect:
            message = f"{each.name}={each.value}: {effect}."
            yield Hit(file.name, each.at, message, "Take it out unless the hardware needs it.")


@rule("env.debug-level", severity="wrong", raised_by="nobody", evidence=f"{_NCCL}: NCCL_DEBUG; torch 2.13, run")
def debug_level(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An NCCL_DEBUG that NCCL doesn't know, which logs nothing, or a level that torch refuses."""
    for file, each in settings_of(files):
        if each.name == "NCCL_DEBUG" and each.value and each.value.upper() not in _LEVELS:
            message = f"NCCL_DEBUG={each.value} is no level: NCCL logs nothing."
            yield Hit(file.name, each.at, message, "Use VERSION, WARN, INFO or TRACE.")
        elif each.name == "TORCH_DISTRIBUTED_DEBUG" and each.value and each.value.upper() not in _DEBUGS:
            message = f"{each.name}={each.value}: torch raises ValueError when it sets up the process group."
            yield Hit(file.name, each.at, message, "Use OFF, INFO or DETAIL.", "error", "torch")


_DEBUGS = ("OFF", "INFO", "DETAIL")
_LAST_PORT = 65535


@rule("env.port", severity="error", raised_by="torch", evidence="torch 2.13, run; torchrun 2.13, run")
def port(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A MASTER_PORT, or a port of torchrun's, that is above 65535."""
    fix = f"Write one from 1024 to {_LAST_PORT}."
    told: set[str] = set()
    for file, each in settings_of(files):
        if each.name == "MASTER_PORT" and each.value.isdecimal() and int(each.value[:9]) > _LAST_PORT:
            told.add(file.name)
            message = f"MASTER_PORT={each.value} is no port: torch raises ValueError."
            starts = file.kind != "shell" or bool(file.value.launches)
            yield Hit(file.name, each.at, message, fix, None if starts else "info")
    for file, _, launcher in torchruns(files):
        if launcher.options.has("--standalone"):
            continue  # it takes a free one
        for name in ("rdzv-endpoint",) if given(launcher, "rdzv-endpoint") else ("master-port",):
            number = (option(launcher, name) or "").rpartition(":")[2]
            if file.name not in told and number.isdecimal() and int(number[:9]) > _LAST_PORT:
                at = launcher.options.position(f"--{name}", f"--{name.replace('-', '_')}")
                message = f"--{name} names the port {number}, which is none: torchrun raises ValueError."
                yield Hit(file.name, at, message, fix)


@rule("env.loopback", severity="hang", raised_by="nobody", evidence=f"{_NCCL}: NCCL_SOCKET_IFNAME")
def loopback(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """NCCL or gloo told to use the loopback interface, on several nodes."""
    for file, each in settings_of(files):
        interface = each.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if interface and each.value in ("lo", "=lo") and (settings.nodes or 1) > 1:
            message = f"{each.name}={each.value} reaches no other node, and there are {settings.nodes}."
            yield Hit(
                file.name,
                each.at,
                message,
                "Name the interface of the network, or ^lo,docker to leave two out.",
            )


@rule("env.number", severity="error", raised_by="torch", evidence="torch 2.13, libgomp 14, run")
def number(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A calculation written as text, such as WORLD_SIZE=$NODES*8, where a program reads a number."""
    for file in files.of("shell", "env", "deepspeed_env"):
        lines = file.lines
        commands = file.value.commands if file.kind == "shell" and file.value is not None else ()
        in_front = {each.at for command in commands for each in command.environment}
        for each in file.assignments:
            if each.name not in _NUMBERS or not _CALCULATION.fullmatch(each.value):
                continue
            before = lines[each.at.line - 1][: each.at.column - 1]
            if file.kind != "shell" or "export" in before or each.at in in_front:
                message = f"{each.name} is the text {each.value}: the shell calculates only within $(( ))."
                severity: Severity | None = "slow" if each.name == "OMP_NUM_THREADS" else None
                yield Hit(file.name, each.at, message, f"Write {each.name}=$(({each.value})).", severity)


_NUMBERS = frozenset({
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "NODE_RANK", "OMP_NUM_THREADS", "RANK",
    "WORLD_SIZE",
})  # fmt: skip
_OPERAND = r"(?:\d+|\$\{?\w+\}?|\$\([^()]*\))"
_CALCULATION = re.compile(rf"{_OPERAND}(?:\s*[*/+%-]\s*{_OPERAND})+")


@rule("env.interface", severity="error", raised_by="torch", evidence=f"torch 2.13 with gloo, run; {_NCCL}")
def interface(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An address where the name of a network interface is wanted, or GLOO_SOCKET_IFNAME in NCCL's spelling."""
    for file, each in settings_of(files):
        if each.name not in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            continue
        if _ADDRESS.fullmatch(each.value):
            message = f"{each.name}={each.value} is an address, and the name of an interface is looked for."
            yield Hit(file.name, each.at, message, "Write its name, such as eth0 (`ip addr` lists them).")
        elif each.value[:1] in ("^", "=") and each.name != "NCCL_SOCKET_IFNAME":
            message = f"{each.name}={each.value}: ^ and = are NCCL's; gloo looks for an interface of that name."
            fix = "Write the interface's whole name, such as eth0."
            yield Hit(file.name, each.at, message, fix, "info" if _is_of_nccl_alone(files) else None)


def _is_of_nccl_alone(files: FileSet) -> bool:
    """Whether every process group that the scripts here make is one of NCCL's."""
    made = [(script, call) for script in scripts(files) for call in script.called(INIT)]
    return bool(made) and all(script.constant(call.argument("backend", 0)) == "nccl" for script, call in made)


_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+(?:/\d+)?")


@rule(
    "env.local-rank",
    severity="error",
    raised_by="torch",
    evidence="Open MPI 5 documentation, environment variables; torch 2.13 documentation: set_device",
)
def local_rank(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """LOCAL_RANK taken from what mpirun counts over all nodes: from the second node on there is no such GPU."""
    for file in files.of("shell") if settings.nodes != 1 else ():
        if "#SBATCH" in file.text:
            continue  # slurm.local-rank
        for each in file.assignments:
            if each.name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES") and _AMONG_ALL.fullmatch(each.value):
                message = (
                    f"{each.name}={each.value} counts on over all nodes: the second has no GPU of that number."
                )
                severity: Severity = "error" if settings.nodes else "info"
                fix = f"Write {each.name}=$OMPI_COMM_WORLD_LOCAL_RANK."
                yield Hit(file.name, each.at, message, fix, severity)


_AMONG_ALL = re.compile(r"[\"']?\\?\$\{?(?:OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK)\}?[\"']?")


@rule(
    "env.allocator",
    severity="error",
    raised_by="torch",
    evidence="pytorch/pytorch:c10/core/AllocatorConfig.cpp 2.13, run",
)
def allocator(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option of PyTorch's allocator that it doesn't know: the first use of a GPU raises."""
    for file, each in settings_of(files):
        if each.name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
            continue
        for part in re.sub(r"\[[^\]]*\]", "", each.value).split(","):
            name = part.partition(":")[0].strip()
            if name and name not in _ALLOCATOR:
                near = difflib.get_close_matches(name, _ALLOCATOR, n=1)
                fix = f"Did you mean {near[0]}?" if near else "Take it out."
                known, equals, wanted = name.partition("=")
                fix = f"Write {known}:{wanted}." if equals and known in _ALLOCATOR else fix
                yield Hit(file.name, each.at, f"{each.name}: the allocator has no option {name!r}.", fix)
