"""The delta rule with a decay, which `gated_delta_rule` and `kimi_delta_attention` compute.

`gated_delta_rule` has one decay for each head, and `kimi_delta_attention` one for each key channel.
"""
