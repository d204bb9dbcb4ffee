"""The plan and the prediction: plain dataclasses, and their JSON.

`Plan` holds decisions (what a review is about), `Prediction` what the ledgers say of them. Both are frozen,
free of clocks and paths of this machine, and serialise to the same bytes everywhere. The runtime reads
plan.json through this package, so it imports nothing of dslaunch but the errors.
"""

from __future__ import annotations

from dslaunch.planfile.plan import (
    PLAN_SCHEMA,
    ClusterPlan,
    ComponentPlan,
    EnginePlan,
    FilesPlan,
    LauncherPlan,
    Plan,
    ProgramPlan,
    StagePlan,
    SupervisionPlan,
    TrainingPlan,
)
from dslaunch.planfile.prediction import (
    PREDICTION_SCHEMA,
    Band,
    Calibration,
    Candidate,
    CheckpointInterval,
    EarlierRun,
    Finding,
    MemoryGib,
    Prediction,
    Search,
    StagePrediction,
    WorstRank,
)
from dslaunch.planfile.preflight import PreflightPlan
from dslaunch.planfile.text import (
    JOINED_SCHEMA,
    joined,
    plan_from_json,
    prediction_from_json,
    preflight_from_json,
    to_json,
)

__all__ = [
    "JOINED_SCHEMA",
    "PLAN_SCHEMA",
    "PREDICTION_SCHEMA",
    "Band",
    "Calibration",
    "Candidate",
    "CheckpointInterval",
    "ClusterPlan",
    "ComponentPlan",
    "EarlierRun",
    "EnginePlan",
    "FilesPlan",
    "Finding",
    "LauncherPlan",
    "MemoryGib",
    "Plan",
    "Prediction",
    "PreflightPlan",
    "ProgramPlan",
    "Search",
    "StagePlan",
    "StagePrediction",
    "SupervisionPlan",
    "TrainingPlan",
    "WorstRank",
    "joined",
    "plan_from_json",
    "prediction_from_json",
    "preflight_from_json",
    "to_json",
]
