"""Readers of what tools print on hosts, on outputs recorded on real machines, each with its source."""

from __future__ import annotations

import pytest

from dslaunch.preflight.reading import dcgmi, ethtool, ibstat, kernel, nvidia_smi

# Recorded: Azure/azhpc-diagnostics issue 73 (2022): a V100 of an NDv2 with two links down.
NVLINK_DOWN = """\
GPU 3: Tesla V100-SXM2-32GB (UUID: ...)
         Link 0: 25.781 GB/s
         Link 1: 25.781 GB/s
         Link 2: 25.781 GB/s
         Link 3: <inactive>
         Link 4: 25.781 GB/s
         Link 5: <inactive>
"""
# Recorded: NVIDIA/nccl-tests issue 228 (2024): two GPUs of an HGX A100, links after a tab.
NVLINK_A100 = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-ff8a40d4-abc6-08d1-f939-15848b5d4e05)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
\t Link 11: 25 GB/s
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-0c512562-871f-8257-6187-b5ae1b986d5e)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
"""
# Recorded: leptonai/gpud pull request 46 (2024): dmesg --ctime of an H100 host.
XID_APPLICATION = """\
[Fri Aug 30 11:11:22 2024] nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping \
further processing
[Fri Aug 30 11:43:09 2024] NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp \
Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter
[Fri Aug 30 11:43:14 2024] NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, \
errorString CTX SWITCH TIMEOUT, Info 0x58005
"""
# Recorded: NVIDIA/NVSentinel issue 155 (2025): a GPU that is lost at boot, without an Xid, over several lines.
FALLEN = """\
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""
# Recorded: NVIDIA/open-gpu-kernel-modules issue 1150 (2026): the journal's form, GPUs that NVLink errors stopped.
XID_JOURNAL = """\
kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149
kernel: NVRM: Xid (PCI:0000:ed:00): 45, pid=1818992, name=python3, Ch 0000000c caused by previous Xid 145
"""
# Recorded: Mellanox/network-operator issue 249 (2021): linked, and without a subnet manager's address.
IB_DOWN = """\
CA 'mlx5_7'
        CA type: MT4124
        Number of ports: 1
        Firmware version: 20.28.4000
        Hardware version: 0
        Node GUID: 0x9aecdde4e1e642ba
        System image GUID: 0x043f720300df3e00
        Port 1:
                State: Down
                Physical state: LinkUp
                Rate: 200
                Base lid: 65535
                LMC: 0
                SM lid: 1
                Capability mask: 0x2651ec48
                Port GUID: 0x9aecdde4e1e642ba
                Link layer: InfiniBand
"""
# Recorded: linux-rdma/rdma-core pull request 847 (2020): two ports, one of them disabled.
IB_TWO_PORTS = """\
CA 'mlx4_0'
\tCA type: MT4099
\tNumber of ports: 2
\tFirmware version: 2.42.5000
\tHardware version: 1
\tNode GUID: 0xf4521403007be0e0
\tSystem image GUID: 0xf4521403007be0e3
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 10
\t\tBase lid: 38
\t\tLMC: 0
\t\tSM lid: 13
\t\tCapability mask: 0x02594868
\t\tPort GUID: 0xf4521403007be0e1
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 56
"""
# Recorded: bb-qq/aqc111 issue 1 (2019).
ETHTOOL_UP = """\
Settings for eth2:
        Supported ports: [ TP MII ]
        Supported link modes:   100baseT/Full
                                1000baseT/Full
        Advertised auto-negotiation: Yes
        Speed: 1000Mb/s
        Duplex: Full
        Port: MII
        Current message level: 0x00000007 (7)
                               drv probe link
        Link detected: yes
"""
# Recorded: gnubee-git/GnuBee_Docs issue 85 (2018), with the last line that ethtool ends with.
ETHTOOL_HALF = "        Speed: 10Mb/s\n        Duplex: Half\n        Link detected: yes\n"
# Recorded: a fibre port without a cable, as published in a tutorial of ethtool.
ETHTOOL_DOWN = """\
Settings for em1:
        Supported ports: [ FIBRE ]
        Speed: Unknown!
        Duplex: Unknown! (255)
        Link detected: no
"""
# Recorded: a tutorial of DCGM's memory test on an RTX 2060 (dcgmi diag -r 4, page /gpu-memtest).
DCGMI_FAIL = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
| Persistence Mode          | Fail                                           |
| Error                     | Persistence mode for GPU 0 is currently disab  |
|                           | led. The DCGM diagnostic requires peristence   |
|                           | mode to be enabled. Enable persistence mode b  |
|                           | y running "nvidia-smi -i <gpuId> -pm 1 " as r  |
|                           | oot.                                           |
| Environment Variables     | Pass                                           |
+-----  Integration  -------+------------------------------------------------+
| PCIe                      | Skip - All                                     |
+---------------------------+------------------------------------------------+
"""


def test_nvlinks_up_and_down() -> None:
    assert nvidia_smi.links(NVLINK_DOWN) == {3: (25.781, 25.781, 25.781, None, 25.781, None)}
    assert nvidia_smi.links(NVLINK_A100) == {0: (25.0, 25.0, 25.0), 1: (25.0, 25.0)}


def test_rows_of_gpus_and_what_is_no_row() -> None:
    # Made up in nvidia-smi's form: no publication has these columns. Names are those of real machines.
    text = (
        "0, GPU-ff8a40d4, NVIDIA A100-SXM4-80GB, 81920, 535.154.05, 0\n"
        "1, GPU-0c512562, NVIDIA GeForce RTX 3090, 24576, 535.154.05, [N/A]\n"
        "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"
    )
    first, second = nvidia_smi.gpus(text)
    assert (first.name, first.memory_mib, first.ecc_errors) == ("NVIDIA A100-SXM4-80GB", 81920, 0)
    assert (second.index, second.driver, second.ecc_errors) == (1, "535.154.05", None)
    assert nvidia_smi.throttled("0, 0x0000000000000001\n1, 0x0000000000000048\n2, [N/A]\n") == {
        0: (), 1: ("hardware slowdown", "hardware thermal slowdown"), 2: (),
    }  # fmt: skip
    (app,) = nvidia_smi.apps("4054862, GPU-ff8a40d4, 990, python train.py --sizes 1, 2\n")
    assert (app.pid, app.memory_mib, app.name) == (4054862, 990, "python train.py --sizes 1, 2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (XID_APPLICATION, [(13, None), (109, None)]),
        (FALLEN, [(79, None)]),
        (XID_JOURNAL, [(45, None), (45, None)]),
        ("[  5.25] NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", [(94, 5.25)]),
    ],
)
def test_xids(text: str, expected: list[tuple[int, float | None]]) -> None:
    assert [(event.number, event.seconds) for event in kernel.events(text)] == expected


def test_other_messages_of_the_kernel() -> None:
    # The kernel's own words: mm/oom_kill.c and block/blk-core.c.
    text = (
        "[   99.5] Out of memory: Killed process 4242 (python3) total-vm:73400320kB, anon-rss:67108864kB\n"
        "[  100.5] I/O error, dev nvme0n1, sector 1234 op 0x0:(READ) flags 0x0\n"
    )
    assert [(event.kind, event.text) for event in kernel.events(text)] == [
        ("out_of_memory", "python3"), ("disk", "I/O error, dev nvme0n1"),
    ]  # fmt: skip


def test_infiniband_ports() -> None:
    (port,) = ibstat.ports(IB_DOWN)
    assert (port.adapter, port.state, port.physical, port.gbit_per_s, port.up) == (
        "mlx5_7", "Down", "LinkUp", 200.0, False,
    )  # fmt: skip
    first, second = ibstat.ports(IB_TWO_PORTS)
    assert (first.number, first.physical, first.up) == (1, "Disabled", False)
    assert (second.number, second.gbit_per_s, second.up) == (2, 56.0, True)


def test_ethernet_links() -> None:
    assert ethtool.link(ETHTOOL_UP) == ethtool.Link(up=True, gbit_per_s=1.0, half_duplex=False)
    assert ethtool.link(ETHTOOL_HALF) == ethtool.Link(up=True, gbit_per_s=0.01, half_duplex=True)
    assert ethtool.link(ETHTOOL_DOWN) == ethtool.Link(up=False, gbit_per_s=0.0, half_duplex=False)
    assert ethtool.link("netlink error: No such device\n") is None


def test_a_diagnosis_that_fails() -> None:
    (failed,) = dcgmi.failed(DCGMI_FAIL)
    assert failed.startswith("Persistence Mode: Persistence mode for GPU 0 is currently disabled.")
    assert failed.endswith("as root.")
    assert dcgmi.failed(DCGMI_FAIL.replace("| Fail ", "| Pass ")) == ()
