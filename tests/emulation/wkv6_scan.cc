#include "emulation.h"

#include "wkv6_chunk.cc"
#include "wkv6_scan.cu"
