"""Step times: a mixed load on the real engine, the cost model fitted to it, and what it makes of others."""
