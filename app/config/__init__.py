"""All settings, as one frozen tree that is read once at the edge. Nothing here reads the environment.

A config says what was asked. What is measured (how many KV blocks fit, how long the model's context is) is returned
by the room that measured it and never written back.
"""

from app.config.api import ApiConfig, KeyConfig, KeysConfig
from app.config.application import ApplicationConfig, IngressConfig
from app.config.base import GIB, Name, Settings
from app.config.batches import BatchesConfig, WebhooksConfig
from app.config.engine import (
    MAX_LOADED_ADAPTERS,
    CacheConfig,
    EngineConfig,
    KvType,
    ModelConfig,
    SpeculationConfig,
    StepLogConfig,
)
from app.config.mistakes import mistakes_of, shown
from app.config.models import ServedModelConfig
from app.config.pipelines import (
    CascadeStepConfig,
    EmbedStepConfig,
    EnsembleStepConfig,
    GenerateStepConfig,
    NamedByStep,
    PipelineConfig,
    PipelineStepConfig,
    RankingStepConfig,
    RerankStepConfig,
    RouteStepConfig,
    named_by,
)
from app.config.replicas import AutoscalingConfig, GroupConfig, ReplicasConfig
from app.config.scheduler import (
    PRESETS,
    AdaptiveConfig,
    BucketedConfig,
    ContinuousConfig,
    DeadlineConfig,
    DynamicConfig,
    FairConfig,
    FcfsConfig,
    HybridConfig,
    Policy,
    PolicyConfig,
    PriorityConfig,
    SchedulerConfig,
    SjfConfig,
    SortedConfig,
    StaticConfig,
    Strategy,
    StrategyConfig,
    TargetsConfig,
)
from app.config.tree import branches_of, branches_within, choice_of, leaves, names_of, parameters_of

__all__ = [
    "GIB",
    "MAX_LOADED_ADAPTERS",
    "PRESETS",
    "AdaptiveConfig",
    "ApiConfig",
    "ApplicationConfig",
    "AutoscalingConfig",
    "BatchesConfig",
    "BucketedConfig",
    "CacheConfig",
    "CascadeStepConfig",
    "ContinuousConfig",
    "DeadlineConfig",
    "DynamicConfig",
    "EmbedStepConfig",
    "EngineConfig",
    "EnsembleStepConfig",
    "FairConfig",
    "FcfsConfig",
    "GenerateStepConfig",
    "GroupConfig",
    "HybridConfig",
    "IngressConfig",
    "KeyConfig",
    "KeysConfig",
    "KvType",
    "ModelConfig",
    "Name",
    "NamedByStep",
    "PipelineConfig",
    "PipelineStepConfig",
    "Policy",
    "PolicyConfig",
    "PriorityConfig",
    "RankingStepConfig",
    "ReplicasConfig",
    "RerankStepConfig",
    "RouteStepConfig",
    "SchedulerConfig",
    "ServedModelConfig",
    "Settings",
    "SjfConfig",
    "SortedConfig",
    "SpeculationConfig",
    "StaticConfig",
    "StepLogConfig",
    "Strategy",
    "StrategyConfig",
    "TargetsConfig",
    "WebhooksConfig",
    "branches_of",
    "branches_within",
    "choice_of",
    "leaves",
    "mistakes_of",
    "named_by",
    "names_of",
    "parameters_of",
    "shown",
]
