"""The strategy that a config names."""

from __future__ import annotations

from app.config import (
    AdaptiveConfig,
    BucketedConfig,
    ContinuousConfig,
    DynamicConfig,
    HybridConfig,
    StaticConfig,
    StrategyConfig,
)
from app.engine.strategies.adaptive import Adaptive
from app.engine.strategies.bucketed import Bucketed
from app.engine.strategies.continuous import Continuous, Hybrid
from app.engine.strategies.static import Dynamic, Static
from app.engine.strategies.strategy import BatchingStrategy


def strategy_of(config: StrategyConfig) -> BatchingStrategy:
    """A new strategy, with nothing of an earlier one's memory."""
    match config:
        case StaticConfig():
            return Static(config)
        case DynamicConfig():
            return Dynamic(config)
        case BucketedConfig():
            return Bucketed(config)
        case AdaptiveConfig():
            return Adaptive(config)
        case HybridConfig():
            return Hybrid(config)
        case ContinuousConfig():
            return Continuous(config)
