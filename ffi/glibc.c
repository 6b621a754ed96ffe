// Where Zig links the modules: libstdc++ asks glibc, from version 2.32 on, whether the process has a single
// thread. For older versions the answer is no.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
