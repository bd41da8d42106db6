// COMM_CORE_VECTORISED: a loop over elements is compiled for several processors, and the loader takes the one that
// fits. Nothing that could be fused into one rounding (a product that is added to) may stand in it, since results are
// the same on every processor. g++ 11 does not know these names of processors; and under the thread sanitizer the
// choice itself, which the loader makes before anything else, would call a sanitizer that is not there yet.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define COMM_CORE_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define COMM_CORE_VECTORISED
#endif
