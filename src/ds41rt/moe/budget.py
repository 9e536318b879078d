"""How many experts each tier holds, from what was asked for and what there is. Pure arithmetic: touches no memory."""

from dataclasses import dataclass

from ds41rt.errors import ConfigError

# For graphs, modules, tables and the driver: a share of what is free, and no more than this.
_RESERVE_NBYTES = 512 << 20
_RESERVE_SHARE = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user gave, None where nothing was: slots count for more than GiB. 0 means none."""

    expert_slots: int | None = None
    expert_cache_gib: float | None = None
    host_slots: int | None = None
    host_cache_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: free on the device, of which `sequences_nbytes` are wanted for sequences, and available on the host.
    `unified`: both are the same memory."""

    free_nbytes: int
    sequences_nbytes: int
    host_available_nbytes: int
    unified: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots of each tier, together at most one for every expert, and where the two numbers come from."""

    device_slots: int
    host_slots: int
    device_reason: str
    host_reason: str


def plan_budget(asked: Asked, memory: Memory, *, n_experts: int, top_k: int, slot_nbytes: int) -> Budget:
    """Slots for `n_experts` experts of `slot_nbytes` each. Raises `ConfigError` if one layer's picks do not fit.

    By default the device takes all that is free but the sequences' part, scratch for a host tier and a reserve, and the
    host tier what is missing then, up to half of the host's available memory. Where device and host share one memory a
    second tier would gain nothing: the default is none, and the device takes no more than the host has available.
    """
    device, device_reason = _device_slots(asked, memory, slot_nbytes, top_k)
    device = min(device, n_experts)
    host, host_reason = _host_slots(asked, memory, n_experts - device, slot_nbytes)
    host = min(host, n_experts - device)
    if device + host < top_k:
        what = f"{device} expert slots" if not host else f"{device} expert slots and {host} host slots"
        raise ConfigError(
            f"{what} are fewer than one token's working set of {top_k} (top-k): the expert budget is {device_reason}, "
            f"{host_reason} on the host, at {slot_nbytes} bytes an expert; raise --expert-slots (expert_slots), "
            "--host-slots (host_slots), DS41RT_EXPERT_CACHE_GIB (expert_cache_gib) or DS41RT_HOST_CACHE_GIB "
            "(host_cache_gib)"
        )
    return Budget(device, host, device_reason, host_reason)


def _device_slots(asked: Asked, memory: Memory, slot_nbytes: int, top_k: int) -> tuple[int, str]:
    if asked.expert_slots is not None:
        return _not_negative("expert slots", asked.expert_slots), f"{asked.expert_slots} slots, as asked"
    if asked.expert_cache_gib is not None:
        nbytes = int(asked.expert_cache_gib * 2**30)
        return max(0, nbytes // slot_nbytes - 1), f"{asked.expert_cache_gib} GiB, as asked"  # slot 0 is reserved
    free = min(memory.free_nbytes, memory.host_available_nbytes) if memory.unified else memory.free_nbytes
    reserve = min(_RESERVE_NBYTES, free // _RESERVE_SHARE)
    nbytes = max(0, free - memory.sequences_nbytes - reserve)
    reason = f"{nbytes} bytes of {free} free, less {memory.sequences_nbytes} for two sequences and a reserve"
    # slot 0 is reserved; a host tier needs room for copies of a layer's picks
    return max(0, nbytes // slot_nbytes - 1 - (0 if memory.unified else top_k)), reason


def _host_slots(asked: Asked, memory: Memory, n_missing: int, slot_nbytes: int) -> tuple[int, str]:
    if asked.host_slots is not None:
        return _not_negative("host slots", asked.host_slots), f"{asked.host_slots} slots, as asked,"
    if asked.host_cache_gib is not None:
        return int(asked.host_cache_gib * 2**30) // slot_nbytes, f"{asked.host_cache_gib} GiB, as asked,"
    if asked.expert_slots is not None:
        return 0, "none"
    if memory.unified:
        return 0, "none (the device shares its memory)"
    nbytes = memory.host_available_nbytes // 2
    return min(n_missing, nbytes // slot_nbytes), f"{nbytes} bytes, half of what is available,"


def _not_negative(what: str, n: int) -> int:
    if n < 0:
        raise ConfigError(f"{n} {what}: there cannot be fewer than none")
    return n
