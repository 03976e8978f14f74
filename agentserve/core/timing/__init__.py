"""How long steps take: what a step consists of, the fit of the cost model, its refreshing, its file and log.

The model itself is `agentserve.core.cost.StepCost`.
"""
