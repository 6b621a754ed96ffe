"""Schedules of the learning rate."""

import argparse

import optax


def make_schedule(args: argparse.Namespace) -> optax.Schedule:
    """The learning rate of each step, from 0 on: in --warmup steps it rises linearly from a
    hundredth to the whole of --learning-rate, and then

    - cosine: falls along half a cosine until the last step;
    - constant: stays;
    - wsd (warm up, stay, decay): stays, and falls linearly in the last --decay-share of the steps.

    It falls to --final-learning-rate, or to a twentieth of --learning-rate if that is None.
    """
    peak, final = args.learning_rate, args.final_learning_rate
    final = peak / 20 if final is None else final
    if args.schedule == "cosine":
        end = max(args.steps, args.warmup + 1)
        return optax.warmup_cosine_decay_schedule(peak / 100, peak, args.warmup, end, final)
    parts = [optax.linear_schedule(peak / 100, peak, args.warmup), optax.constant_schedule(peak)]
    boundaries = [args.warmup]
    if args.schedule == "wsd" and (falling := round(args.decay_share * args.steps)):
        parts.append(optax.linear_schedule(peak, final, falling))
        boundaries.append(max(args.warmup, args.steps - falling))
    return optax.join_schedules(parts, boundaries)
