"""Variables that a fabric calls for: the files of conf/fabric, one a fabric."""

from __future__ import annotations

from dslaunch.schema.base import NonNegative, NonNegativeFloat, Part, VariableName, VariableValue


class FabricSetting(Part):
    """One variable of NCCL, libfabric or CUDA."""

    value: VariableValue
    """What it is set to: letters, digits and _.,:=^+/@- (quote a number in YAML)."""
    reason: str
    """What would be worse without it."""
    source: str
    """Where that is written."""
    from_gb_per_s: NonNegativeFloat = 0.0
    """Only from this bandwidth of the network on, GB/s."""
    from_gpus: NonNegative = 0
    """Only from this number of GPUs on."""


Fabric = dict[VariableName, FabricSetting]
