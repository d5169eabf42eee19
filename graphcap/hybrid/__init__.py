"""The reference hybrid MoE model: Mamba-2, attention, dense MLP and MoE layers in the order that a pattern gives.

Plain torch; the library's first client, and the ground for its tests.
"""

from graphcap.hybrid.attention import AttentionLayer
from graphcap.hybrid.checkpoint import load, save
from graphcap.hybrid.config import HybridConfig
from graphcap.hybrid.conversion import Conversion, convert
from graphcap.hybrid.expert_parallel import ExpertParallel
from graphcap.hybrid.gpt import GPTModel
from graphcap.hybrid.layers import HybridLayer, MLPLayer
from graphcap.hybrid.mamba import MambaLayer
from graphcap.hybrid.model import HybridChunk, HybridModel, HybridOutput
from graphcap.hybrid.moe import MoELayer, shard_experts
from graphcap.hybrid.mtp import MTPBlock, MTPDepth
from graphcap.hybrid.overlap import OverlapSchedule, SchedulePlan
from graphcap.hybrid.overlap_pipeline import PipelineOverlap
from graphcap.hybrid.pattern import Pattern, PatternLayer, Segment
from graphcap.hybrid.stack import LayerGroup
from graphcap.hybrid.tracker import LayerTracker, Metric, TrackerReport
from graphcap.hybrid.wgrad import delayed_wgrad

__all__ = [
    "Pattern",
    "PatternLayer",
    "Segment",
    "HybridConfig",
    "HybridModel",
    "HybridOutput",
    "HybridChunk",
    "HybridLayer",
    "MambaLayer",
    "AttentionLayer",
    "MLPLayer",
    "MoELayer",
    "ExpertParallel",
    "shard_experts",
    "delayed_wgrad",
    "OverlapSchedule",
    "SchedulePlan",
    "PipelineOverlap",
    "LayerGroup",
    "MTPBlock",
    "MTPDepth",
    "LayerTracker",
    "TrackerReport",
    "Metric",
    "GPTModel",
    "save",
    "load",
    "convert",
    "Conversion",
]
