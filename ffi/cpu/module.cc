#include "rwkv_jax/module.h"

#include "handler.h"

NB_MODULE(_cpu, module) { rwkv_jax::Export<rwkv_jax::cpu::Cpu>(module); }
