"""The operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and above.

Nothing here is imported unless the device is a GPU, or a test or check asks for it by name. What each
file holds is said in NOTES.md.
"""
