"""The activation of the channel mixings."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


@jax.custom_vjp
def relu_squared(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """max(x, 0)^2.

    The derivative is 2 sqrt(y) for the result y, so that the backward pass needs nothing but the
    result, which the product after it keeps already.
    """
    return jnp.square(jax.nn.relu(x))


def _forward(x: Array) -> tuple[Array, Array]:
    y = relu_squared(x)
    return y, y


def _backward(y: Array, dy: Array) -> tuple[Array]:
    return (gradient(y, dy),)


def gradient(y: Float[Array, "*shape"], dy: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2 sqrt(y) dy, for y = max(x, 0)^2. At 0 its own derivative by y is 0, and not infinity."""
    zero, wide = y == 0, y.astype(jnp.float32)
    root = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, wide)))
    return (2 * root * dy.astype(jnp.float32)).astype(y.dtype)


relu_squared.defvjp(_forward, _backward)
