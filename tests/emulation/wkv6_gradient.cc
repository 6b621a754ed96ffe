#include "emulation.h"

#include "wkv6/gradients.cu"
