#include "emulation.h"

#include "wkv6/passes.cc"
#include "wkv6/scan.cu"
