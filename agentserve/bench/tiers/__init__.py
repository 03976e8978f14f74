"""`agentserve bench tiers`: what tiers give and cost. Moving KV; resuming a session; steps beside them."""
