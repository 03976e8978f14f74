"""GPU kernels beside serving: compiled ahead of time, checked and timed on a device, tuned."""
