"""The experiment of `sim/experiment` on the real engine in this process, lengths scaled."""
