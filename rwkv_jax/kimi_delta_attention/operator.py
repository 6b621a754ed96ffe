"""The operator: its operands and its implementations."""

from rwkv_jax._delta_rule.recurrence import operator

OPERATOR = operator("kimi_delta_attention", "BTHK")
