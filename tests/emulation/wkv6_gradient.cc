#include "emulation.h"

#include "wkv6_gradient.cu"
