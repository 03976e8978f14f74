"""The data plane of the tiers: bytes of KV blocks on the device, in a host slab, and in LMDB on disk.

Nothing here decides. `mover.Mover` carries out `tiering.types.Transfer` orders on threads of its own.
"""
