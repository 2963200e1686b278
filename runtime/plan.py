"""The cost model of speculation as pure functions (docs/contract.md)."""


def expected_tokens(acceptance: float, gamma: int) -> float:
    """E = (1 - a^(gamma + 1)) / (1 - a): tokens per round of a chain with acceptance a (Leviathan et al. 2023, eq. 1)."""
    if acceptance >= 1.0:
        return gamma + 1.0
    return float((1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance))


def speedup(acceptance: float, gamma: int, draft_cost: float, verify_cost: float, host_cost: float = 0.0) -> float:
    """S = E / (d + v + h) with d = gamma x `draft_cost`; every cost in units of a one-token step of the target."""
    return expected_tokens(acceptance, gamma) / (gamma * draft_cost + verify_cost + host_cost)


def break_even(gamma: int, draft_cost: float, verify_cost: float, host_cost: float = 0.0) -> float | None:
    """Acceptance at which a round of `gamma` drafts is as fast as plain decoding; None if even a = 1 loses."""
    if speedup(1.0, gamma, draft_cost, verify_cost, host_cost) < 1.0:
        return None
    if speedup(0.0, gamma, draft_cost, verify_cost, host_cost) >= 1.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # E grows with a: bisection to the last bit
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, gamma, draft_cost, verify_cost, host_cost) >= 1.0 else (middle, high)
    return high
