"""The operator: its operands and its implementations."""

from rwkv_jax._delta_rule.recurrence import operator

OPERATOR = operator("gated_delta_rule", "BTH")
