"""All settings, as one frozen tree that is read once at startup. No module here reads environment variables.

A config holds only the operator's settings. Measured values, such as the number of KV blocks that fit or the model's
context length, are returned by the package that measures them and are never written into a config.
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
    TierConfig,
)
from app.config.mistakes import mistakes_of, shown, suggestion
from app.config.models import PricesConfig, ServedModelConfig
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
    DynamicConfig,
    HybridConfig,
    Policy,
    PolicyConfig,
    SchedulerConfig,
    SortedConfig,
    StaticConfig,
    Strategy,
    StrategyConfig,
    TargetsConfig,
    WholeBatchesConfig,
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
    "DynamicConfig",
    "EmbedStepConfig",
    "EngineConfig",
    "EnsembleStepConfig",
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
    "PricesConfig",
    "RankingStepConfig",
    "ReplicasConfig",
    "RerankStepConfig",
    "RouteStepConfig",
    "SchedulerConfig",
    "ServedModelConfig",
    "Settings",
    "SortedConfig",
    "SpeculationConfig",
    "StaticConfig",
    "StepLogConfig",
    "Strategy",
    "StrategyConfig",
    "TargetsConfig",
    "TierConfig",
    "WebhooksConfig",
    "WholeBatchesConfig",
    "branches_of",
    "branches_within",
    "choice_of",
    "leaves",
    "mistakes_of",
    "named_by",
    "names_of",
    "parameters_of",
    "shown",
    "suggestion",
]
